"""Several ranks that send the weights, each a part, to the same stand-in servers."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Case, case

SENT, FAILED = "cases_sources:sent", "cases_sources:failed"


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "num_sources", "gathering"),
    [
        (case(2, SENT, "pp2"), 2, []),
        (case(2, SENT, "pp2", spare="memory"), 1, [0]),
        (case(4, SENT, "tp2 ep2 etp1 pp2"), 4, [0, 2]),
        (case(4, SENT, "tp2 ep2 etp1 pp2", most_sources=3), 2, [0, 2]),
        (case(4, SENT, "tp2 ep2 etp2"), 2, [0, 2]),
        (case(4, SENT, "pp2"), 2, []),  # two copies of each stage, of which one sends
        (case(2, SENT, "pp2 vpp2", model="tied_experts"), 2, []),  # the last stage has the embedding too
    ],
    ids=str,
)
def test_servers_get_the_whole_model_from_several_sources(
    case: Case, num_sources: int, gathering: list[int], outcome: dict[str, Any]
) -> None:
    """Each source gathers what lies in its part alone."""
    columns = [outcome[key] for key in ("whole", "groups", "bytes", "order")]
    for whole, groups, sizes, order in zip(*columns, strict=True):
        assert whole == [True, True]
        assert len(set(groups)) == num_sources  # the second update is sent through the groups of the first one
        assert sum(sizes) == 2 * outcome["size"]
        half = ["received"] * (len(groups) // 2)
        steps = [*half, "flush_cache", "update_weight_version", "continue_generation"]
        assert order[: 2 * len(steps)] == 2 * steps
    assert outcome["alone"] == [True, True]
    assert len(outcome["groups"]) == 2
    assert outcome["groups"][0] == outcome["groups"][1]
    assert [rank for rank, number in enumerate(outcome["gathered"]) if number] == gathering
    by_source = {group: 0 for group in outcome["groups"][0]}
    for group, size in zip(outcome["groups"][0], outcome["bytes"][0], strict=True):
        by_source[group] += size
    print(f"{case}: gathered {outcome['gathered']}, sent {list(by_source.values())} in two updates")


BROADCAST = "update_weights_from_distributed"
FAULTS = ("refuse pause_generation", "nan0", "nan1", f"refuse {BROADCAST}", f"die_at {BROADCAST}")


@pytest.mark.multirank
@pytest.mark.parametrize("case", [case(2, FAILED, "pp2", faults=FAULTS)], ids=str)
def test_an_error_anywhere_leaves_no_server_with_half_an_update(case: Case, outcome: list[dict[str, Any]]) -> None:
    *errors, death = outcome
    told = [["pause_generation failed", "failed"], ["NaN", "failed"], ["NaN", "NaN"], [f"{BROADCAST} failed", "failed"]]
    goes_on = ["update_weight_version", "continue_generation"]
    for fault, found, wanted in zip(FAULTS, errors, told, strict=False):
        assert all(words in said for words, said in zip(wanted, found["said"], strict=True)), found["said"]
        # A server that refuses stays paused, and the other one has the whole update; of one that fails, none goes on.
        assert found["first"] == ([goes_on, []] if fault.startswith("refuse") else [[], []])
        assert found["whole"] == [True, True]  # the next update is as if nothing had happened
    assert death["said"] == ["", ""]  # the server that dies is lost alone
    assert death["first"] == [goes_on, []]
    assert death["whole"] == [True, False]
