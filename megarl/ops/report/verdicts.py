"""The verdicts of ``megarl.watch.health``, at the top of a report."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from megarl.config.tables.health import HealthConfig
from megarl.errors import DataError
from megarl.watch.health import CHECKS, judge_run


def render_verdicts(records: Sequence[Mapping[str, Any]], config: Mapping[str, Any], name: str = "") -> str:
    """Return the warnings and alarms of a run as HTML, and which checks looked; "no alarm" only if some did.

    config: the run's own, whose table [health] has the limits; DataError if it is broken. name: of one run of several.
    """
    limits = config.get("health", {})
    try:
        settings = HealthConfig(**limits)
    except (TypeError, pydantic.ValidationError) as error:
        raise DataError(f"config.toml: the table [health] is broken: {' '.join(str(error).split())}") from error
    active = [check for check in CHECKS if getattr(settings, check.name) != "off"]
    ran = [check.name for check in active if any(check.look(record)[1] is not None for record in records)]
    silent = [check.name for check in active if check.name not in ran]
    off = [check.name for check in CHECKS if check not in active]
    lists = [("Checks that looked", ran), ("found nothing to judge", silent), ("switched off", off)]
    looked = "; ".join(f"{title}: {', '.join(names)}" for title, names in lists if names) + "."
    prefix = f"{name}: " if name else ""
    say = str if name else str.capitalize
    verdicts, cards = judge_run(records, settings), []
    for verdict in verdicts:
        since = "" if verdict.since is None else f"since step {verdict.since}, "
        observation = f"{since}{verdict.check}: {verdict.found}"
        cards.append(_card(verdict.level, prefix + say(verdict.level), observation, verdict.cause, verdict.advice))
    if not ran:
        cards.append(_card("warning", prefix + say("not judged"), "the run has recorded nothing that a check reads"))
    elif not any(verdict.level == "alarm" for verdict in verdicts):
        level, observation = ("warning", "") if verdicts else ("ok", "no warning either")
        cards.insert(0, _card(level, prefix + say("no alarm"), observation))
    return f'{"".join(cards)}<p class="note">{html.escape(prefix + looked)}</p>'


def _card(level: str, title: str, observation: str, cause: str = "", advice: str = "") -> str:
    texts = ((head, text) for head, text in (("Cause:", cause), ("Try:", advice)) if text)
    paragraphs = "".join(f"<p><b>{head}</b> {html.escape(text)}</p>" for head, text in texts)
    details = f" &nbsp; {html.escape(observation)}" if observation else ""
    heading = f'<strong class="level">{html.escape(title)}</strong>{details}'
    return f'<div class="verdict {level}">{heading}{paragraphs}</div>'
