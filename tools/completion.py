"""Writes launch/completion.sh: completion of `megarl` for bash and zsh, from the commands and the configuration's keys.

python tools/completion.py
"""

from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from megarl.commands import COMMANDS
from megarl.config import file as config_file
from megarl.config.command import POSITIONAL, OnConfiguration
from megarl.config.plugs import ENGINES
from megarl.core.choices.table import OBJECTIVES
from megarl.ops import shipped

PLACE = Path(__file__).parents[1] / "launch" / "completion.sh"
HEAD = """\
# shellcheck shell=bash disable=SC2034,SC2206,SC2207,SC2296
# Completion of megarl for bash and zsh: commands, flags, keys of the configuration, their choices, and files.
# Written by tools/completion.py. In ~/.bashrc or, behind compinit, in ~/.zshrc:
#
#     . "$(megarl recipes path completion.sh)"

# Words that may stand in a place: "" (commands), behind a command, its flags ("train --"), behind a flag or an action.
_megarl_words() {
  case "$1" in
"""
TAIL = """\
  esac
}

# The candidates for the word that begins with $1, behind the words $2 and on (without megarl); none: files.
_megarl_candidates() {
  local current="$1" command="" word last=""
  shift
  for word in "$@"; do
    case "$word" in -*) ;; *) [ -n "$command" ] || command="$word" ;; esac
    last="$word"
  done
  if [ -z "$command" ]; then
    _megarl_words ""
    return
  fi
  case "$last" in --*) _megarl_words "$last" ;; esac
  case "$current" in
    -*)
      _megarl_words "$command --"
      case " $(_megarl_words configured) " in *" $command "*) _megarl_words keys ;; esac
      return ;;
  esac
  if [ "$last" = "$command" ]; then _megarl_words "$command"; else _megarl_words "$command $last"; fi
}

_megarl_bash() {
  local current="${COMP_WORDS[COMP_CWORD]}"
  local words
  words="$(_megarl_candidates "$current" "${COMP_WORDS[@]:1:COMP_CWORD-1}")"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [ -z "$words" ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}

_megarl_zsh() {
  local -a found
  found=(${=$(_megarl_candidates "$PREFIX" "${(@)words[2,CURRENT-1]}")})
  if (( $#found )); then compadd -a found; else _files; fi
}

if [ -n "${ZSH_VERSION:-}" ]; then
  compdef _megarl_zsh megarl
else
  complete -o filenames -F _megarl_bash megarl
fi
"""


def choices_of(annotation: Any) -> list[str]:
    """The values of a Literal or a boolean, inside of an option too."""
    values: list[str] = []
    for kind in (annotation, *get_args(annotation)):
        values += [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else []
        values += ["true", "false"] if kind is bool else ["none"] if kind is NoneType else []
    return values


def cases() -> dict[str, list[str]]:
    """Place -> words, as in ``_megarl_words``."""
    words: dict[str, list[str]] = {"": [*COMMANDS, "--help", "--version"], "configured": []}
    keys = {f"--{key}": info for key, info in config_file.keys().items() if not key.endswith(".*")}
    for name, command in COMMANDS.items():
        fields: dict[str, Any] = command.__pydantic_fields__  # type: ignore[attr-defined]
        flags = {
            f"--{field}".replace("_", "-"): info for field, info in fields.items() if POSITIONAL not in info.metadata
        }
        positional = [info for info in fields.values() if POSITIONAL in info.metadata]
        takes_keys = issubclass(command, OnConfiguration) or getattr(command, "takes_keys", False) or name == "doctor"
        words[f"{name} --"] = [*flags, "--help"]
        words["configured"] += [name] if takes_keys else []
        words[name] = choices_of(positional[0].annotation) if positional else []
        for flag, info in flags.items():
            words[f"{name} {flag}"] = [] if info.annotation is bool else choices_of(info.annotation)
    words |= {flag: choices_of(info.annotation) for flag, info in keys.items()}
    words |= {"keys": [*keys], "--train.objective": [*OBJECTIVES], "--rollout.engine": [*ENGINES]}
    words |= {place: [*shipped.list_recipes()] for place in ("recipes copy", "recipes path")}
    return {place: [word for word in listed if word != "none" or len(listed) > 1] for place, listed in words.items()}


def text() -> str:
    lines = [f'    "{place}") echo "{" ".join(words)}" ;;' for place, words in cases().items() if words]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> None:
    PLACE.write_text(text())
    print(f"wrote {PLACE}")


if __name__ == "__main__":
    main()
