"""The patch tool on forks: moved and edited code."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_releases import installed
from patch_trees import FILES, VERSIONS, contents, edit, refuse, run, succeed

from megarl.ops.patching import patch as tool


def test_lines_above_move_the_hunks(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    file = root / FILES[1]
    edit(file, "class TopKRouter(Router):", "# ours\n" * 12 + "class TopKRouter(Router):")
    edit(
        file,
        "        # Calculate probs and routing_map for",
        "        # ours\n        # Calculate probs and routing_map for",
    )
    before = contents(root)
    told = succeed("apply", root).splitlines()
    assert "hunk 1 at line 166 (offset 12 lines)" in told[3]
    assert "hunk 2 at line 511 (offset 13 lines)" in told[4]
    lines = file.read_text().splitlines()
    assert lines.index("                router_replay=self.router_replay,") + 1 == 511 + 3
    succeed("revert", root)
    assert contents(root) == before


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_edit_beside_the_change_is_refused(line_end: bytes, core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    old = "        self.routing_type = self.config.moe_router_load_balancing_type\n"
    edit(root / FILES[1], old, old.replace("self.config", "config"))
    (root / FILES[1]).write_bytes((root / FILES[1]).read_bytes().replace(b"\n", line_end))
    before = contents(root)
    for command in ("check", "apply"):
        assert f"{FILES[1]}:154: the lines that 0.15.3.patch expects differ" in refuse(command, root)
        assert contents(root) == before
    assert "moe_utils.py: not changed" in run("apply", root).stdout
    assert "neither in nor out" in succeed("status", root)


def test_code_that_is_there_twice_is_refused(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    file = root / FILES[1]
    text = file.read_text()
    file.write_text(text + text[text.index("class TopKRouter(Router):") :].replace("TopKRouter", "OwnRouter"))
    before = contents(root)
    assert "leaves routers that do not pass on a hook (router_replay)" in refuse("apply", root)
    assert contents(root) == before


def test_a_half_applied_patch_is_seen_completed_and_reverted(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    before = contents(root)
    succeed("apply", root)
    patched = contents(root)
    for command, whole in (("apply", patched), ("revert", before)):
        (root / FILES[0]).write_bytes(patched[str(FILES[0])])
        (root / FILES[1]).write_bytes(before[str(FILES[1])])
        told = succeed("status", root)
        assert "moe_utils.py: in\n" in told
        assert "router.py: not in\n" in told
        succeed(command, root)
        assert contents(root) == whole


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "delete", "change", "copy"]), st.integers(0, 900), st.integers(1, 9)),
        max_size=6,
    ),
    st.sampled_from(VERSIONS),
    st.integers(0, 1),
)
@settings(max_examples=30)
def test_whatever_was_edited_the_patch_is_whole_or_refused(
    edits: list[tuple[str, int, int]], version: str, which: int
) -> None:
    name = FILES[which if version != "0.16.1" else 0]
    lines = (installed(version) / name).read_text().split("\n")
    for kind, place, size in edits:
        at = place % (len(lines) + 1)
        if kind == "delete":
            del lines[at : at + size]
        else:
            end = at if kind == "insert" else at + size
            lines[at:end] = lines[:size] if kind == "copy" else ["# ours"] * size
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file in FILES:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed(version) / file, root / file)
        (root / name).write_text("\n".join(lines))
        state = next(state for state in tool.examine(root, version) if state.name == str(name))
        if state.state == "unfit":
            assert state.result == state.current
            return
        assert state.state == "out"
        rows = changes(version, name).partition("\n@@")[2].splitlines()
        added, removed = ([row[1:] for row in rows if row.startswith(sign)] for sign in "+-")
        after, before = state.result.decode().split("\n"), state.current.decode().split("\n")
        assert Counter(after) == Counter(before) + Counter(added) - Counter(removed)
        (root / name).write_bytes(state.result)
        reverted = next(state for state in tool.examine(root, version) if state.name == str(name))
        assert (reverted.state, reverted.result) == ("in", state.current)


def changes(version: str, name: Path) -> str:
    """The hunks of a file in the patch of a release."""
    text = (tool.PATCHES / f"{version}.patch").read_text()
    return next(part for part in text.split("\ndiff --git ")[1:] if part.startswith(f"a/{name} "))
