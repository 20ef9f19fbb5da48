from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from rich.console import Console

from megarl import cli
from megarl.core.sampling import Collector, Uniform, ada_seq_balance, tier_cost
from megarl.errors import ConfigError
from megarl.train.simulate import PICTURES, RESULTS, TABLES, Settings, simulate
from megarl.train.simulate_exact import exact
from megarl.train.simulate_fit import BetaMixture, fit, max_error, parse_betas, parse_points
from megarl.train.simulate_known import POST_POINTS, Tiers, known_numbers, shared_budgets
from megarl.train.simulate_outcome import Outcome
from megarl.train.simulate_rules import Arm, Budget, SimulatedRewards, arms, drive, matched, run

MIXTURE = BetaMixture((0.8,), (1.3,), (1.9,), 0.2)


def arm(name: str) -> Arm:
    return next(a for a in arms(Budget()) if a.name == name)


def outcome(name: str, rates: np.ndarray, seed: int = 0) -> Outcome:
    return run(arm(name), [rates], seed)


class TestFit:
    def test_the_posts_points_are_met(self):
        found = fit(POST_POINTS)
        assert max_error(found, POST_POINTS) < 1e-5
        assert 0.18 < found.never < 0.19
        solved = np.diff(found.pass_at([4, 32, 256]), prepend=0.0)
        assert abs(tier_cost((4, 32, 256), solved) - 60.14) < 0.01

    def test_a_known_mixture_is_found_again(self):
        for true in (BetaMixture((1.0,), (0.4,), (1.7,)), MIXTURE):
            ks = [1, 2, 4, 8, 16, 64, 256]
            found = fit(dict(zip(ks, true.pass_at(ks).tolist(), strict=True)))
            np.testing.assert_allclose(found.alphas, true.alphas, rtol=2e-2)
            np.testing.assert_allclose(found.betas, true.betas, rtol=2e-2)
            assert abs(found.never - true.never) < 5e-3
        # prompts that are never solved only where the points want them
        assert fit({1: 0.5, 2: 2 / 3, 4: 0.8, 8: 8 / 9}).never == 0

    def test_two_components_fit_better_than_one(self):
        true = BetaMixture((0.5, 0.5), (0.3, 20.0), (12.0, 4.0))
        ks = [1, 2, 4, 8, 16, 32, 64, 128]
        points = dict(zip(ks, true.pass_at(ks).tolist(), strict=True))
        assert max_error(fit(points, 2), points) < 1e-3 < max_error(fit(points, 1), points)

    def test_pass_at_k_by_draws_and_by_quadrature(self):
        rates = MIXTURE.draw(200_000, np.random.default_rng(0))
        assert abs((rates == 0).mean() - 0.2) < 4 * 0.4 / math.sqrt(rates.size)
        for a, b in ((1.3, 1.9), (1.0, 1.0), (0.5, 0.5), (0.02, 3.0), (40.0, 2.0)):
            law = BetaMixture((0.9,), (a,), (b,), 0.1)
            nodes, weights = law.quadrature(64)
            for k in (1, 7, 64):
                assert abs(weights @ (1 - (1 - nodes) ** k) - law.pass_at([k])[0]) < 1e-10
        for k in (1, 8, 100):
            assert abs((1 - (1 - rates) ** k).mean() - MIXTURE.pass_at([k])[0]) < 4e-3
        inside = (np.arange(20000) + 0.5) / 20000
        assert abs(MIXTURE.density(inside).mean() - 0.8) < 1e-3

    @pytest.mark.parametrize(
        "words", [["4"], ["4:x"], ["4:0.5:1"], ["0:0.5"], ["2.5:0.5"], ["4:0"], ["4:1.2"], ["4:.5", "4:.6"], ["4:nan"]]
    )
    def test_points_that_are_none(self, words):
        with pytest.raises(ConfigError, match="--passk"):
            parse_points(words)

    def test_points_must_not_fall(self):
        with pytest.raises(ConfigError, match=r"pass@8 = 0\.4 is below pass@2 = 0\.5"):
            parse_points(["8:0.4", "2:0.5"])
        assert list(parse_points(["32:0.8", "4:0.6"])) == [4, 32]

    @pytest.mark.parametrize(("words", "never"), [(["1:2"], 0), (["0.5:1:1"], 0.2), (["1:0:1"], 0), (["1:1:1"], -1)])
    def test_mixtures_that_are_none(self, words, never):
        with pytest.raises(ConfigError):
            parse_betas(words, never)


