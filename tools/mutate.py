"""Mutation score: change one operator or number of a module at a time; does a test fail?

    python tools/mutate.py                        # every module of SCORED; exit code 1 below 95 %
    python tools/mutate.py objectives/weights     # one module of megarl/core
    python tools/mutate.py --sampled              # 30 mutants of each module of SAMPLED; exit code 1 below 90 %
    python tools/mutate.py run/lock --sample 100  # one module of megarl, more mutants
    python tools/mutate.py objectives/masks --functions batch_bound _may_drop
    python tools/mutate.py --list ratios          # only list its mutants

A mutant that no test notices shows a missing test, or is equivalent to the original. Equivalent mutants are listed with
their reasons in ``tests/core/equivalent_mutants.toml``. They do not count.

The tests of a module are collected and run once. Each mutant then runs in a fork of that process, which replaces the
code of one function, runs the tests that call it, and stops at the first failure. Mutants of module-level code
(constants, fields, tables, default arguments) need a new import and start in a process that has not imported megarl.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENTS = ROOT / "tests/core/equivalent_mutants.toml"
TIMEOUT_S = 60
"""A mutant that runs longer counts as killed: it loops."""
_OBJECTIVES = "objectives_boundaries mask_bounds table objectives finite_differences"
SCORED = {
    "objectives/masks": f"{_OBJECTIVES} functions",
    "objectives/weights": f"{_OBJECTIVES} functions",
    "objectives/loss": f"{_OBJECTIVES} functions",
    "objectives/responses": "responses kl_grpo table functions objectives_boundaries",
    "objectives/columns": f"{_OBJECTIVES} functions",
    "advantages/groups": "advantages responses credit_assignment",
    "advantages/weighted": "advantages responses",
    "advantages/tokens": "advantages",
    "ratios": f"ratios {_OBJECTIVES} advantages",
    "metrics": "metrics collector",
    "packing": "packing turns",
    "sampling/collector": "collector credit_assignment",
    "sampling/credit_assignment": "credit_assignment",
    "sampling/window": "window",
    "choices/parts": "parts table functions",
    "choices/records": "parts functions",
}
"""Module of ``megarl/core`` -> the files ``tests/core/test_*.py`` that must notice a change of it."""

SAMPLED = {
    "config/trust": "test_trust_parts",
    "files/pickles": "data/test_pickles",
    "run/lock": "data/test_run_lock",
    "run/samples": "trainer/test_audit",
    "engines/sglang/plugin/compact": "engines/test_sglang_compact",
    "data/math/text": "data/test_math_strict",
    "data/math/grammar": "data/test_math_strict",
    "core/sampling/gvm": "core/test_allocation",
    "trainer/sampling/assignment": "trainer/test_assignment",
    "engines/sglang/client": "engines/test_sglang_client",
    "engines/sglang/member": "engines/test_sglang_fleet",
    "replay/hooks": "megatron/test_megatron_replay megatron/test_megatron_replay_errors",
    "replay/sessions": "megatron/test_megatron_replay megatron/test_megatron_replay_scores",
    "replay/pass_log": "megatron/test_megatron_replay_passes megatron/test_megatron_replay_attempts",
    "plugin": "megatron/test_megatron_plugin",
    "ops/launch/supervisor": "ops/launch/test_supervisor",
    "verify/causes": "verify/test_trace_comparison",
    "verify/expert_sets": "verify/test_trace_comparison verify/test_verify_report",
    "verify/report": "verify/test_verify_report verify/test_trace_comparison",
    "verify/watch": "verify/test_watch",
    "watch/tripwires": "core/test_tripwire_formulas",
    "watch/foreign_rows": "core/test_foreign_rows",
}
"""Module of ``megarl`` -> the files below ``tests`` that must notice a change of it. A sample of mutants is tried."""

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}
_DROPPED = {"clamp", "exp", "abs", "sqrt", "square", "sum"}
"""Methods whose call is dropped: ``x.clamp(max=1)`` becomes ``x``."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    key: str
    """``function: before -> after``; holds no line number, so that it survives edits elsewhere."""
    function: str | None
    """Qualified name of the outermost function that changes; None for module-level code."""
    tree: ast.Module
    """The changed module."""


