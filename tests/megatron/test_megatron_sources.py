"""Several ranks that send the weights, each a part, to the same stand-in servers."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Case, case

SENT, FAILED = "cases_sources:sent", "cases_sources:failed"


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "num_sources"),
    [
        (case(2, SENT, "pp2"), 2),
        (case(2, SENT, "pp2", spare="memory"), 1),
        (case(4, SENT, "tp2 ep2 etp1 pp2"), 4),
        (case(4, SENT, "tp2 ep2 etp1 pp2", most_sources=3), 2),
        (case(4, SENT, "tp2 ep2 etp2"), 2),
    ],
    ids=str,
)
def test_servers_get_the_whole_model_from_several_sources(case: Case, num_sources: int, outcome: dict[str, Any]) -> None:
    for whole, groups, order in zip(outcome["whole"], outcome["groups"], outcome["order"], strict=True):
        assert whole == [True, True]
        assert len(set(groups)) == num_sources  # the second update is sent through the groups of the first one
        half = ["received"] * (len(groups) // 2)
        assert order == 2 * [*half, "flush_cache", "update_weight_version", "continue_generation"]
    first, second = outcome["groups"]
    assert first == second
    print(case, outcome["gathered"], outcome["groups"][0], outcome["bytes"][0])


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (case(2, FAILED, "pp2", fault="nan0"), ["NaN", "at its first source"]),
        (case(2, FAILED, "pp2", fault="nan1"), ["NaN", "NaN"]),
        (case(2, FAILED, "pp2", fault="refuse"), ["update_weights_from_distributed failed", "at its first source"]),
    ],
    ids=str,
)
def test_an_error_at_a_source_ends_the_update_everywhere(case: Case, told: list[str], outcome: dict[str, Any]) -> None:
    assert all(words in said for words, said in zip(told, outcome["said"], strict=True)), outcome["said"]
    assert outcome["first"] == [[], []]  # no version is named, no server goes on
    assert outcome["whole"] == [True, True]  # the next update is as if nothing had happened
