"""Sets of experts as bits: uint8 [..., B] with B = ceil(E / 8); expert e is bit e % 8 of byte e // 8.

A dispatcher knows no order of the K experts, and bits need less memory than a map of E entries per token.
"""

from dataclasses import dataclass

import numpy as np


def bits_of_experts(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Return uint8 [T, L, B] of expert numbers [T, L, K]; numbers outside of 0..E-1 are left out."""
    bits = np.zeros((*experts.shape[:2], -(-num_experts // 8)), np.uint8)
    rows, layers = np.ogrid[: len(experts), : experts.shape[1]]
    for slot in range(experts.shape[2]):
        number = experts[..., slot].astype(np.int64)
        is_expert = (number >= 0) & (number < num_experts)
        number = np.where(is_expert, number, 0)
        bits[rows, layers, number >> 3] |= (is_expert << (number & 7)).astype(np.uint8)
    return bits


def map_of_bits(bits: np.ndarray) -> np.ndarray:
    """Return bool [..., 8 B]: True where the set has the expert."""
    return np.unpackbits(bits, axis=-1, bitorder="little").astype(bool)


def bits_of_map(routing_map: np.ndarray) -> np.ndarray:
    """Return uint8 [..., B] of bool [..., E], the inverse of ``map_of_bits``."""
    return np.packbits(routing_map, axis=-1, bitorder="little")


def list_experts(bits: np.ndarray) -> list[int]:
    """Return the expert numbers of one set, uint8 [B], in ascending order."""
    return np.flatnonzero(map_of_bits(bits)).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSets:
    """The experts of some rows of one micro-batch (or sequence) of T rows, in L layers."""

    bits: np.ndarray
    """uint8 [R, L, B]."""
    rows: np.ndarray
    """int64 [R], ascending: which of the T rows these are."""
    known: np.ndarray
    """bool [R, L], False where nothing is known: a missing row, a layer that was not called."""
    num_rows: int
    """T."""
    width: int = 1
    """Sequences beside each other: b where rows are [s, b] flattened, 1 where a row follows its token's last one."""

    @classmethod
    def of_experts(cls, experts: np.ndarray, num_experts: int, present: np.ndarray) -> "ExpertSets":
        """Return all rows of expert numbers [T, L, K]; rows without ``present`` bool [T] are not known."""
        known = np.broadcast_to(present[:, None], experts.shape[:2])
        return cls(bits_of_experts(experts, num_experts), np.arange(len(experts)), known, len(experts))

    @classmethod
    def unknown(cls, num_layers: int) -> "ExpertSets":
        """Return a record without rows."""
        return cls(np.zeros((0, num_layers, 1), np.uint8), np.arange(0), np.zeros((0, num_layers), bool), 0)