def find_mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module's source."""
    original = ast.parse(source)
    seen: Counter[str] = Counter()
    for number, (node, shown, function) in enumerate(_walk(original)):
        for change in _changes(node):
            tree = copy.deepcopy(original)
            twin, twin_shown, _ = next(entry for i, entry in enumerate(_walk(tree)) if i == number)
            changed = change(twin)
            _Replace(twin, changed).visit(tree)
            key = f"{function or 'module'}: {_text(shown)} -> {_text(changed if twin_shown is twin else twin_shown)}"
            seen[key] += 1
            yield Mutant(key if seen[key] == 1 else f"{key} #{seen[key]}", function, ast.fix_missing_locations(tree))


def _walk(
    node: ast.AST, scope: str = "", function: str | None = None, parent: ast.AST | None = None
) -> Iterator[tuple[ast.AST, ast.AST, str | None]]:
    """Yield (node, the expression to show, outermost function) of code that runs when nothing is wrong."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    bare = isinstance(node, ast.Constant | ast.Name) and isinstance(parent, ast.expr | ast.keyword)
    yield node, parent if bare and parent is not None else node, function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        inner = (scope, function)
        if name == "body" and isinstance(node, ast.ClassDef):
            inner = (f"{scope}{node.name}.", function)
        elif name == "body" and isinstance(node, ast.FunctionDef):
            inner = (scope, function or f"{scope}{node.name}")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, *inner, node)


def _changes(node: ast.AST) -> list[Callable[[Any], ast.AST]]:
    """Return functions that change a node in place, or return what replaces it."""
    match node:
        case ast.Compare():
            return [functools.partial(_swap_comparison, index) for index in range(len(node.ops))]
        case ast.BinOp() | ast.BoolOp() if type(node.op) in _OPERATORS:
            return [_swap_operator]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            return [lambda unary: unary.operand]
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            return [_negate_test]
        case ast.Constant(value=bool()):
            return [lambda constant: ast.Constant(not constant.value)]
        case ast.Constant(value=int() | float()):
            return [lambda constant: ast.Constant(constant.value + 1)]
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            return [_swap_name]
        case ast.Call(func=ast.Attribute(attr=name)) if name in _DROPPED:
            return [lambda call: call.func.value]
        case ast.Call(func=ast.Attribute(attr=name)) if name in _NAMES:
            return [_swap_name]
        case _:
            return []


def _swap_comparison(index: int, node: ast.Compare) -> ast.AST:
    node.ops[index] = _OPERATORS[type(node.ops[index])]()  # pyright: ignore[reportCallIssue]
    return node


def _swap_operator(node: ast.BinOp | ast.BoolOp) -> ast.AST:
    node.op = _OPERATORS[type(node.op)]()  # pyright: ignore[reportAttributeAccessIssue]
    return node


def _negate_test(node: ast.If | ast.IfExp | ast.While) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _swap_name(node: ast.Call) -> ast.AST:
    if isinstance(node.func, ast.Name):
        node.func.id = _NAMES[node.func.id]
    elif isinstance(node.func, ast.Attribute):
        node.func.attr = _NAMES[node.func.attr]
    return node


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        return f"if {ast.unparse(node.test)}"
    return ast.unparse(node)


def find_module(module: str) -> Path:
    """Return the file of a module: below megarl, or below megarl/core where SCORED names it."""
    return ROOT / "megarl" / ("core" if module in SCORED else "") / f"{module}.py"


def score(module: str, sample: int | None, functions: Sequence[str] = ()) -> tuple[list[str], list[str], int]:
    """Run every mutant of a module, or a sample; return the keys of all, of the survivors, and how many timed out.

    functions: these alone, whole.
    """
    path = find_module(module)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    mutants = list(find_mutants(path.read_text()))
    if functions:
        mutants = [m for m in mutants if m.function in functions]
    elif sample is not None and sample < len(mutants):
        mutants = random.Random(module).sample(mutants, sample)
    stems = [f"core/test_{stem}" for stem in SCORED[module].split()] if module in SCORED else SAMPLED[module].split()
    files = [str(ROOT / f"tests/{stem}.py") for stem in stems]
    assert all(map(os.path.exists, files)), f"{module}: of {files} one is missing"
    survivors: list[str] = []
    timeouts = 0
    results = _run_forked(files, name, path, [m for m in mutants if m.function])
    results |= {m.key: _run_fresh(files, name, path, m) for m in mutants if not m.function}
    for key, status in results.items():
        timeouts += status == "timeout"
        if status == "survived":
            survivors.append(key)
    return [mutant.key for mutant in mutants], survivors, timeouts


def _run_forked(files: list[str], name: str, path: Path, mutants: list[Mutant]) -> dict[str, str]:
    """Collect the tests in one child, and run each mutant in a fork of it; return its outcome by key."""

    class Loop:
        """Runs the tests that call a mutant's function: those that killed most recently first, then the fastest."""

        def pytest_runtestloop(self, session: Any) -> bool:
            import pytest

            callers: dict[str, list[Any]] = {}
            for item, _, functions in sorted((_trace(item, str(path)) for item in session.items), key=lambda t: t[1]):
                for function in functions:
                    callers.setdefault(function, []).append(item)
            for mutant in mutants:
                items = callers.get(mutant.function or "", [])
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    _install(name, path, mutant)
                    failed = next((i for i, item in enumerate(items) if not _passes(item)), None)
                    os.write(write, b"survived" if failed is None else str(failed).encode())
                    os._exit(0)
                os.close(write)
                status = _wait(pid, read)
                if status.isdigit():
                    items.insert(0, items.pop(int(status)))
                    status = "killed"
                print(f"{status} {mutant.key}", file=out, flush=True)
            pytest.exit("done", returncode=0)

    read, write = os.pipe()
    if os.fork() == 0:
        out = os.fdopen(write, "w")
        _pytest(files, [Loop()])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        results: dict[str, str] = {}
        for line in lines:
            status, _, key = line.rstrip("\n").partition(" ")
            results[key] = status
            if status == "survived":
                print(f"  {status}: {key}", file=sys.stderr)
    os.wait()
    assert len(results) == len(mutants), f"{name}: {len(mutants)} mutants, but {len(results)} results"
    return results


