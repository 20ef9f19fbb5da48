"""Sparse latent attention: the keys that an indexer selects are those of transformers, in packs, layers that share a
selection, and recomputed layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cases_training
import on_cpu  # noqa: F401
import pytest
import torch
from cases_replay import World
from dispatch_probe import DispatchProbe, TopTwo
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from test_megatron_layouts import assert_gradients, reference_gradients
from tiny_families import write_family
from tiny_world import MODELS, RECOMPUTE, config, exported, local_batch, policy_of, rollouts, safetensors_of
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as theirs

from megarl.errors import ConfigError
from megarl.replay.megatron_state import unwrap
from megarl.stand_ins import sparse_attention
from megarl.stand_ins.attention import PackedSequences
from megarl.stand_ins.sparse_attention import SparseAttention

__all__ = ["reference_gradients"]  # a fixture

HIDDEN, LATENT, HEADS, WIDTH, ROTATED, TOPK = 24, 12, 6, 16, 8, 5
LENGTHS = [3, 40, 5, 6, 40, 17]


def sparse(number: int, **options: Any) -> SparseAttention:
    settings = MLATransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, q_lora_rank=LATENT, attention_dropout=0.0,
        use_cpu_initialization=True, dsa_indexer_n_heads=HEADS, dsa_indexer_head_dim=WIDTH, dsa_indexer_topk=TOPK,
    )  # fmt: skip
    shape = SimpleNamespace(**{"indexer_layers": (0,), "indexer_interleaved": False, **options})
    return SparseAttention(settings, number, AttnMaskType.causal, "self", shape=cast("Any", shape))


def of_transformers(module: SparseAttention, order: torch.Tensor) -> theirs.DeepseekV32Indexer:
    """transformers' indexer of halves with these weights; ``order``: of the values of a head."""
    sizes = {"hidden_size": HIDDEN, "q_lora_rank": LATENT, "qk_rope_head_dim": ROTATED}
    indexer = {"index_n_heads": HEADS, "index_head_dim": WIDTH, "index_topk": TOPK}
    oracle = theirs.DeepseekV32Indexer(DeepseekV32Config(**sizes, **indexer), 0)
    assert module.indexer is not None
    weights = {name.removeprefix("linear_"): tensor for name, tensor in module.indexer.state_dict().items()}
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias"):
        weights[name] = weights[name].unflatten(0, (-1, WIDTH))[:, order].flatten(0, 1)
    oracle.load_state_dict(weights)
    return oracle


