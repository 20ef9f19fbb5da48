"""One update of verl's actor worker (FSDP2, gloo) by one policy loss: a process of its own on each rank.

    torchrun --nproc-per-node RANKS verl_worker.py FOLDER LOSS MICRO_BATCH_SIZE

FOLDER has the model, and gets the gradients as ``LOSS-RANKS-MICRO_BATCH_SIZE.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # verl asks for "cpu:gloo,cpu:gloo" otherwise, which torch refuses

import verl
from hydra import compose, initialize_config_dir
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding

from megarl.core.objectives import OBJECTIVES

N, PROMPT, RESPONSE = 8, 3, 6


def worker_of(folder: Path, loss: str, micro: int) -> ActorRolloutRefWorker:
    aggregation = OBJECTIVES[loss.removeprefix("megarl_")].aggregation if "megarl" in loss else "token-mean"
    settings = [
        f"model.path={folder}", "+model.load_tokenizer=False", "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=eager", "actor.strategy=fsdp2", "actor.use_torch_compile=False",
        "actor.fsdp_config.use_torch_compile=False", "+actor.fsdp_config.mixed_precision.param_dtype=fp32",
        f"actor.policy_loss.loss_mode={loss}", f"actor.loss_agg_mode={aggregation}", f"actor.ppo_mini_batch_size={N}",
        f"actor.ppo_micro_batch_size_per_gpu={micro}", "rollout.log_prob_micro_batch_size_per_gpu=4", "rollout.n=4",
        "actor.clip_ratio_c=1e9", "actor.clip_ratio_high=0.28", "rollout.name=hf", "actor.optim.total_training_steps=1",
    ]  # fmt: skip
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", [f"{'+' * (s[0] == '+')}actor_rollout_ref.{s.lstrip('+')}" for s in settings])
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def batch_of(worker: ActorRolloutRefWorker, estimator: str) -> DataProto:
    """Rewards, old log-probabilities that have moved, and verl's own advantages; one response has a hole."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (N, PROMPT + RESPONSE), generator=random)
    mask = torch.arange(RESPONSE) < torch.tensor([6, 3, 4, 6, 1, 6, 5, 2])[:, None]
    response_mask = mask.clone()
    response_mask[0, 2:4] = False
    attention = torch.cat([torch.ones(N, PROMPT, dtype=torch.bool), mask], 1).long()
    old = -4.0 + 0.5 * torch.randn(N, RESPONSE, generator=random)
    columns = {
        "input_ids": ids * attention, "attention_mask": attention, "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:] * mask, "response_mask": response_mask.long(), "old_log_probs": old,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": (old + 0.2 * torch.randn(N, RESPONSE, generator=random)).clamp(max=0),
        "token_level_rewards": torch.nn.functional.one_hot(mask.sum(1) - 1, RESPONSE)
        * torch.rand(N, 1, generator=random),
    }  # fmt: skip
    groups = [f"prompt {n // 4}" for n in range(N)]
    data = DataProto.from_dict(tensors=columns, non_tensors={"uid": groups})
    return compute_advantage(data, adv_estimator=estimator)


def main(folder: Path, loss: str, micro: int) -> None:
    worker, gradients = worker_of(folder, loss, micro), {}
    engine, step = worker.actor.engine, worker.actor.engine.optimizer_step

    def keep_gradients():
        gradients.update({name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()})
        return step()

    engine.optimizer_step = keep_gradients
    data = batch_of(worker, loss if "megarl" in loss else "grpo").to_tensordict()[dist.get_rank() :: dist.get_world_size()]
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, global_batch_size=N, mini_batch_size=N, epochs=1, seed=1, temperature=1.0)
    tu.assign_non_tensor(data, dataloader_kwargs={"shuffle": False}, calculate_entropy=False, compute_loss=True)
    metrics = tu.get(worker.update_actor(data), "metrics")
    if dist.get_rank() == 0:
        torch.save((gradients, metrics), folder / f"{loss}-{dist.get_world_size()}-{micro}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
