"""``megarl verify A B`` and the causes, without a model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli import main
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces
from megarl.verify import Cause, compare_routes
from megarl.verify.expert_sets import ExpertSets, bits_of_experts, list_experts
from megarl.verify.trace_files import compare_traces

LAYERS, EXPERTS, TOP_K = (1, 3, 5), 64, 4


def traces(lengths: tuple[int, ...] = (80, 60, 100), seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random((length, 3, EXPERTS)).argsort(2)[..., :TOP_K] for length in lengths]


def of(arrays: list[np.ndarray], present: Callable[[int], np.ndarray] | None = None) -> list[RoutingTrace]:
    return [RoutingTrace(one, EXPERTS, present and present(len(one))) for one in arrays]


def one_expert_changed(one: np.ndarray) -> np.ndarray:
    """What a router with other rounding chooses: another last expert in a tenth of the rows."""
    changed = one.copy()
    for row in range(0, len(one), 10):
        changed[row, :, -1] = [next(e for e in range(EXPERTS) if e not in sets) for sets in one[row]]
    return changed


CHANGES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "shifted": (lambda one: np.concatenate([one[2:], one[:2]]), "2 places too early"),
    "shifted back": (lambda one: np.concatenate([one[:1], one[:-1]]), "1 place too late"),
    "transposed": (lambda one: one.reshape(5, -1, 3, 4).swapaxes(0, 1).reshape(-1, 3, 4), "transposed"),
    "constant": (lambda one: np.repeat(one[7:8], len(one), 0), "are all equal"),
    "zeros": (lambda one: np.broadcast_to(np.arange(4), one.shape), "[0, 1, 2, 3]"),
    "layer": (lambda one: one[:, [1, 2, 0]], "column 0 has those of column 1"),
    "renumbered": (lambda one: (one + 5) % EXPERTS, "other numbers"),
    "native": (one_expert_changed, "chose by itself"),
    "other": (lambda one: traces((len(one),), seed=9)[0], "would be chance"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("first", [0, 13])
def test_the_cause_is_that_of_all_rows_or_of_some(name: str, first: int) -> None:
    """A part of the rows is judged alone: those before ``first`` are right."""
    change, text = CHANGES[name]
    right = traces()
    used = [np.concatenate([one[:first], change(one)[first:]]) for one in right]
    report = compare_traces(of(right), of(used), LAYERS)
    assert {cause.kind for cause in report.causes} == {name.split()[0]}
    assert len(report.causes) == 3
    assert all(text in cause.text for cause in report.causes)
    assert (report.right[:, 0] >= first).all()


def one_of(change: Callable[[list[np.ndarray]], list[np.ndarray]], right: list[np.ndarray]) -> Cause:
    """The only kind of cause, that of the first wrong sequence."""
    report = compare_traces(of(right), of(change(right)), LAYERS)
    assert len({cause.kind for cause in report.causes}) == 1
    return report.causes[0]


@pytest.mark.parametrize("places", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("sign", [1, -1])
def test_shifts_of_up_to_64_rows_are_shifts_and_larger_ones_moved_rows(places: int, sign: int) -> None:
    cause = one_of(lambda right: [np.roll(one, sign * places, 0) for one in right], traces((700, 600)))
    if places > 64:
        assert cause.kind == "run"
        return
    late = "late" if sign > 0 else "early"
    assert f": rows stand {places} place{'s' if places > 1 else ''} too {late}" in cause.text
    assert cause.explained == pytest.approx(1 - places / 700, abs=0.02)


@pytest.mark.parametrize("step", [-2, -1, 1, 2])
@pytest.mark.parametrize("is_flat", [False, True], ids=["each sequence", "the flat rows"])
@pytest.mark.parametrize(
    ("lengths", "width", "unit"),
    [
        ((24,), 1, "place{} too {}"),  # packed [T], and [s, 1]
        ((16, 12, 20), 1, "place{} too {}"),
        *(
            ((s,) * b, b, f"token{{}} too {{}} in each of {b} sequences")
            for s, b in [(12, 2), (8, 3), (10, 5), (6, 64)]
        ),
    ],
)
def test_a_shift_is_counted_in_tokens_of_a_sequence(
    lengths: tuple[int, ...], width: int, unit: str, is_flat: bool, step: int
) -> None:
    """Rows of sequences beside each other, [s, b] flattened, or behind each other; a shift of [b, s] rows is flat."""
    sequences = traces(lengths, seed=step + 2)
    moved = [np.roll(one, step, 0) for one in sequences]
    if is_flat:
        moved = np.split(np.roll(np.concatenate(sequences), step, 0), np.cumsum(lengths)[:-1])

    def sets(parts: list[np.ndarray]) -> ExpertSets:
        rows = np.stack(parts, 1).reshape(-1, 3, TOP_K) if width > 1 else np.concatenate(parts)
        return replace(ExpertSets.of_experts(rows, EXPERTS, np.ones(len(rows), bool)), width=width)

    (cause,) = compare_routes([sets(moved)], [sets(sequences)], LAYERS).causes
    late = unit.format("s" * (abs(step) > 1), "late" if step > 0 else "early")
    assert cause.kind == "shifted"
    assert cause.text.endswith(f": rows stand {abs(step)} {late}")


@pytest.mark.parametrize("width", [2, 3, 15, 30])
def test_the_width_of_a_transposed_batch_is_told(width: int) -> None:
    cause = one_of(lambda right: [right[0].reshape(-1, width, 3, 4).swapaxes(0, 1).reshape(-1, 3, 4)], traces((60,)))
    assert (cause.kind, cause.explained) == ("transposed", 1.0)
    assert f"[{60 // width}, {width}]" in cause.text or f"[{width}, {60 // width}]" in cause.text


def test_rows_of_another_sequence_and_of_the_same_one_are_told_apart() -> None:
    right = traces((90, 80))
    other = one_of(lambda right: [np.concatenate([right[0][:20], right[1][3:23], right[0][40:]]), right[1]], right)
    assert (other.kind, other.explained) == ("run", 1.0)
    assert other.text.endswith("from row 20 on stand rows of other tokens, first row 3 of micro-batch 1")
    same = one_of(lambda right: [right[0], np.concatenate([right[1][:70], right[1][1:5], right[1][74:]])], right)
    assert same.text.endswith("from row 70 on stand rows of other tokens, first row 1 of this micro-batch")
    three = compare_traces(
        of(right), of([right[0], np.concatenate([right[1][:70], right[1][1:4], right[1][73:]])]), LAYERS
    )
    assert three.causes[0].kind == "other"  # too few rows have moved together


@pytest.mark.parametrize("layers", [(1, 0, 2), (0, 2, 2), (2, 2, 2)])
def test_columns_that_moved_are_named(layers: tuple[int, ...]) -> None:
    cause = one_of(lambda right: [one[:, list(layers)] for one in right], traces())
    moved = [f"column {to} has those of column {source}" for to, source in enumerate(layers) if to != source]
    assert cause.text.endswith(f"routes of other layers: {', '.join(moved)}")


def sets_of(maps: np.ndarray) -> ExpertSets:
    bits = np.packbits(maps, axis=2, bitorder="little")
    return ExpertSets(bits, np.arange(len(bits)), np.ones(bits.shape[:2], bool), len(bits))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("empty", lambda maps, _: np.zeros_like(maps)),
        ("fewer", lambda maps, rng: maps & (rng.random(maps.shape) < 0.5)),
        ("more", lambda maps, rng: maps | (rng.random(maps.shape) < 0.1)),
    ],
)
def test_sets_of_other_sizes_are_told(
    kind: str, change: Callable[[np.ndarray, np.random.Generator], np.ndarray]
) -> None:
    maps, rng = np.zeros((60, 3, EXPERTS), bool), np.random.default_rng(1)
    np.put_along_axis(maps, traces((60,))[0], True, 2)
    report = compare_routes([sets_of(change(maps, rng))], [sets_of(maps)], LAYERS)
    assert [cause.kind for cause in report.causes] == [kind]


@pytest.mark.parametrize("num_experts", [257, 300, 600])
def test_numbers_cut_to_eight_bits_are_told(num_experts: int) -> None:
    right = [np.random.default_rng(0).random((400, 2, num_experts)).argsort(2)[..., :3]]
    right[0][:, :, 0] = num_experts - 1  # so that every row has one
    right[0][:, :, 1:] %= 200
    right[0][:, :, 2] = (right[0][:, :, 1] + 7) % 200
    names = [RoutingTrace(one, num_experts) for one in right]
    cut = [RoutingTrace.of_sets((one & 255).astype(np.uint16), num_experts, None, "cut") for one in right]
    report = compare_traces(names, cut, (0, 1))
    assert [cause.kind for cause in report.causes] == ["low_byte"]


@given(st.integers(1, 63), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_rows_and_causes_do_not_depend_on_the_names_of_experts(shift: int, seed: int) -> None:
    """Renaming experts in both traces changes nothing that is said about places."""
    right = traces(seed=seed)
    used = [np.roll(one, 3, 0) for one in right]
    plain = compare_traces(of(right), of(used), LAYERS)
    names = [[(one + shift) % EXPERTS for one in side] for side in (right, used)]
    renamed = compare_traces(of(names[0]), of(names[1]), LAYERS)
    assert [cause.text for cause in plain.causes] == [cause.text for cause in renamed.causes]
    np.testing.assert_array_equal(plain.right, renamed.right)


def test_order_within_a_row_does_not_count_and_missing_rows_are_left_out() -> None:
    right = traces()
    report = compare_traces(of(right, lambda n: np.arange(n) != 3), of([one[..., ::-1] for one in right]), LAYERS)
    assert report.is_right
    assert report.compared.tolist() == [[length - 1] * 3 for length in (80, 60, 100)]
    assert report.right_share == 1.0


def test_chance_is_that_of_the_rows_that_are_known() -> None:
    """Rows without a route are padded with some expert numbers, which say nothing of the router."""
    right, present = traces((2000,))[0], np.arange(2000) % 20 == 0
    padded, used = np.where(present[:, None, None], right, np.arange(TOP_K)), traces((2000,), seed=9)[0]
    report = compare_traces(of([padded], lambda _: present), of([used]), LAYERS)
    assert [cause.kind for cause in report.causes] == ["other"]
    assert report.causes[0].text.split()[-4] in ("5%", "6%", "7%", "8%")  # TOP_K / EXPERTS is 6%


def test_frequent_rows_cost_no_more() -> None:
    """One layer, top-1: a wrong row stands in an eighth of all places."""
    right, used = (np.random.default_rng(seed).integers(0, 8, (60_000, 1, 1)) for seed in (0, 1))
    tracemalloc.start()
    report = compare_traces([RoutingTrace(right, 8)], [RoutingTrace(used, 8)], (0,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.causes[0].kind == "other"
    assert peak < 100e6


@pytest.mark.parametrize("num_experts", [8, 13, 256, 300])
def test_bits_hold_the_experts_and_leave_out_what_is_none(num_experts: int) -> None:
    rows = np.random.default_rng(0).random((6, 2, num_experts)).argsort(2)[..., :3]
    bits = bits_of_experts(rows, num_experts)
    assert bits.shape == (6, 2, -(-num_experts // 8))
    assert [[list_experts(one) for one in row] for row in bits] == np.sort(rows, 2).tolist()
    assert list_experts(bits_of_experts(np.array([[[-1, num_experts, 2]]]), num_experts)[0, 0]) == [2]


def write(path: Path, arrays: list[np.ndarray], names: str = "abc", experts: int = EXPERTS) -> Path:
    info = TraceInfo("tiny", LAYERS, experts, TOP_K)
    sequences = [TracedSequence(name, RoutingTrace(one, experts)) for name, one in zip(names, arrays, strict=True)]
    write_traces(path, info, sequences)
    return path


def test_the_command_compares_files_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = traces()
    a = write(tmp_path / "a.safetensors", right)
    assert main(["verify", str(a), str(write(tmp_path / "b.safetensors", right[::-1], "cba"))]) == 0
    assert "720 of 720 rows are right" in capsys.readouterr().out
    swapped = write(tmp_path / "c.safetensors", [right[0][:60], right[0][:60], right[2]])
    assert main(["verify", str(a), str(swapped)]) == 1
    told = capsys.readouterr().out
    assert "micro-batch 0: 60 rows ran, the routes have 80" in told
    assert "routes of micro-batch 0 [micro_batch, 100%]" in told
    lost = RoutingTrace(right[0], EXPERTS, np.arange(80) > 2)
    write_traces(tmp_path / "e.safetensors", TraceInfo("tiny", LAYERS, EXPERTS, TOP_K), [TracedSequence("a", lost)])
    assert main(["verify", str(tmp_path / "e.safetensors"), str(a)]) == 1  # two sequences in one file only
    assert "are missing" not in capsys.readouterr().out
    assert main(["verify", str(a), str(tmp_path / "e.safetensors")]) == 1
    assert "e.safetensors: 3 rows that" in capsys.readouterr().out
    fewer = write(tmp_path / "d.safetensors", right[:2], "ab")
    assert main(["verify", str(a), str(fewer)]) == 1
    assert "a.safetensors: 1 sequences are in this file only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["A"], "found 1 files"),
        (["A", "A", "A"], "found 3 files"),
        (["A", "A", "--engine", "http://localhost:1"], "found 2 files and --engine"),
        (["A", "missing.safetensors"], "missing.safetensors"),
        (["A", "OTHER"], "only traces of models of the same shape"),
        (["A", "NAMES"], "no sequence of the same name"),
    ],
)
def test_wrong_files_are_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    files = {
        "A": str(write(tmp_path / "a.safetensors", traces())),
        "OTHER": str(write(tmp_path / "o.safetensors", traces(), experts=65)),
        "NAMES": str(write(tmp_path / "n.safetensors", traces(), "xyz")),
    }
    assert main(["verify", *(files.get(word, word) for word in words)]) == 2
    assert text in capsys.readouterr().err
