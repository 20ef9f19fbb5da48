"""What ``megarl.watch.health`` says about a run, on top of its report."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from megarl.config.tables.health import HealthConfig
from megarl.errors import DataError
from megarl.watch.health import judge_run
from megarl.watch.health.checks import CHECKS


def render_verdicts(records: Sequence[Mapping[str, Any]], config: Mapping[str, Any], name: str = "") -> str:
    """Return the warnings and alarms of a run as HTML, and which checks looked; "no alarm" only if some did.

    config: the run's own, whose table [health] has the limits; DataError if it is broken. name: of one run of several.
    """
    limits = config.get("health", {})
    try:
        settings = HealthConfig(**limits)
    except (TypeError, pydantic.ValidationError) as error:
        raise DataError(f"config.toml: the table [health] is broken: {' '.join(str(error).split())}") from error
    on = [check for check in CHECKS if getattr(settings, check.name) != "off"]
    ran = [check.name for check in on if any(check.look(record)[1] is not None for record in records)]
    unknown = [check.name for check in on if check.name not in ran]
    off = [check.name for check in CHECKS if check not in on]
    parts = [("Checks that looked", ran), ("found nothing to judge", unknown), ("switched off", off)]
    looked = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts if names) + "."
    of = f"{name}: " if name else ""
    say = str if name else str.capitalize
    found = judge_run(records, settings)
    cards = []
    for each in found:
        since = "" if each.since is None else f"since step {each.since}, "
        cards.append(
            _card(each.level, of + say(each.level), f"{since}{each.check}: {each.found}", each.cause, each.advice)
        )
    if not ran:
        cards.append(_card("warning", of + say("not judged"), "the run has recorded nothing that a check reads"))
    elif not any(each.level == "alarm" for each in found):
        cards.insert(0, _card("warning" if found else "ok", of + say("no alarm"), "" if found else "no warning either"))
    return f'{"".join(cards)}<p class="note">{html.escape(of + looked)}</p>'


def _card(level: str, title: str, found: str, cause: str = "", advice: str = "") -> str:
    more = [f"<p><b>{head}</b> {html.escape(text)}</p>" for head, text in (("Cause:", cause), ("Try:", advice)) if text]
    said = f" &nbsp; {html.escape(found)}" if found else ""
    heading = f'<strong class="level">{html.escape(title)}</strong>{said}'
    return f'<div class="verdict {level}">{heading}{"".join(more)}</div>'
