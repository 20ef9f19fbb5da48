"""What cannot divide or fit is one line, each with a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plan_worlds import MODELS, config, write_config
from run_configs import read_rows, read_words

from megarl.errors import ConfigError
from megarl.ops.plan.engine_memory import EngineMemory
from megarl.ops.plan.plan import SERVER_RESERVE, TRAINER_RESERVE, plan, shared_gpu
from megarl.ops.plan.table import to_text
from megarl.ops.plan.trainer_memory import RankMemory

Table = dict[str, Any]
SGLANG: Table = {"rollout__engine": "sglang"}
ROWS = """
mixtral 3 parallel.tp=2 | found 3 ranks, expected a multiple of tp * pp * cp
mixtral 4 parallel.ep=8 | expected a multiple of ep * etp * pp
mixtral 3 parallel.tp=3 train.micro_batch_tokens=66 | parallel.tp: | num_attention_heads = 4
mixtral 4 parallel.tp=4 | parallel.tp: found 4, expected a divisor of | num_key_value_heads = 2
mixtral 3 parallel.ep=3 rollout.prompts_per_step=3 | parallel.ep: found 3, | experts = 8
gpt_oss 2 parallel.tp=2 | parallel.etp: found 2 (by default parallel.tp), expected 1
qwen3_next 4 parallel.tp=4 | parallel.tp: found 4, expected a divisor of | linear_num_key_heads = 2
glm_moe_dsa 4 parallel.pp=4 | parallel.pp: found 4 stages, | layer 1, | expected one of [0, 2]
gpt_oss 1 rollout.fp8_rounding=true | rollout.fp8_rounding: found true | mlp.experts.
qwen3 1 | train.replay: found "r3", expected "none": the qwen3 model in model.path is dense
qwen3 2 train.replay=none parallel.ep=2 | parallel.ep: found 2, expected 1: the qwen3 model | no experts
qwen3 1 train.replay=none train.max_native_flip=0.3 | train.max_native_flip: found 0.3: | no routers to watch
llama 1 train.replay=none log.traces_every=2 | log.traces_every: found 2, expected 0
mixtral 1 train.replay=none megatron.moe_router_force_load_balancing=true train.max_native_flip=0.3
    | train.max_native_flip: found without routes
mixtral 1 train.replay=none megatron.moe_router_force_load_balancing=true log.traces_every=2
    | log.traces_every: found without routes
deepseek_v3 1 rollout.fp8_kv_cache=true | rollout.fp8_kv_cache: | deepseek_v3 model | latents
mixtral 3 parallel.pp=3 | parallel.pp: found 3 stages for 4 layers
mixtral 2 parallel.pp=2 parallel.vpp=3 | parallel.vpp: found 3 with 2 layers
mixtral 1 rollout.max_response_tokens=64 train.micro_batch_tokens=99 | expected at most | 64
mixtral 1 rollout.engine=sglang sglang.tp=3 | sglang.tp: found 3, | num_attention_heads = 4
mixtral 1 rollout.engine=sglang sglang.fp8=true
    | leaves a GPU 40 of the experts' intermediate size, expected a multiple of 128
gpt_oss 1 rollout.engine=sglang sglang.fp8=true
    | sglang.fp8: found true with the gpt_oss model | mlp.experts.down_proj, | whether FP8 engines hold
qwen3_next 1 rollout.fp8_rounding=true | rollout.fp8_rounding: | linear_attn.in_proj_ba.weight
mixtral 1 rollout.engine=sglang sglang.servers=2 'sglang.gpus=[0, 1]'
    | sglang.gpus: found 1 on nodes with launch.ranks_per_node = 1 GPUs of the trainer
mixtral 1 launch.gpu_memory_gib=0.5 | a rank of stage 0 with its engine needs | at most 0.5
mixtral 1 rollout.engine=sglang launch.gpu_memory_gib=5e-05
    | GiB of weights and then 0 tokens of cache, expected at least one sequence of 32
mixtral 1 rollout.engine=sglang launch.layout=disaggregated launch.server_nodes=1 launch.gpu_memory_gib=4.0
    | a server's GPU needs 6. | GiB, expected at most 4; raise sglang.tp
