"""Puts ``launch`` and ``patches`` of the checkout into the wheel; setuptools calls it (pyproject.toml)."""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

FOLDERS = ("launch", "patches")


class BuildPackage(build_py):
    """Builds the package with its folders of data. An editable installation finds both at the top of the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in FOLDERS:
                target = Path(self.build_lib, "megarl", folder)
                shutil.rmtree(target, ignore_errors=True)  # left by an earlier build
                shutil.copytree(folder, target)
