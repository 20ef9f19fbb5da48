"""``megarl completion bash | zsh``: a script that completes commands, their flags, and keys of the configuration."""

from collections.abc import Mapping
from typing import Any

from megarl.config import file as config_file

_SCRIPT = """\
# Completion of megarl: put it where your shell looks, see docs/install.md.
_megarl() {
    local word="${COMP_WORDS[COMP_CWORD]}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]}" in
@CASES@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "$word" in -*) ;; *) COMPREPLY+=($(compgen -f -- "$word")) ;; esac
}
complete -o filenames -F _megarl megarl
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def script(shell: str, commands: Mapping[str, Any]) -> str:
    """The script for bash; zsh reads the same one through bashcompinit."""
    known = config_file.keys()
    keys = [f"--{key}" for key in known if not key.endswith("*")]
    cases = []
    for name, command in commands.items():
        fields = command.__pydantic_fields__
        words = [f"--{field.replace('_', '-')}" for field, info in fields.items() if "positional" not in info.metadata]
        words += ["--help", *(keys if "config" in fields else ())]
        if name == "help":
            words += ["all", *dict.fromkeys(key[2:].partition(".")[0] for key in keys)]
        cases.append(f'        {name}) words="{" ".join(words)}" ;;')
    text = _SCRIPT.replace("@COMMANDS@", " ".join(commands)).replace("@CASES@", "\n".join(cases))
    return (_ZSH if shell == "zsh" else "") + text.rstrip()
