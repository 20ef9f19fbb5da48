"""The routing watch in verl's Megatron workers: did every token of an update go to the experts of the rollout?

    VERL_USE_EXTERNAL_MODULES=verl_watch VERL_ENGINE_VENDOR=megarl

in the environment of every worker, with this folder on PYTHONPATH. verl looks for an engine of the vendor first, and so
makes the engine below where ``actor.strategy=megatron``. Every pass with router replay (R3, and the update of R2) is
compared with ``routed_experts`` of the batch: a wrong row raises ReplayError, which names it and a likely cause.

Needs ``model.use_remove_padding=True`` and a fixed context-parallel size. Tried with verl 0.9.1 (docs/verl.md).
"""

from typing import Any

from tensordict import TensorDict
from verl.models.mcore.util import preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data, build_r3_replay_mask
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from megarl.files.hf_config import MoeShape
from megarl.replay import MicroRoutes
from megarl.verify import RoutingWatch


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="megarl")
class WatchedEngine(MegatronEngineWithLMHead):
    """verl's engine, with a watch around each forward and backward pass that replays routes."""

    _watch: RoutingWatch | None = None

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        replays = tu.get_non_tensor_data(data, "enable_routing_replay", False) and "routed_experts" in data
        if not replays:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._expected: list[MicroRoutes] = []
        try:
            with RoutingWatch(self.module) as self._watch:
                output = super().forward_backward_batch(data, loss_function, forward_only)
            self.report = self._watch.report(self._expected)
        finally:
            self._watch = None
        self.report.require()
        return output

    def forward_step(self, batch_iter: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        self._is_first_chunk = model is self.module[0]  # every chunk of a rank sees every micro-batch
        return super().forward_step(batch_iter, model, *arguments, **named)

    def prepare_model_inputs(self, batch: TensorDict) -> dict[str, Any]:
        inputs = super().prepare_model_inputs(batch)
        if self._watch is not None and self._is_first_chunk:
            self._expected.append(self._rows(self._watch, inputs["input_ids"], inputs["routed_experts"], batch))
        return inputs

    def _rows(self, watch: RoutingWatch, tokens: Any, routes: Any, batch: TensorDict) -> MicroRoutes:
        """The rows of this rank's routers, by the packing that the model's tokens have."""
        present = None
        if self.engine_config.router_replay.mode == "R3":  # the last token of a rollout has no routes
            routes = align_r3_router_replay_data(routes, tokens)
            present = build_r3_replay_mask(tokens, batch["response_mask"]).values()
        experts, shape = routes.values(), MoeShape.of_megatron(self.tf_config)
        if experts.size(1) == shape.num_layers:
            experts = experts[:, list(shape.moe_layers)]
        is_fp8 = self.tf_config.fp8 in ("e4m3", "hybrid")
        _, packing, _ = preprocess_thd_engine(tokens, use_fp8_padding=is_fp8)
        bounds = {"cu_seqlens": tokens.offsets(), "cu_seqlens_padded": packing.cu_seqlens_q_padded}
        return watch.rows(experts.long(), present, tokens.values(), **bounds)
