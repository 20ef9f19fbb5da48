"""Measure the gap between sampling and training, with and without replay, on the same rollouts.

    python tools/replay_gap.py --model MODEL --prompts FILE.jsonl [--steps 8] [--server URL --server-dtype bf16]

The engine is the local one or, with --server, a running SGLang server of that precision. For each pair of precisions
(engine, training), the tool samples once. It then runs the old-log-prob pass on these rollouts natively and under R3.

- flip: share of (token, layer) pairs that use other experts than the rollout
- native: the same if the routers had chosen
- k1, k3: estimates of KL[rollout || old], nats per token
- F(2): share of tokens whose probabilities differ by more than a factor of 2
"""

from __future__ import annotations

import sys

from megarl.config.file import parse
from megarl.core.metrics import finalize, merge
from megarl.megatron import distributed
from megarl.megatron.policy import Policy, schedule_of
from megarl.train.engines import make_engine
from megarl.train.sampling.sampler import Sampler
from megarl.train.step import TrainStep

PRECISIONS = (
    ("fp32", False, "fp32"),
    ("fp32", True, "fp32"),
    ("fp32", False, "bf16"),
    ("bf16", False, "bf16"),
    ("bf16", True, "bf16"),
)
"""(engine dtype, engine weights rounded through FP8, training dtype)."""
COLUMNS = ("router/flip", "router/native/flip", "rollout/k1", "rollout/k3", "rollout/extreme_2", "rollout/ess/fraction")


def main() -> None:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    server, server_dtype = flags.get("--server"), flags.get("--server-dtype")
    print(f"{'engine':>10} {'training':>9} {'replay':>7} " + "".join(f"{name:>21}" for name in COLUMNS))
    for engine_dtype, fp8, train_dtype in PRECISIONS:
        if server is not None and engine_dtype != server_dtype:
            continue
        table = {
            "run": {"steps": 1},
            "model": {"path": flags["--model"], "dtype": train_dtype},
            "data": {"train": flags["--prompts"], "max_prompt_tokens": 16},
            "rollout": {
                "prompts_per_step": 32,
                "group_size": 8,
                "max_response_tokens": 10,
                "fp8_rounding": fp8,
                "dtype": engine_dtype,
                "engine": "local" if server is None else "sglang",
            },
            "sglang": {"urls": [server] if server else []},
            "train": {"mini_batches": 2, "micro_batch_tokens": 4096},
            "optim": {"lr": 1e-6},
        }
        configs = {mode: parse(table, {"train.replay": mode}) for mode in ("none", "r3")}
        distributed.initialize(configs["r3"])
        policy = Policy(configs["r3"], schedule_of(configs["r3"]))
        objective = configs["r3"].train.resolved_objective
        engine = make_engine(configs["r3"], print)
        engine.update_weights(policy.export(), version=0)
        sampler = Sampler(configs["r3"], engine, objective)
        drawn = [sampler.sample_step(step) for step in range(int(flags.get("--steps", "8")))]
        for mode, config in configs.items():
            step, found = TrainStep(config, policy, objective), []
            for part in drawn:
                for rollouts, advantages in zip(part.mini_batches, part.advantages, strict=True):
                    mini = step.prepare(rollouts, advantages)
                    step.old_logprobs(mini)
                    found.append(mini.metrics)
            numbers = finalize(merge(found))
            cells = "".join(f"{numbers[name]:21.3e}" if name in numbers else f"{'-':>21}" for name in COLUMNS)
            print(f"{engine_dtype + (' fp8' if fp8 else ''):>10} {train_dtype:>9} {mode:>7} {cells}")
        engine.close()
        distributed.shutdown()


if __name__ == "__main__":
    main()
