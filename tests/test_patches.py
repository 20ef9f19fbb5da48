"""The patches of Megatron-Core: what they say, where they go, and that the result asks the hook."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from megatron_releases import installed
from patch_trees import FILES, VERSIONS, git, succeed
from release_checks import ReleasePopen

from megarl.ops.patching import patch as tool


def test_every_release_that_the_tool_supports_has_a_patch() -> None:
    assert tool.list_versions() == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_patch_says_what_it_is_for(version: str) -> None:
    header, found, _ = (tool.PATCHES / f"{version}.patch").read_text().partition("\ndiff --git ")
    assert found
    assert header.startswith(f"Megatron-Core {version}: ")
    for field in ("Reason", "Upstream", "Drop when"):
        assert re.search(rf"^{field}: \S", header, re.MULTILINE), field
    assert max(map(len, header.splitlines())) <= 120


@pytest.mark.parametrize("version", VERSIONS)
def test_each_hunk_has_one_place_and_the_result_is_python(version: str) -> None:
    text = (tool.PATCHES / f"{version}.patch").read_text()
    for section in text.split("\ndiff --git ")[1:]:
        path, blob = re.findall(r"^a/(\S+) b/.*\nindex (\w{40})", section)[0]
        file = installed(version) / path
        assert git(installed(version), "hash-object", "--no-filters", str(file)).strip() == blob
        for body in re.split(r"^@@ .*\n", section, flags=re.MULTILINE)[1:]:
            expected = "".join(row[1:] or "\n" for row in body.splitlines(keepends=True) if row[0] != "+")
            assert file.read_text().count(expected) == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_every_router_has_the_attribute_and_passes_it_on(version: str, core_tree: Callable[..., Path]) -> None:
    root = core_tree(version)
    succeed("apply", root)
    parsed = ast.parse((root / FILES[1]).read_text())
    routers = [node for node in ast.walk(parsed) if isinstance(node, ast.ClassDef) and node.name == "TopKRouter"]
    (start,) = [node for node in routers[0].body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert "self.router_replay = None" in map(ast.unparse, start.body)
    names = ("topk_softmax_with_capacity", "topk_routing_with_score_function")
    calls = [node for node in ast.walk(parsed) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]
    assert len(calls) == (3 if version < "0.14" else 1)
    for call in calls:
        assert "router_replay=self.router_replay" in map(ast.unparse, call.keywords)


ASKS = """
import sys, types, torch
from megatron.core.transformer.moe import moe_utils

old = hasattr(moe_utils, "topk_softmax_with_capacity")
route = moe_utils.topk_softmax_with_capacity if old else moe_utils.topk_routing_with_score_function
torch.manual_seed(0)
logits = torch.randn(5, 8)
wanted = torch.tensor([[7, 0], [1, 2], [3, 4], [6, 5], [0, 1]])
seen = []

class Hook:
    def get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk):
        own, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert torch.equal(own, scores.gather(1, indices)) and not torch.equal(indices, wanted)
        seen.append((num_groups, group_topk))
        return scores.gather(1, wanted), wanted

bias = torch.linspace(0, 3, 8)
cases = [dict(), dict(use_pre_softmax=True), dict(score_function="sigmoid"),
         dict(score_function="sigmoid", expert_bias=bias), dict(scaling_factor=2.5)]
for groups in (dict(), dict(num_groups=4, group_topk=2)):
    for case in cases:
        plain = route(logits, 2, **case, **groups)
        assert all(map(torch.equal, plain, route(logits, 2, router_replay=None, **case, **groups)))
        probs, chosen = route(logits, 2, router_replay=Hook(), **case, **groups)[:2]
        assert torch.equal(chosen.nonzero()[:, 1].view(5, 2), wanted.sort(1).values)
        assert seen.pop() == (groups.get("num_groups"), groups.get("group_topk")) and not seen
        scores = logits.softmax(-1) if "use_pre_softmax" in case else logits.gather(1, wanted).softmax(-1)
        if "use_pre_softmax" in case:
            scores = scores.gather(1, wanted)
        if "score_function" in case:
            scores = logits.sigmoid().gather(1, wanted)
            scores = scores / scores.sum(1, keepdim=True)
        torch.testing.assert_close(probs.gather(1, wanted), scores * case.get("scaling_factor", 1))
assert moe_utils.HAVE_TE or old and sys.argv[1] == "0.12.3" or moe_utils.te_general_gemm is None
if not old:
    moe_utils.HAVE_TE, moe_utils.fused_topk_with_score_function = True, lambda **named: "fused"
    assert route(logits, 2, fused=True) == "fused"
    try:
        route(logits, 2, fused=True, router_replay=Hook())
    except ValueError as error:
        assert "moe_router_fusion" in str(error) and not seen
    else:
        raise AssertionError("the fused router ignores the hook")
print("asked")
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_patched_release_asks_the_hook_in_every_way_of_scoring(version: str, tmp_path: Path) -> None:
    shutil.copytree(
        installed(version) / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    line = [sys.executable, "-W", "ignore", "-c", ASKS, version]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    succeed("apply", tmp_path)
    done = preloaded.run(line, start=ReleasePopen, env=environment, timeout=600)
    assert done.stdout == "asked\n", done.stderr[-2000:]
