"""``megarl completion bash | zsh``: a script that completes commands, flags, and keys of the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import file as config_file

_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def script(shell: str, commands: Mapping[str, Any]) -> str:
    """The script for bash, which zsh reads through bashcompinit."""
    infos = config_file.keys()
    keys = [f"--{key}" for key in infos if not key.endswith("*")]
    cases = []
    for name, command in commands.items():
        fields = command.__pydantic_fields__
        words = [f"--{field.replace('_', '-')}" for field, info in fields.items() if "positional" not in info.metadata]
        words += ["--help", *(keys if "config" in fields else ())]
        if name == "help":
            words += ["all", *dict.fromkeys(key[2:].partition(".")[0] for key in keys)]
        cases.append(f'        {name}) words="{" ".join(words)}" ;;')
    text = Path(__file__).with_suffix(".bash").read_text("utf-8")
    text = text.replace("@COMMANDS@", " ".join(commands)).replace("@CASES@", "\n".join(cases))
    return (_ZSH if shell == "zsh" else "") + text.rstrip()
