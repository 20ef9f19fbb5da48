"""Updates by verl's actor worker (FSDP2, gloo), each from the same weights: the gradient of every loss in LOSSES.

    torchrun --nproc-per-node RANKS verl_worker.py MODEL OUT

Rank 0 writes OUT: (name of a pair, "verl" or "megarl", micro-batch size) -> (gradient, metrics).
"""

# verl has an environment of its own: make verl
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.padding import left_right_2_no_padding

N, PROMPT, RESPONSE = 8, 3, 6
SETTINGS = [
    "+model.load_tokenizer=False", "model.use_remove_padding=False", "+model.override_config.attn_implementation=eager",
    "actor.strategy=fsdp2", "actor.fsdp_config.use_torch_compile=False", "actor.optim.lr=0",
    "+actor.fsdp_config.mixed_precision.param_dtype=fp32", "actor.optim.total_training_steps=9",
    "actor.ppo_mini_batch_size=8", "actor.ppo_micro_batch_size_per_gpu=4", "rollout.name=vllm",
    "rollout.log_prob_micro_batch_size_per_gpu=4",
]  # fmt: skip
LOSSES = {  # verl's loss and settings; the advantages of both are those of megarl's row
    "dapo": ("vanilla", {"clip_ratio_high": 0.28}),
    "gspo": ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "minirl": ("vanilla", {"clip_ratio_high": 0.27}),  # with verl's weights old/mu
}


def worker_of(model: Path) -> engine_workers.ActorRolloutRefWorker:
    words = [*SETTINGS, f"model.path={model}"]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", [f"{'+' * (w[0] == '+')}actor_rollout_ref.{w.lstrip('+')}" for w in words])
    worker = engine_workers.ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def batch_of(estimator: str) -> DataProto:
    """Policies that differ, and verl's own call of the advantage; one response has a hole, as of a tool's answer."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (N, PROMPT + RESPONSE), generator=random)
    mask = torch.arange(RESPONSE) < torch.tensor([6, 3, 4, 6, 1, 6, 5, 2])[:, None]
    attention = torch.cat([torch.ones(N, PROMPT, dtype=torch.bool), mask], 1).long()
    response_mask = mask.long()
    response_mask[0, 2:4] = 0
    old = -4.0 + 0.5 * torch.randn(N, RESPONSE, generator=random)
    columns = {
        "input_ids": ids * attention,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:] * mask,
        "response_mask": response_mask,
        "old_log_probs": old,
        "rollout_log_probs": old + 0.2 * torch.randn(N, RESPONSE, generator=random),
        "token_level_rewards": torch.rand(N, RESPONSE, generator=random) * mask,
    }
    data = DataProto.from_dict(columns, non_tensors={"uid": [f"prompt {n // 4}" for n in range(N)]})
    return compute_advantage(data, adv_estimator=estimator)


def main(model: Path, out: Path) -> None:
    worker, gradient, found = worker_of(model), [], {}
    engine, step = worker.actor.engine, worker.actor.engine.optimizer_step
    assert worker.actor.loss_fn.func.__module__ == "megarl.adapters.verl"  # by the entry point

    def keep_gradient():
        gradient[:] = [p.grad.full_tensor().flatten().double() for p in engine.module.parameters()]
        return step()

    engine.optimizer_step = keep_gradient
    config, rank, ranks = worker.actor.loss_fn.keywords["config"], dist.get_rank(), dist.get_world_size()
    for row, (loss, settings) in LOSSES.items():
        aggregation = POLICY_LOSS_REGISTRY[f"megarl_{row}"].args[1].aggregation
        for whose, mode, sizes in (("verl", loss, [4]), ("megarl", f"megarl_{row}", [4 // ranks, 8 // ranks])):
            changed = {"loss_agg_mode": aggregation, "clip_ratio_c": 1e9, **settings}
            worker.set_loss_fn(
                partial(
                    worker.actor.loss_fn.func,
                    config=replace(config, policy_loss=PolicyLossConfig(loss_mode=mode), **changed),
                )
            )
            for size in sizes:
                data = batch_of(f"megarl_{row}").to_tensordict()[rank::ranks]
                if row == "minirl" and whose == "verl":
                    data["rollout_is_weights"] = (data["old_log_probs"] - data["rollout_log_probs"]).exp()
                data = left_right_2_no_padding(data)
                tu.assign_non_tensor(data, global_batch_size=N, mini_batch_size=N, epochs=1, seed=1, temperature=1.0)
                tu.assign_non_tensor(data, dataloader_kwargs={"shuffle": False}, micro_batch_size_per_gpu=size)
                metrics = tu.get(worker.update_actor(data), "metrics")
                found[row, whose, size * ranks] = torch.cat(gradient), metrics
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