@pytest.mark.parametrize(
    "name", ["uniform 4", "uniform 8", "ada-seq-pos", "ada-seq-balance", "ada-seq-balance, unbiased", "dapo 8"]
)
def test_the_real_rules_agree_with_exact_averages(name):
    """Collector, sub-sampling and credit on one side; laws, quadrature and the formula of the gradient on the other."""
    batches = []
    for seed in range(8):
        rates = MIXTURE.draw(300, np.random.default_rng((7, seed)))
        found = outcome(name, rates, seed)
        batches.append((found.cost, found.effective, found.variance, found.signal))
    known = exact(arm(name), MIXTURE)
    values = np.array(batches)
    error = values.std(axis=0, ddof=1) / math.sqrt(len(batches))
    expected = [known.cost, known.effective, known.variance, known.signal]
    assert (np.abs(values.mean(axis=0) - expected) <= 5 * error + 1e-9).all(), (values.mean(axis=0), expected, error)
    assert (error <= 0.04 * np.abs(expected)).all()


def test_gradient_of_one_prompt_by_hand():
    """Groups of 4 at p = 1/4: (r - 1/4) (r - mean) over 4, all 16 outcomes."""
    rate, mean, square, wording = 0.25, 0.0, 0.0, 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=4):
        r = np.array(rewards)
        chance = float(np.prod(np.where(r == 1, rate, 1 - rate)))
        gradient = float(((r - r.mean()) * (r - rate)).mean())
        mean, square = mean + chance * gradient, square + chance * gradient**2
        wording += chance * float(((r - r.mean()) ** 2).sum()) / 16
    single = BetaMixture((1.0,), (1e3 * rate,), (1e3 * (1 - rate),))  # nearly one pass rate
    known = exact(arm("uniform 4"), single)
    assert abs(known.variance - (square - mean**2 + wording)) < 1e-3
    found = outcome("uniform 4", np.full(6000, rate))
    assert abs(found.variance - (square - mean**2 + wording)) < 1e-3
    assert abs(found.signal - mean**2) < 1e-3
    assert abs(mean - rate * (1 - rate) * 3 / 4) < 1e-12


def test_the_unbiased_combination_has_the_gradient_of_p():
    rates = np.full(1500, 0.1)
    plain, unbiased = (outcome(f"ada-seq-balance{kind}", rates) for kind in ("", ", unbiased"))
    assert abs(unbiased.gradients.mean() - 0.09) < 4 * unbiased.gradients.std() / math.sqrt(3000)
    assert plain.gradients.mean() > 2 * 0.09


@pytest.mark.parametrize("name", ["ada-est", "allotted, linear", "allotted, log", "gvm-raft", "gvm-grpo"])
def test_allotted_rules_draw_exactly_the_budget(name):
    rates = MIXTURE.draw(300, np.random.default_rng(3))
    found = outcome(name, rates)
    assert abs(found.cost - 8) < 1 / 300
    assert found.cost_error == 0
    # and not evenly: hopeless prompts get most where 1 / p says so, none where nothing was ever accepted
    hopeless = found.drawn[:, found.rates == 0].mean()
    assert hopeless == 0 if name.startswith("gvm") else (hopeless > 12) != (name == "allotted, linear")


def test_allotting_for_the_least_variance_has_less_than_equal_shares():
    rates = BetaMixture((1.0,), (0.3,), (0.6,)).draw(2000, np.random.default_rng(1))
    assert outcome("allotted, linear", rates).noise < 0.95 * outcome("uniform 8", rates).noise


def test_uniform_at_the_cost_of_another_rule():
    rule = matched(arm("ada-seq-balance"), 20.6, Budget()).fixed
    assert rule == Uniform(21, 4, "balance")


def test_known_numbers():
    known = known_numbers(1)
    for row in known:
        assert abs(row.found - row.exact) < 4.5 * row.error, row
    exacts = {round(row.exact, 4) for row in known}
    assert exacts >= {5.0, 80.0, 10.1875, 3.0, 20.9625, 27.3147, 8.5667, 13.5643, 0.4305, 60.14}
    by_name = {row.what: row for row in shared_budgets(1)}
    assert by_name["log"].counts == (16, 8, 6, 2)
    assert by_name["raft"].counts == (14, 8, 6, 4)
    for row in by_name.values():
        if row.variance is not None:
            assert row.variance <= row.equal + 1e-12
            assert abs(row.found - row.variance) < 4.5 * row.error, row


def test_tiers():
    samples = drive(Collector(Tiers(), 3), lambda p, s: float((p == 1 and s == 3) or (p == 2 and s == 20))).drawn[1]
    assert samples.tolist() == [256, 4, 32]


