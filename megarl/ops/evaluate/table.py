"""The table of scores that ``megarl eval`` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.errors import printable
from megarl.text_table import text_table


def to_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a row per score of each benchmark, and the remarks below."""
    headings = ("benchmark", "score", "value", "95 %, other prompts", "95 %, other samples", "prompts")
    rows: list[Sequence[str]] = []
    for name, result in results.items():
        figures = result["figures"]
        for index, (label, entry) in enumerate(_label(figures).items()):
            shown = f"{entry['value']:.1%}", _range(entry["other_prompts"]), _range(entry.get("other_samples"))
            rows.append(("" if index else name, label, *shown, str(entry["prompts"])))
        rows.append(("", "judged", f"{figures['judged']} of {figures['responses']}", "", "", ""))
        rows.append(("", "length", f"{figures['length_mean']:.1f}", "", "", ""))
        rows.append(("", "truncated", f"{figures['truncated']:.1%}", "", "", ""))
        rows.append(())
    remarks = [
        printable(f"{name}: {line}")
        for name, result in results.items()
        if (line := _describe_unjudged(result["figures"], result["first_error"]))
    ]
    return "\n".join([text_table(rows, headings, words=2), *remarks])


def _label(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {f"avg@{figures['samples']}": figures["avg"]} | {f"pass@{k}": entry for k, entry in figures["pass"].items()}


def _describe_unjudged(figures: Mapping[str, Any], first_error: str | None) -> str | None:
    if figures["judged"] == figures["responses"]:
        return None
    counts = f"{figures['judged']} of {figures['responses']} responses judged, the others count as not correct"
    return f"{counts}; first failure: {first_error}"


def _range(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"