def _passes(item: Any) -> bool:
    from _pytest.runner import runtestprotocol

    return all(report.passed or report.skipped for report in runtestprotocol(item, log=False, nextitem=None))


def _trace(item: Any, path: str) -> tuple[Any, float, set[str]]:
    """Run a test unchanged; return it, its duration, and the outermost functions of the module that it calls."""
    functions: set[str] = set()

    def record(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == path:
            functions.add(frame.f_code.co_qualname.split(".<locals>")[0])

    began = time.monotonic()
    sys.setprofile(record)
    passed = _passes(item)
    sys.setprofile(None)
    assert passed, f"{item.nodeid} fails without a change"
    return item, time.monotonic() - began, functions


def _install(name: str, path: Path, mutant: Mutant) -> None:
    """Give the live function the code of the mutant."""
    assert mutant.function
    module = importlib.import_module(name)
    owner: Any = module
    *classes, last = mutant.function.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = vars(owner)[last]
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "__func__", function)
    function = getattr(function, "__wrapped__", function)
    assert isinstance(function, FunctionType), f"{mutant.function} is {function}"
    function.__code__ = _find_code(compile(mutant.tree, str(path), "exec"), mutant.function)


def _find_code(code: CodeType, qualname: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == qualname:
                return constant
            if qualname.startswith(f"{constant.co_qualname}."):
                return _find_code(constant, qualname)
    raise LookupError(f"no code for {qualname}")


def _run_fresh(files: list[str], name: str, path: Path, mutant: Mutant) -> str:
    """Run the tests in a process that imports the mutant in place of the module; return the outcome."""

    class Loader(importlib.abc.Loader, importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path_: object = None, target: object = None) -> Any:
            return importlib.util.spec_from_loader(name, self, origin=str(path)) if fullname == name else None

        def exec_module(self, module: ModuleType) -> None:
            exec(compile(mutant.tree, str(path), "exec"), module.__dict__)

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.meta_path.insert(0, Loader())
        os.write(write, b"survived" if _pytest(["-x", *files], []) == 0 else b"killed")
        os._exit(0)
    os.close(write)
    return _wait(pid, read)


def _pytest(arguments: list[str], plugins: list[Any]) -> int:
    """Run pytest silently, in this process; hypothesis does not shrink what fails."""
    import pytest
    from hypothesis import Phase, settings

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    settings.register_profile(
        "mutation", deadline=None, derandomize=True, max_examples=10, phases=[Phase.explicit, Phase.generate]
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile", "mutation"]
    return pytest.main([*options, "--rootdir", str(ROOT), *arguments], plugins=plugins)


def _wait(pid: int, read: int) -> str:
    """Return what a child wrote; "killed" if it died without a word, "timeout" if it took too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            return "timeout"
        time.sleep(0.002)
    with os.fdopen(read) as words:
        return words.read() or "killed"


def main() -> int:
    """Score the modules of the command line, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="default: all of SCORED, or of SAMPLED with --sampled")
    parser.add_argument("--sampled", action="store_true", help="the modules of SAMPLED; 90 %% are to be killed")
    parser.add_argument("--sample", type=int, default=30, help="mutants of a module of SAMPLED, always the same ones")
    parser.add_argument("--functions", nargs="+", default=(), help="all mutants of these functions, and no others")
    parser.add_argument("--list", action="store_true", help="list the mutants without running them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further module after so long")
    parser.add_argument("--least", type=float, help="share of mutants to kill in each module; default 0.95 or 0.9")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    # Imported before the forks; megarl must not be, or a fresh process could not import a mutant of it.
    import torch  # noqa: F401

    equivalents = tomllib.loads(EQUIVALENTS.read_text()) if EQUIVALENTS.exists() else {}
    enough, until = True, time.monotonic() + 60 * arguments.minutes
    for module in arguments.modules or (SAMPLED if arguments.sampled else SCORED):
        is_sampled = module in SAMPLED
        if time.monotonic() > until:
            print(f"{module:28} not begun: the {arguments.minutes:g} minutes are over")
            continue
        if arguments.list:
            print("\n".join(m.key for m in find_mutants(find_module(module).read_text())))
            continue
        keys, survivors, timeouts = score(module, arguments.sample if is_sampled else None, arguments.functions)
        equal = set(equivalents.get(module, {}))
        for key in survivors:
            if key not in equal:
                print(f"survived  {module}  {key}", flush=True)
        for key in sorted((equal & set(keys) if is_sampled or arguments.functions else equal) - set(survivors)):
            print(f"listed as equivalent, but {'killed' if key in keys else 'no mutant'}  {module}  {key}")
        counted, alive = len(keys) - len(equal & set(survivors)), len(set(survivors) - equal)
        share = 1 - alive / max(counted, 1)
        enough &= share >= (arguments.least or (0.9 if is_sampled else 0.95))
        print(
            f"{module:28} {share:6.1%}  killed {counted - alive} of {counted} ({timeouts} by time-out), "
            f"equivalent {len(keys) - counted}",
            flush=True,
        )
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
