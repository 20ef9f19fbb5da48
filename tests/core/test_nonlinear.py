from __future__ import annotations

import pytest

from megarl.core.choices.credit import parse_objective
from megarl.errors import ConfigError


def test_names():
    assert parse_objective("log") == ("log", 1.0)
    assert parse_objective("power:0.25") == ("power", 0.25)


@pytest.mark.parametrize(
    "name", ["", "cubic", "power", "power:", "power:x", "power:0", "power:-1", "power:nan", "power:inf", "log:2", "Log"]
)
def test_refusals(name):
    with pytest.raises(ConfigError, match="is unknown"):
        parse_objective(name)
