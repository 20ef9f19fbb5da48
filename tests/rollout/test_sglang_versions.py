"""The table of SGLang releases."""

from __future__ import annotations

import pytest

from megarl.errors import ConfigError, RolloutError
from megarl.rollout.sglang_versions import CAPABILITIES, FAULTS, can, check_version, parse_version


@pytest.mark.parametrize(
    ("text", "version"), [("0.5.23", (0, 5, 23)), ("v0.5.7", (0, 5, 7)), ("0.5.21.post1", (0, 5, 21))]
)
def test_release_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


def test_something_else_than_a_release_number_is_an_error() -> None:
    with pytest.raises(RolloutError, match="'main', expected a release number"):
        parse_version("main")


def test_what_releases_can_do() -> None:
    def able(text: str) -> list[str]:
        return [entry.name for entry in CAPABILITIES if can(parse_version(text), entry.name)]

    assert able("0.5.6") == []
    assert able("0.5.7") == ["routed_experts"]
    assert able("0.5.12") == ["routed_experts", "routed_experts_start_len"]
    assert able("0.5.20") == ["routed_experts", "routed_experts_start_len", "weight_versions"]
    assert able("0.5.21") == [entry.name for entry in CAPABILITIES]
    with pytest.raises(KeyError):
        can((0, 5, 23), "telepathy")


def test_a_release_without_routes_is_refused_and_faults_are_told() -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.6 returns no routes, expected at least 0\.5\.7"):
        check_version("0.5.6")
    assert check_version("0.5.23") == ((0, 5, 23), [])
    _, warnings = check_version("0.5.9")
    assert len(warnings) == 2
    assert "physical" in warnings[0]
    assert "0.5.10 is free of that" in warnings[0]
    assert len(check_version("0.5.17")[1]) == 1
    assert "newer than 0.5.23" in check_version("0.6.0")[1][0]
    assert {fault.last for fault in FAULTS} == {(0, 5, 9), (0, 5, 17)}
