"""Completion in real shells: what Tab writes, and that launch/completion.sh is of today's commands."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tools import completion

HELD = """\
'' pat | patch
'' rec | recipes
patch '' | check apply revert status
'patch apply' -- | --version --json --help
'recipes copy' qwen3-235 | qwen3-235b-a22b
'convert a b --dtype' '' | keep fp32 bf16 fp16
'train run.toml --train.replay' r | r2 r3
'train run.toml' --optim.w | --optim.warmup_steps --optim.weight_decay
'train run.toml --train.objective' cis | cispo
'status run' --run.s |
"""
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in START
]


def test_the_file_is_of_todays_commands() -> None:
    assert completion.PLACE.read_text() == completion.text(), "run python tools/completion.py"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_candidates_are_those_of_the_place(shell: str) -> None:
    lines = [line.partition(" |") for line in HELD.splitlines()]
    script = ["complete() { :; }; compdef() { :; }", f". {completion.PLACE}"]
    for place, _, _ in lines:
        words, _, current = place.rpartition(" ")
        script.append(f"_megarl_candidates {current} {words.replace(chr(39), '')}; echo ---")
    done = subprocess.run([shell, "-c", "\n".join(script)], capture_output=True, text=True, check=True)
    for (place, _, expected), found in zip(lines, done.stdout.split("---\n"), strict=False):
        current = place.rpartition(" ")[2].replace("''", "")
        assert [word for word in found.split() if word.startswith(current)] == expected.split(), place


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("typed", "written"),
    [("megarl pat", "megarl patch "), ("megarl convert a b --dtype f", "fp"), ("megarl report some_f", "some_folder")],
)
def test_tab_completes_in_a_real_shell(shell: str, typed: str, written: str, tmp_path: Path) -> None:
    (tmp_path / "some_folder").mkdir()
    process, screen = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe(START[shell][0], START[shell], {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(tmp_path)})
    start = "autoload -U compinit && compinit -u -D\n" if shell == "zsh" else "bind 'set bell-style none'\n"
    os.write(screen, f"{start}PS1='> '; . {completion.PLACE} && echo rea''dy\n".encode())
    try:
        wait_for(screen, "ready")
        os.write(screen, f"{typed}\t".encode())
        wait_for(screen, typed + written.removeprefix(typed) if written.startswith(typed) else written)
    finally:
        os.close(screen)
        os.waitpid(process, 0)


def wait_for(screen: int, text: str) -> None:
    seen, end = "", time.monotonic() + 120
    while text not in seen:
        assert time.monotonic() < end, seen
        if select.select([screen], [], [], 1)[0]:
            seen += os.read(screen, 4096).decode(errors="replace")