def test_rewards_do_not_depend_on_who_asks_first():
    rates = np.array([0.2, 0.7])
    first, second = (SimulatedRewards(rates, (1, 2)) for _ in range(2))
    late = [second(1, s) for s in (70, 3, 40)]
    assert [first(1, s) for s in range(80)][70] == late[0]
    assert first(1, 3) == late[1]
    assert drive(Collector(ada_seq_balance(), 2), first).drawn.tolist() == (
        drive(Collector(ada_seq_balance(), 2), second).drawn.tolist()
    )


SMALL = Settings(POST_POINTS, prompts=90, prompts_per_step=40, seed=4)


def test_the_folder_is_whole_the_same_for_a_seed_and_replaces_only_its_like(tmp_path):
    console = Console(file=(tmp_path / "shown").open("w"))
    out = tmp_path / "deep" / "simulation"
    simulate(SMALL, out, console)
    assert sorted(path.name for path in out.iterdir()) == sorted([RESULTS, TABLES, *PICTURES])
    assert [path.name for path in out.parent.iterdir()] == ["simulation"]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert all(before[name].startswith(b"\x89PNG") and len(before[name]) > 10_000 for name in PICTURES)
    assert "60.14" in before[TABLES].decode()
    assert "…" not in before[TABLES].decode()
    numbers = json.loads(before[RESULTS])
    assert len(numbers["rules"]) == len(arms(Budget())) + 2
    simulate(SMALL, out, console)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["simulation"]
    (out / "weights.bin").write_text("precious")
    with pytest.raises(ConfigError, match="something else than a simulation"):
        simulate(SMALL, out, console)
    assert (out / "weights.bin").exists()


def test_another_seed_gives_other_numbers_of_the_same_size():
    rates = MIXTURE.draw(200, np.random.default_rng(0))
    first, again, second = (outcome("ada-seq-balance", rates, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.gradients, again.gradients)
    assert first.cost != second.cost
    assert abs(first.cost - second.cost) < 6 * first.cost_error


def test_prompts_that_are_never_solved_have_no_gradient_and_end_at_the_caps(tmp_path):
    hopeless = Settings({}, BetaMixture((0.0,), (1.0,), (1.0,), 1.0), prompts=6, prompts_per_step=4)
    simulate(hopeless, tmp_path / "out", Console(file=(tmp_path / "shown").open("w")))
    by_name = {row["name"]: row for row in json.loads((tmp_path / "out" / RESULTS).read_text())["rules"]}
    assert all(row["effective"] == row["variance"] == 0 for row in by_name.values())
    assert by_name["ada-seq-pos"]["samples"] == 32
    assert by_name["dapo 8"]["missing"] == 2 * 6
    assert by_name["uniform 8"]["noise"] == "inf"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--passk", "4"], "--passk 4: expected K:RATE"),
        (["--passk", "4:0.6", "8:0.5"], "more tries never solve less"),
        (["--beta", "0.5:1:1"], "add up to 0.5"),
        (["--beta", "1:1:1", "--passk", "4:0.5"], "found --passk and --beta"),
        (["--never", "0.5"], "found --never without --beta"),
        (["--train-size", "1"], "--train-size 1"),
        (["--max-samples", "3"], "--max-samples 3"),
        (["--samples", "1"], "--samples 1"),
        (["--round-size", "0"], "--round-size 0"),
        (["--prompts", "0"], "--prompts 0"),
        (["--components", "9"], "--components 9"),
        (["--seed", "-1"], "--seed -1"),
        (["--prompts", "many"], "many"),
        (["--run.steps", "3"], "megarl simulate reads no configuration"),
    ],
)
def test_a_wrong_command_line_costs_one_line(capsys, tmp_path, words, expected):
    assert cli.main(["simulate", "--out", str(tmp_path / "out"), *words]) == 2
    seen = capsys.readouterr().err.splitlines()
    assert len(seen) == 1
    assert expected in seen[0]
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert cli.main(["simulate", "--out", str(out)]) == 2
        seen = capsys.readouterr().err.splitlines()
        assert len(seen) == 1
        assert "cannot be a folder" in seen[0]


def test_from_the_command_line(capsys, tmp_path):
    words = ["simulate", "--out", str(tmp_path / "out"), "--beta", "0.6:0.5:2", "0.3:8:2", "--never", "0.1"]
    assert cli.main([*words, "--prompts", "40", "--prompts-per-step", "20", "--seed", "3"]) == 0
    assert "0.6 Beta(0.5, 2) + 0.3 Beta(8, 2) + 0.1 never solved" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / RESULTS).read_text())["settings"]["seed"] == 3
