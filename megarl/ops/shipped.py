"""Finds and copies what is shipped: recipes, scripts, and the config.json of models."""

import os
import shutil
import tomllib
from pathlib import Path

from megarl.errors import ConfigError, did_you_mean
from megarl.files.outputs import make_folder
from megarl.files.shipped import shipped_folder

_LAUNCH = shipped_folder("launch")
RECIPES = _LAUNCH / "recipes"
MODELS = _LAUNCH / "models"
SCRIPTS = _LAUNCH / "scripts"
COMPLETION = _LAUNCH / "completion.sh"
GPU = _LAUNCH / "gpu"
"""A container recipe and the requirements of its two environments."""


def list_recipes() -> dict[str, str]:
    """The first comment of each recipe, by name."""
    first_lines = {path.stem: path.read_text().partition("\n")[0] for path in sorted(RECIPES.glob("*.toml"))}
    return {name: line.removeprefix("# ") for name, line in first_lines.items()}


def find(name: str) -> Path:
    """The file of a recipe or of a script; ConfigError for an unknown name."""
    files = {path.name: path for path in (*SCRIPTS.iterdir(), *GPU.iterdir(), COMPLETION)}
    files |= {path.stem: path for path in RECIPES.glob("*.toml")}
    if name not in files:
        hint = did_you_mean(name, files, f"expected one of {', '.join(sorted(files))}")
        raise ConfigError(f"found no recipe or script {name!r}; {hint}")
    return files[name]


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a recipe, the scripts, and the config.json of the model to the place named in the recipe.

    Returns the copies. ConfigError, before any write, if a target exists with different content.
    """
    copies = {folder / place: source for place, source in _parts(name).items()}
    for target, source in copies.items():
        if os.path.lexists(target) and not (target.is_file() and target.read_bytes() == source.read_bytes()):
            raise ConfigError(f"{target} exists and is another file; nothing was copied, choose another folder")
    for target, source in copies.items():
        make_folder(target.parent)
        shutil.copyfile(source, target)  # not its mode, for an installed file may be read-only
        if source.parent == SCRIPTS:
            target.chmod(target.stat().st_mode | 0o111)
    return list(copies)


def _parts(name: str) -> dict[str, Path]:
    recipe = find(name)
    if recipe == COMPLETION or recipe.parent == SCRIPTS:
        return {recipe.name: recipe}
    if recipe.parent == GPU:
        return {path.name: path for path in sorted(GPU.iterdir())}
    model = Path(tomllib.loads(recipe.read_text())["model"]["path"])
    files = {path.name: path for path in (recipe, *sorted(SCRIPTS.iterdir()))}
    if (MODELS / model.name).is_dir():  # the quickstart makes its own
        files[f"{model}/config.json"] = MODELS / model.name / "config.json"
    return files
