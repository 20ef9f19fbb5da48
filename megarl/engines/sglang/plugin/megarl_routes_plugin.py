"""The module that SGLang loads: rewrites the routing traces of answers, and expands deltas of weights.

The rewriting is the last step of a request, in a new thread of the HTTP process: neither the scheduler nor further
requests wait.
"""

import asyncio
import base64
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.files.hf_config import MoeShape

MODULE = "sglang.srt.managers.tokenizer_manager"
MANAGER = "TokenizerManager"

log = logging.getLogger("megarl.routes")


def activate() -> None:
    """Hook into a process that answers requests; SGLang calls the function in all processes.

    An unknown SGLang (ImportError, AttributeError) stays unchanged, with a line in the log.
    """
    if parent_process() is not None and MODULE not in sys.modules:
        return  # a scheduler or detokenizer
    try:
        import_megarl()
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        manager = getattr(importlib.import_module(MODULE), MANAGER)
        hooks = {generate_request: inspect.isasyncgenfunction, update_weights_from_tensor: inspect.iscoroutinefunction}
        for hook, is_expected in hooks.items():
            function = getattr(manager, hook.__name__)
            names = list(inspect.signature(function).parameters)
            if not is_expected(function) or names[:3] != ["self", "obj", "request"]:
                raise AttributeError(f"{hook.__name__}({', '.join(names)}) is another function than expected")
        for hook in hooks:
            HookRegistry.register(f"{MODULE}.{MANAGER}.{hook.__name__}", hook, HookType.AROUND)
    except (ImportError, AttributeError) as error:
        log.warning(
            "megarl: this SGLang is unknown (%s), routing traces stay as they are, and weights come whole", error
        )
        return
    log.info("megarl: routing traces are sent in the short form to clients that ask for it; weights may be deltas")


def import_megarl() -> None:
    """Make ``megarl`` importable without an installation: only the package of this file.

    Its directory must not be on PYTHONPATH, because it may be the site-packages of a foreign environment. ImportError
    without the package.
    """
    if importlib.util.find_spec("megarl") is None:
        sys.path.append(str(Path(__file__).resolve().parents[4]))
        try:
            importlib.import_module("megarl")
        finally:
            sys.path.pop()


def generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None, **options: Any
) -> AsyncIterator[Any]:
    """Wrap ``TokenizerManager.generate_request``: equal answers, with traces in the short form on request."""
    from megarl.engines.sglang.plugin.compact import parse_header

    answers = original(manager, obj, request, **options)
    shape = parse_header(getattr(request, "headers", None) or {})
    return answers if shape is None else _rewrite_all(answers, shape)


async def _rewrite_all(answers: Any, shape: "MoeShape") -> AsyncIterator[Any]:
    try:
        async for answer in answers:
            for item in answer if isinstance(answer, list) else [answer]:  # several prompts, or several samples
                meta = item.get("meta_info") if isinstance(item, dict) else None
                # No text: no routes, or not the last part of a stream.
                if isinstance(meta, dict) and isinstance(text := meta.get("routed_experts"), str):
                    meta["routed_experts"] = await asyncio.to_thread(_short, text, shape)
            yield answer
    finally:  # SGLang reads a single answer; the dropped iterator must release its locks
        await answers.aclose()


async def update_weights_from_tensor(
    original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, request: Any = None
) -> tuple[bool, str]:
    """Wrap ``TokenizerManager.update_weights_from_tensor``: a message of ``plugin.deltas`` is expanded to a bucket.

    The process of the HTTP server keeps the bytes that it got last, once for all ranks.
    """
    from megarl.engines.sglang.plugin.deltas import FORMAT, Bases, repack

    if obj.load_format != FORMAT:
        return await original(manager, obj, request)
    if not (payloads := obj.serialized_named_tensors):
        return True, FORMAT
    try:
        message = base64.b64decode(payloads[0]) if isinstance(payloads[0], str) else bytes(payloads[0])
        bases = vars(manager).setdefault("megarl_bases", Bases())
        bucket, receipt = await asyncio.to_thread(repack, bases, message)
    except Exception as error:  # a client may send anything
        return False, f"megarl: {error}"
    obj.load_format, obj.serialized_named_tensors = "flattened_bucket", [bucket] * len(payloads)
    success, answer = await original(manager, obj, request)
    return success, receipt if success else answer


def _short(text: str, shape: "MoeShape") -> str:
    import pybase64  # SGLang's own, and many times as fast as the standard library's

    from megarl.engines.sglang.plugin.compact import compact

    short = compact(pybase64.b64decode(text), shape)
    return text if short is None else pybase64.b64encode(short).decode("ascii")
