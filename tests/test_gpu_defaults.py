"""Which of Megatron's switches for speed are on."""

from __future__ import annotations

from typing import Any

import pytest
from run_configs import parsed as config

from megarl.config import gpu_defaults
from megarl.errors import ConfigError
from megarl.megatron.policy import check_fields

ALL = {"overlap_grad_reduce", "overlap_param_gather", "gradient_accumulation_fusion", "moe_permute_fusion"}
SEVERAL = {"train__mini_batches": 4}


def on(has_te: bool = True, on_gpu: bool = True, **overrides: Any) -> set[str]:
    return set(gpu_defaults.settings(config(**overrides), on_gpu=on_gpu, has_te=has_te))


def test_what_is_on():
    assert on(**SEVERAL) == ALL
    assert on() == ALL - {"overlap_param_gather"}
    assert on(**SEVERAL, parallel__distributed_optimizer=False) == ALL - {"overlap_param_gather"}
    assert on(**SEVERAL, has_te=False) == {"overlap_grad_reduce", "overlap_param_gather"}
    assert on(**SEVERAL, on_gpu=False) == set()
    assert on(**SEVERAL, train__replay="none") == ALL


def test_the_megatron_table_wins():
    own = {"megatron__overlap_grad_reduce": False, "megatron__moe_permute_fusion": False}
    assert on(**SEVERAL, **own) == ALL - {"overlap_grad_reduce", "moe_permute_fusion"}
    assert on(on_gpu=False, megatron__overlap_param_gather=True) == {"overlap_param_gather"}


def test_every_switch_is_a_field_of_megatron():
    assert any(check_fields(gpu_defaults.settings(config(**SEVERAL), on_gpu=True, has_te=True)).values())


def test_weights_of_a_plain_optimizer_cannot_be_gathered():
    message = r"overlap_param_gather: found true .* there are no weights to gather; remove it"
    with pytest.raises(ConfigError, match=message):
        config(megatron__overlap_param_gather=True, parallel__distributed_optimizer=False)