mixtral 2 parallel.pp=2 megatron.account_for_embedding_in_pipeline_split=true
    | does not know megatron.account_for_embedding_in_pipeline_split
mixtral 1 megatron.optimizer=sgd | megatron.optimizer = 'sgd', expected 'adam'
"""
"""Family, ranks and overrides | parts of the line."""


@pytest.mark.parametrize(("words", "parts"), [*read_rows(ROWS)])
def test_what_cannot_be_is_refused(words: str, parts: list[str], tmp_path: Path) -> None:
    family, ranks, *overrides = words.split(" ", 2)
    changes = {key.replace(".", "__"): value for key, value in read_words(" ".join(overrides)).items()}
    settings = config(write_config(tmp_path, family), launch__ranks_per_node=int(ranks), **changes)
    with pytest.raises(ConfigError) as caught:
        plan(settings)
    assert [part for part in parts if part not in str(caught.value)] == []


WIDE = {"intermediate_size": 128, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        (
            {"intermediate_size": 41},
            {"launch__ranks_per_node": 2, "parallel__tp": 2},
            r"parallel.etp: found 2, expected a divisor of .* intermediate size = 41",
        ),
        (
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
            {**SGLANG, "sglang__tp": 3},
            r"sglang.tp: found 3 for 2 key-value heads",
        ),
        (
            {**WIDE, "head_dim": 32},
            {**SGLANG, "sglang__fp8": True},
            r"leaves a GPU 64 of the keys",
        ),
    ],
)
def test_widths_that_cannot_be_cut(changes: Table, overrides: Table, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(config(write_config(tmp_path, "mixtral", **changes), **overrides))


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        ("Qwen3-30B-A3B", 4, "leaves a GPU 192 of the experts' intermediate size"),
        ("GLM-4.5-Air", 1, "leaves a GPU 10944 of intermediate_size"),
        ("nowhere", 1, r"model.path: found no config.json in .*nowhere.* --model"),
    ],
)
def test_fp8_blocks_that_servers_of_large_models_cannot_cut(model: str, tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(config(MODELS / model, **SGLANG, sglang__fp8=True, sglang__tp=tp))


def test_a_server_on_the_gpu_of_the_trainer_or_beside_it(tmp_path: Path) -> None:
    model = write_config(tmp_path, "mixtral")
    shared = {"sglang__gpus": [0], "sglang__mem_fraction": 0.5, "launch__layout": "colocated"}
    with pytest.raises(ConfigError, match=r"with a server on its GPU needs 10\.\d GiB, expected at most 8"):
        plan(config(model, **SGLANG, **shared, launch__gpu_memory_gib=8.0))
    assert plan(config(model, **SGLANG, **shared, launch__gpu_memory_gib=16.0)).server_gpus == 1
    own = {"sglang__gpus": [1], "sglang__mem_fraction": 0.6, "launch__layout": "colocated"}
    settings = config(model, **SGLANG, **own, launch__gpu_memory_gib=8.0)
    found = plan(settings)
    assert 'beside the trainer\'s, sync = "distributed"' in to_text(found, settings)
    assert found.trainer_gpu < 4 << 30 < found.server_gpu < 8 << 30
    with pytest.raises(ConfigError, match=r"a server's GPU needs 6\.\d GiB, expected at most 6"):
        plan(config(model, **SGLANG, **own, launch__gpu_memory_gib=6.0))


def test_memory_on_a_shared_gpu_by_hand() -> None:
    """Resident: the sum of both. Handed over: the largest of the three phases."""
    sizes = {"weights": 2, "gradients": 4, "optimizer": 12, "activations": 5, "working": 1, "sync": 3, "exchange": 2}
    rank = RankMemory(0, **sizes, reference=0, recorded=0, host_routes=9)
    engine, reserves = EngineMemory(7, 20, 1, 20, 1), TRAINER_RESERVE + SERVER_RESERVE
    assert (rank.states, rank.training, rank.peak) == (18, 24, 24)
    assert shared_gpu(rank, engine, handed_over=False) == 24 + 27 + reserves
    assert shared_gpu(rank, engine, handed_over=True) == 27 + 2 + reserves
    small = EngineMemory(7, 0, 1, 0, 0)
    assert shared_gpu(rank, small, handed_over=True) == 24 + reserves
