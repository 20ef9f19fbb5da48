"""A rollout engine for verl that needs no GPU: ``rollout.name=cpu`` samples from a tiny model by transformers.

    VERL_USE_EXTERNAL_MODULES=verl_on_cpu,verl_sampler

with this folder on PYTHONPATH. To try verl's whole trainer on a CPU (verl_grpo.py); one worker, dense models.
"""

from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput


@ray.remote(num_cpus=0)
class Sampler:
    """A rollout server for tiny dense models: transformers, one request at a time. Its log-probabilities are fp32."""

    def __init__(self, path: str, response_length: int) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.response_length, self.version = response_length, 0

    @torch.no_grad()
    def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        ids, logprobs, cache = [], [], None
        tokens = torch.tensor([prompt_ids])
        while len(ids) < self.response_length and self.model.config.eos_token_id not in ids:
            out = self.model(tokens, past_key_values=cache, use_cache=True)
            logits = out.logits[0, -1].float() / sampling_params.get("temperature", 1.0)
            cache, tokens = out.past_key_values, torch.multinomial(logits.softmax(-1), 1)[None]
            ids.append(int(tokens))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self.version}
        )

    def update(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.model.load_state_dict(weights)
        self.version = version

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = release_kv_cache = nothing
    resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):
    """The rollout ``cpu``: one ``Sampler``, which the worker finds by name."""

    async def launch_servers(self) -> None:
        options = {"name": f"sampler_{self.replica_rank}"}
        self._server_handle = Sampler.options(**options).remote(self.model_config.path, self.config.response_length)
        self.servers, self._server_address = [self._server_handle], options["name"]


class Rollout(BaseRollout):
    """In the worker: sends weights to the ``Sampler``."""

    async def resume(self, tags: list[str]) -> None:
        pass

    release = resume

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        state = {name: tensor.detach().clone() for name, tensor in weights}
        await ray.get_actor("sampler_0").update.remote(state, global_steps or 0)


RolloutReplicaRegistry.register("cpu", lambda: Replica)
_ROLLOUT_REGISTRY["cpu", "async"] = "verl_sampler.Rollout"
