"""Any program as an agent of an episode: environment.function = "agent_program:play", with the command in its options.

    [environment]
    function = "agent_program:play"
    options = { command = ["python", "calculator_agent.py"] }

The program reads the prompt as its input, and OPENAI_BASE_URL and OPENAI_API_KEY, as OpenAI's own packages do.
MEGARL_SEED is the seed of the episode. The episode ends with the program, and fails with an exit code above 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

STDERR_BYTES = 500
"""Of the error message."""


async def play(command: Sequence[str], prompt: str, base_url: str, api_key: str, seed: int) -> None:
    """Run the program. All processes of its group end with it, also at the deadline of the episode."""
    proxies = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
    facts = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "MEGARL_SEED": str(seed), "NO_PROXY": proxies}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **facts},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        process.stdin.write(prompt.encode())
        process.stdin.close()
        told = b""
        while part := await process.stderr.read(1 << 16):
            told = (told + part)[-STDERR_BYTES:]
        if code := await process.wait():
            raise RuntimeError(f"exit code {code}: {told.decode(errors='replace')}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
