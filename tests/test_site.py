"""The site: its navigation, the pages of the API, and what the build makes of formulas."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest

from megarl.commands import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
SHOWN = {name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}


def test_each_command_is_in_the_navigation_once() -> None:
    labels = [label.strip() for line in NAV.splitlines() for label in line.partition(": ")[0].split(" · ")[1:]]
    of_commands = [label.removeprefix("megarl ") for label in labels if "--" not in label]
    assert sorted(of_commands) == sorted(COMMANDS), "expected each command beside a title in mkdocs.yml, once"


def test_the_navigation_and_the_index_have_every_page_of_the_api() -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "api").glob("*.md"))
    assert sorted(re.findall(r"- (api/\S+)$", NAV, re.M)) == pages
    assert sorted(re.findall(r"\((api/\S+)\)", (DOCS / "api.md").read_text())) == pages
    for name in SHOWN:
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), (
            f"docs/api shows {name}: no module"
        )


def test_the_api_has_every_module_that_is_public() -> None:
    """Packages with a public door, adapters, and modules that the pages import from."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "megarl").rglob("*.py")}
    doors = {name.removesuffix(".__init__") for name, path in modules.items() if "\n__all__ = " in path.read_text()}
    adapters = {name for name in modules if re.fullmatch(r"megarl\.adapters\.(?!_)\w+", name)}
    pages = "\n".join(page.read_text() for page in (ROOT / "README.md", *DOCS.glob("*.md")))
    imported = set(re.findall(r"^ *(?:from|import) (megarl[\w.]*)", pages, re.M))
    assert {"megarl.plugin", "megarl.replay"} <= doors | imported
    assert not (doors | adapters | imported) - SHOWN - INTERNAL, "expected a page in docs/api for each"


INTERNAL = {
    "megarl.data.tiny",  # models of the tests and examples
    "megarl.stand_ins.attention",  # an example of another family names its layer
}


CONFIG = """
INHERIT: {root}/mkdocs.yml
site_dir: {folder}/site
docs_dir: {folder}/docs
hooks: [{root}/tools/docs_hooks.py]
nav: {nav}
"""
DOCSTRING = '''
def mean(values):
    r"""The mean $\\frac{1}{N}\\sum_i x_i$ of `$VALUES`.

    $$\\text{mean} = m$$
    """
'''
GOOD = {
    "formulas.md": r"""# The angle $\theta$

$x_{i}*y*z_{j}$ and $a<b$; a home is `$HOME`, and `\frac` a command.

- a list with $\tfrac{a}{b}$ and a [link $y$](formulas.md)

    $$\frac{a}{b}$$

- | no table

| $A_i*B*$ | $\lvert x\rvert$ | `$x` |
|---|---|---|
| **$y_1$** | $\sum_{i,t}$ | `a|b` |

$$
\sum_{k\le t}
\frac{\pi_\theta}{\mu}
$$

    echo $HOME $(date)

```bash
echo "$A" '\alpha'
```
""",
    "docstring.md": "# Docstring\n\n::: functions.mean\n",
}
BAD = {
    "unknown.md": (r"$\notacommand x$", r"Unknown command"),
    "unclosed.md": (r"$\frac{a}{b$", "closing token"),
    "ampersand.md": ("$a & b$", "table-like"),
    "norm.md": (r"$\|x\|$", r"write \Vert"),
    "dollar.md": ("It costs $5.", "'It costs $5.' outside code"),
    "escaped.md": (r"It costs \$5.", "outside code"),
    "half.md": ("$x$ and $ y", "outside code"),
    "table.md": ("| a |\n|---|\n| $x|_1$ |", "outside code"),
    "round.md": (r"\\(x\\)", "outside code"),
    "command.md": (r"The \frac of it", "outside code"),
    "in_text.md": ("It is $$x$$ here.", "outside code"),
    "no_gap.md": ("It is\n$$\nx\n$$", "outside code"),
    "block.md": ("$$\n\\frac{a}\n$$", "Expected argument"),
    "heading.md": ("## $\\foo$", "Unknown command"),
    "fence.md": ("```math\nx\n```", "language math"),
    "image.md": ("![a](https://example.org/a.png)", "fetches https://example.org/a.png"),
    "script.md": ('<script src="//example.org/a.js"></script>', "fetches //example.org/a.js"),
    "bad_docstring.md": ("::: functions.wrong", "Unknown command"),
}
"""Pages, and what the build says of each."""


def build(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "docs").mkdir()
    for name, text in pages.items():
        (folder / "docs" / name).write_text(text)
    (folder / "functions.py").write_text(DOCSTRING + '\n\ndef wrong():\n    r"""It is $\\foo$."""\n')
    (folder / "mkdocs.yml").write_text(CONFIG.format(root=ROOT, folder=folder, nav=[*pages]))
    command = [ROOT / ".venv-docs" / "bin" / "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.gate
@pytest.mark.slow(minutes=1)
@pytest.mark.needs("docs")
def test_formulas_are_mathml_and_code_keeps_its_dollars(tmp_path: Path) -> None:
    done = build(tmp_path, GOOD)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "formulas.html").read_text()
    content = page.partition("<article")[2].partition("</article>")[0]
    assert content.count("<math") == 11
    assert content.count('<math display="block"') == 2
    assert "<title>The angle θ" in page
    assert "<msub><mi>z</mi><mi>j</mi></msub>" in content
    texts = [html.unescape(re.sub(r"<[^>]*>", "", code)) for code in re.findall(r"<code.*?</code>", content, re.DOTALL)]
    assert {"$HOME", r"\frac", "$x", "a|b"} <= set(texts)
    assert "echo $HOME $(date)\n" in texts
    assert "echo \"$A\" '\\alpha'\n" in texts
    docstring = (tmp_path / "site" / "docstring.html").read_text().partition("<article")[2]
    assert docstring.count("<math") == 2
    assert "<code>$VALUES</code>" in docstring


@pytest.fixture(scope="module")
def bad_build(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return build(tmp_path_factory.mktemp("bad"), {name: f"# Page\n\n{text}\n" for name, (text, _) in BAD.items()})


@pytest.mark.gate
@pytest.mark.slow(minutes=1)
@pytest.mark.needs("docs")
@pytest.mark.parametrize("page", BAD)
def test_the_build_fails_where_a_reader_would_see_latex(bad_build: subprocess.CompletedProcess[str], page: str) -> None:
    assert bad_build.returncode == 1
    said = [line for line in bad_build.stderr.splitlines() if f"{page}: " in line]
    assert BAD[page][1] in "\n".join(said), bad_build.stderr
