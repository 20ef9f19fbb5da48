"""Values of the ``[megatron]`` table as Megatron's dataclasses take them."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from megarl.config import megatron_fields


def realize(dataclass_name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked values of one dataclass, with names of dtypes and attention backends replaced by the objects.

    Names of what a CUDA graph captures stay strings, because Megatron parses the names.
    """
    result = dict(values)
    for key, value in values.items():
        annotation = megatron_fields.fields()[dataclass_name][key]
        if isinstance(value, list) and "Tuple" in annotation:
            result[key] = tuple(value)
        elif isinstance(value, str) and "dtype" in annotation:
            result[key] = getattr(torch, value)
        elif isinstance(value, str) and "AttnBackend" in annotation:
            result[key] = AttnBackend[value]
    return result