@pytest.mark.parametrize("scores", [1, 1 << 26], ids=["by query", "at once"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_a_query_attends_to_the_keys_that_transformers_selects(
    interleaved: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "_SCORES", scores)
    torch.manual_seed(3)
    module = sparse(1, indexer_interleaved=interleaved)
    for name, tensor in module.indexer.named_parameters():  # type: ignore[union-attr]
        tensor.data.uniform_(0.5, 1.5) if "norm" in name else tensor.data.normal_()
    hidden, latents = torch.randn(sum(LENGTHS), 1, HIDDEN), torch.randn(sum(LENGTHS), LATENT)
    packing = PackedSequences.of(torch.tensor([0, *LENGTHS]).cumsum(0))
    module.select(hidden, latents, RotaryEmbedding(ROTATED, 1.0, use_cpu_initialization=True), packing)

    # Neighbours turn as halves do whose values are in another order.
    rotated = torch.arange(ROTATED).view(-1, 2).T.flatten() if interleaved else torch.arange(ROTATED)
    oracle = of_transformers(module, torch.cat([rotated, torch.arange(ROTATED, WIDTH)]))
    rotary = theirs.DeepseekV32RotaryEmbedding(DeepseekV32Config(qk_rope_head_dim=ROTATED))
    seen = 0
    for rows, keys, positions in module._sequences(packing):
        places = torch.arange(keys.size(1))
        causal = places <= places[:, None]
        visible = module._visible(rows, positions, len(places), packing)
        if keys.size(1) <= TOPK:
            assert visible is None
            continue
        for row, mask in zip(rows, visible, strict=True):  # type: ignore[arg-type]
            tensors = (hidden[row, 0][None], latents[row][None], rotary(hidden, places[None]), None, places[None])
            selected = torch.zeros_like(causal).scatter(-1, oracle(*tensors)[0].long(), True)
            assert torch.equal(mask[0], selected & causal)
            seen += 1
    assert seen == 4


def test_layers_without_an_indexer_share_the_selection_of_the_last_one() -> None:
    assert [sparse(number, indexer_layers=(0,)).source for number in (1, 2)] == [0, 0]
    assert sparse(2, indexer_layers=(0,)).indexer is None
    assert sparse(2, indexer_layers=(0, 1)).source == 1


@pytest.mark.parametrize("recompute", ["uniform", "block", "moe+"])
def test_recomputed_layers_have_the_gradients_of_transformers(
    recompute: str, in_model_folder: None, reference_gradients: Any
) -> None:
    choices = {"train__replay": "none", "parallel__distributed_optimizer": False}
    settings = config(MODELS / "glm_moe_dsa", {}, recompute=RECOMPUTE[recompute], **choices)
    policy = policy_of(settings)
    loss, _ = cases_training.forward_backward(policy, settings, local_batch())
    with cases_training.gradients_in_place_of_weights(policy):
        gradients = exported(policy)
    expected = reference_gradients("glm_moe_dsa")
    kept = {name: gradient for name, gradient in gradients.items() if "e_score_correction_bias" not in name}
    assert_gradients({"loss": loss, "gradients": kept}, expected)


def test_a_step_trains_all_but_the_indexer(in_model_folder: None, models: dict[str, Path]) -> None:
    settings = config(MODELS / "deepseek_v32", {}, train__replay="none")
    policy = policy_of(settings)
    cases_training.forward_backward(policy, settings, local_batch())
    policy.optimizer_step()
    before, after = safetensors_of(models["deepseek_v32"]), exported(policy)
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if ".indexer." in name or "e_score_correction_bias" in name}


class _Sigmoid(TopTwo):
    def __init__(self, model: torch.nn.Module) -> None:
        layers = {layer.layer_number - 1: layer.mlp for layer in unwrap(model).decoder.layers}
        self.biases = {number: mlp.router.expert_bias for number, mlp in layers.items() if hasattr(mlp, "router")}

    def choose(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        return (logits.sigmoid() + self.biases[layer]).topk(2, dim=1).indices

    def gates(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        scores = logits.sigmoid() * experts
        return 2.5 * scores / scores.sum(1, keepdim=True)


def test_experts_of_a_rollout_are_replayed_beside_a_selection_of_keys(models: dict[str, Path], one_rank: None) -> None:
    world = World(models["glm_moe_dsa"], "uniform")
    probe = DispatchProbe(world.policy.chunks, world.micros, _Sigmoid(world.policy.chunks[0]))
    with world.replay.replay(world.routes):
        world.run(backward=True)
    probe.remove()
    assert probe.violations(rollouts(), world.policy.shape.moe_layers) == []
    assert probe.largest_gate_error() < 1e-5
    assert len(probe.seen) == 2 * 3 * len(world.micros)  # recomputed once


def test_a_stage_that_begins_with_a_shared_selection_is_refused(tmp_path: Path) -> None:
    from megarl.megatron import model
    from megarl.models.shapes import read_shape

    types = ["full", "full", "shared", "full"]
    shape = read_shape(write_family(tmp_path / "m", "glm_moe_dsa", indexer_types=types))
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    settings = model.transformer_config(shape, layout, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "get_transformer_layer_offset", lambda *_: 2)
        with pytest.raises(ConfigError, match="layer 2, the first of a stage"):
            model.layer_spec(settings, None, shape)
