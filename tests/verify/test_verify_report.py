"""A report of a comparison: every count and every sentence, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.errors import ReplayError
from megarl.verify import RoutingReport, compare_routes
from megarl.verify.expert_sets import ExpertSets, bits_of_experts
from megarl.verify.report import MOST_CAUSES

LAYERS, EXPERTS = (1, 4), 16


def sets(seed: int = 0, rows: int = 24, num_layers: int = 2) -> ExpertSets:
    experts = np.random.default_rng(seed).random((rows, num_layers, EXPERTS)).argsort(2)[..., :2]
    bits = bits_of_experts(experts, EXPERTS)
    return ExpertSets(bits, np.arange(rows), np.ones((rows, num_layers), bool), rows)


def thinned(full: ExpertSets, stride: int) -> ExpertSets:
    return ExpertSets(full.bits[::stride], full.rows[::stride], full.known[::stride], full.num_rows)


def with_rows(full: ExpertSets, first: int, last: int, column: int, other: ExpertSets) -> ExpertSets:
    bits = full.bits.copy()
    bits[first:last, column] = other.bits[first:last, column]
    return replace(full, bits=bits)


def text_of(*arguments: object, **named: object) -> list[str]:
    return str(compare_routes(*arguments, **named)).splitlines()  # type: ignore[arg-type]


def test_right_rows_are_counted_by_micro_batch_and_layer() -> None:
    wanted = [sets(0), sets(1)]
    known = np.ones((24, 2), bool)
    known[20:, 1] = False
    used = [with_rows(wanted[0], 3, 5, 1, sets(7)), replace(wanted[1], known=known)]
    report = compare_routes(used, wanted, LAYERS)
    assert report.compared.tolist() == [[24, 24], [24, 20]]
    assert report.right.tolist() == [[24, 22], [24, 20]]
    assert report.right_share == 90 / 92
    assert report.metrics() == {
        "watch/compared": 92.0,
        "watch/right": 90.0,
        "watch/recomputed": 0.0,
        "watch/recomputed_right": 0.0,
        "watch/passes_wrong": 0.0,
        "watch/zero_gates": 0.0,
    }
    first = [np.flatnonzero(np.unpackbits(one.bits[3, 1], bitorder="little")).tolist() for one in (used[0], wanted[0])]
    assert text_of(used, wanted, LAYERS)[:2] == [
        "routing: 90 of 92 rows are right, in 2 micro-batches and 2 layers",
        f"first wrong row: micro-batch 0, layer 4, row 3: experts {first[0]}, expected {first[1]}",
    ]
    assert len(report.causes) == 1
    assert report.causes[0].micro_batch == 0
    assert report.causes[0].text.startswith("micro-batch 0 (2 rows): ")
    with pytest.raises(ReplayError, match="90 of 92"):
        report.require()


def test_rows_of_a_sample_are_compared_at_their_places() -> None:
    wanted = sets()
    assert compare_routes([thinned(wanted, 5)], [wanted], LAYERS).compared.tolist() == [[5, 5]]
    assert compare_routes([thinned(wanted, 5)], [wanted], LAYERS).is_right
    wrong = with_rows(wanted, 10, 11, 0, sets(3))
    assert "row 10: " in str(compare_routes([thinned(wrong, 5)], [wanted], LAYERS))


def test_recomputations_are_compared_with_their_pass() -> None:
    wanted = [sets(0), sets(1), sets(2)]
    again = [wanted[0], wanted[0], ExpertSets.unknown(2)]
    report = compare_routes(wanted, wanted, LAYERS, recomputed=again)
    assert report.recomputed.tolist() == [[24, 24], [24, 24], [0, 0]]
    assert report.recomputed_right.tolist()[0] == [24, 24]
    assert report.recomputed_right.tolist()[1] < [5, 5]
    assert (report.metrics()["watch/recomputed"], report.metrics()["watch/passes_wrong"]) == (96.0, 0.0)
    lines = str(report).splitlines()
    assert (
        lines[1] == f"recomputed: {report.recomputed_right.sum()} of 96 rows equal their forward pass, in 2 of 3 passes"
    )
    assert lines[2].startswith("first wrong row: recomputation of micro-batch 1, layer 1, row 0: ")
    assert lines[3].endswith("these are the routes of micro-batch 0 [micro_batch, 100%]")
    assert lines[3].startswith("cause: recomputation of micro-batch 1 (")


def test_missing_passes_are_told() -> None:
    wanted = [sets(0), sets(1)]
    known = np.ones((24, 2), bool)
    known[:, 1] = False
    assert text_of([replace(wanted[0], known=known)], wanted, LAYERS) == [
        "routing: 24 of 24 rows are right, in 1 micro-batches and 2 layers",
        "1 forward passes ran, expected 2, one for each micro-batch",
        "micro-batch 0: layers [4] had no forward pass of 24 rows",
    ]
    assert text_of([sets(0, 9), wanted[1]], wanted, LAYERS)[1:] == [
        "micro-batch 0: 9 rows ran, the routes have 24",
    ]
    nothing = replace(wanted[0], known=np.zeros((24, 2), bool))
    assert text_of([wanted[0]], [nothing], LAYERS)[1:] == [
        "no row was compared: no expected row is present, or none belongs to a pass"
    ]
    assert compare_routes([], [], LAYERS).missing == []
    assert str(compare_routes([], [], LAYERS)) == "routing: nothing was watched"
    assert np.isnan(compare_routes([], [], LAYERS).right_share)


def test_a_micro_batch_without_rows_is_right_and_predicts_nothing() -> None:
    wanted = [sets(0), sets(0, 0), sets(2)]
    report = compare_routes(wanted, wanted, LAYERS, recomputed=[wanted[0], ExpertSets.unknown(2), wanted[2]])
    report.require()
    assert report.compared.sum() == report.recomputed.sum() == 96
    wrong = compare_routes([wanted[0], wanted[1], sets(3)], wanted, LAYERS)
    assert [cause.kind for cause in wrong.causes] == ["other"]


def test_a_recomputation_of_other_rows_is_told() -> None:
    report = compare_routes([sets(0)], [sets(0)], LAYERS, recomputed=[sets(0, 30)])
    assert report.missing == ["recomputation of micro-batch 0: 30 rows, expected 24"]
    assert report.recomputed.sum() == 0


def test_gates_of_zero_are_told() -> None:
    report = compare_routes([sets()], [sets()], LAYERS, num_zero_gates=1234)
    assert str(report).splitlines()[1] == "gate weights: 1,234 are exactly 0: these experts count nothing"
    assert report.metrics()["watch/zero_gates"] == 1234.0
    assert not report.is_right


def test_a_prediction_layer_agrees_on_a_few_rows_by_chance() -> None:
    few, four = sets(0, 3), sets(0, 4)
    assert compare_routes([few], [few], LAYERS, draft=[few]).is_right
    assert len(compare_routes([four], [four], LAYERS, draft=[four]).causes) == 2


def test_only_borrowed_routes_of_prediction_layers_are_told() -> None:
    wanted, other = sets(0), sets(5, num_layers=2)
    bits = np.stack([other.bits[:, 0], wanted.bits[:, 1]], 1)
    report = compare_routes([wanted], [wanted], LAYERS, draft=[replace(wanted, bits=bits)])
    assert [cause.text for cause in report.causes] == ["micro-batch 0: prediction layer 1 uses the routes of layer 4"]
    assert (report.causes[0].kind, report.causes[0].explained) == ("draft", 1.0)
    assert not report.is_right
    known = np.arange(24)[:, None] % 2 == np.array([[0, 0]])
    bits[1::2] = 0  # rows that are not expected do not count
    halved = replace(wanted, known=known)
    assert len(compare_routes([wanted], [halved], LAYERS, draft=[replace(wanted, bits=bits)]).causes) == 1
    assert not compare_routes([wanted], [wanted], LAYERS, draft=[replace(wanted, bits=bits)]).causes
    assert not compare_routes([wanted], [wanted], LAYERS, draft=[other, sets(0, 9)]).causes
    assert not compare_routes([wanted], [wanted], LAYERS, draft=[sets(0, 9)]).causes


def test_many_wrong_micro_batches_have_the_first_causes() -> None:
    wanted = [sets(seed) for seed in range(12)]
    report = compare_routes(wanted[::-1], wanted, LAYERS)
    assert [cause.micro_batch for cause in report.causes] == list(range(MOST_CAUSES)) == list(range(8))
    assert isinstance(report, RoutingReport)
