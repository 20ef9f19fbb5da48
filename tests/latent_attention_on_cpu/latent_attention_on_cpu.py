"""An SGLang plugin for tests: latent attention on a CPU, from the cache of latents in every pass.

By default SGLang takes whole keys and values in a first pass, which its CPU backend then looks for in that cache.
"""

from __future__ import annotations


def register() -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers  # pyright: ignore[reportMissingImports]

    handlers.AttentionBackendRegistry.register("torch_native", lambda _attn, _batch: handlers.AttnForwardMethod.MLA)
