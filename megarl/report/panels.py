"""The panels of a run's report: which metrics each one plots, and how to read it."""

from megarl.report import plots
from megarl.report.panel import Panel
from megarl.report.plots import GREY, ORANGE, PHASES, PURPLE, RED, TEAL, Line
from megarl.report.series import LAYER_PREFIXES

PANELS = {
    "reward": Panel(
        "Reward and pass rate",
        "Training curves are over the sampled responses of each step; dots are evaluations on held-out problems.",
        "share of responses, mean reward",
        plot=plots.plot_reward,
        plotted=("reward/mean", "reward/pass_rate", "eval/pass_rate", "eval/reward"),
        wide=True,
    ),
    "effective_prompts": Panel(
        "Prompts that teach",
        "Only prompts whose responses differ in reward have a gradient. All solved or none solved: nothing to learn.",
        "share of prompts",
        (
            Line("sampling/contrast_fraction", "of those drawn", GREY, "dashed"),
            Line("prompts/effective_ratio", "of those that train"),
        ),
        "whole percent",
    ),
    "samples": Panel(
        "What sampling costs",
        "Responses drawn per prompt, and the number of rounds. An adaptive rule draws more responses to hard prompts.",
        "responses, rounds",
        (Line("sampling/samples_per_prompt", "drawn, per prompt"), Line("sampling/rounds", "rounds", ORANGE)),
        "zero",
    ),
    "frontier": Panel(
        "Accuracy, cost and entropy",
        "Evaluations by the tokens drawn so far, first stages included. Compare runs at equal cost, not equal steps.",
        "pass rate",
        plot=plots.plot_frontier,
        plotted=("cost/tokens",),
    ),
    "estimates": Panel(
        "Estimates that divide the budget",
        "Ada-Est: estimated pass rates, and their distance from the observed ones. GVM: the rates of its first stage.",
        "share",
        (
            Line("estimate/rate_mean", "estimated pass rate"),
            Line("estimate/error", "distance to what was drawn", ORANGE),
            Line("gvm/acceptance_rate", "accepted in the first stage"),
            Line("gvm/hopeless_fraction", "prompts without an accepted one", ORANGE),
        ),
        "whole percent",
        optional=True,
    ),
    "episodes": Panel(
        "Episodes",
        "Turns of the model per response; failed are those whose environment raised, or that took too long.",
        "turns, share",
        (Line("episode/turns_mean", "turns"), Line("episode/failed_fraction", "share that failed", ORANGE)),
        "zero",
        optional=True,
    ),
    "length": Panel(
        "Response length",
        "Tokens that the model generated, end token included.",
        "response length (tokens)",
        (
            Line("response/length_max", "longest", GREY, "dashed"),
            Line("response/length_mean", "mean"),
            Line("eval/length_mean", "mean (held-out)", ORANGE, "dots"),
        ),
        "zero",
    ),
    "truncated": Panel(
        "Cut-off responses",
        "Responses that reached the length limit without ending.",
        "share of responses",
        (Line("response/truncated_fraction", "cut off at the length limit", ORANGE),),
        "percent",
    ),
    "entropy": Panel(
        "Entropy",
        "Mean over generated tokens, full vocabulary. A fast fall to zero is a collapse; a rise, a loss of control.",
        "entropy (nats per token)",
        (Line("entropy", "training engine"), Line("rollout/entropy", "start of the step", ORANGE)),
        "zero",
    ),
    "kl": Panel(
        "Gap between sampling and training",
        "Both engines hold the same weights: this is rounding, routing and, with top_p below 1 and no kept "
        "sets, the probability outside of the nucleus. k3 is never negative; k1 may be.",
        "KL[rollout || old] (nats per token)",
        plot=plots.plot_kl,
        plotted=("rollout/k1", "rollout/k3"),
    ),
    "first_order": Panel(
        "First-order error",
        "What the objective of tokens leaves out of that of sequences: |prod w - (1 + sum (w - 1))| over a response, "
        "w = new policy / rollout. Near or above 1, the gradient is no longer that of the sequence's reward.",
        "error of a response",
        (
            Line("first_order/error/max", "largest", GREY, "dashed"),
            Line("first_order/error/mean", "mean"),
            Line("first_order/error/p50", "median", TEAL),
        ),
        "log",
    ),
    "factors": Panel(
        "The two factors of the importance weight",
        "Their spread over the tokens of a mini-batch, with the range over the mini-batches of a step. Replay and more "
        "precise engines close the gap; fewer mini-batches and a smaller learning rate lower the staleness.",
        "standard deviation",
        (Line("gap/ratio/std", "gap: old / rollout", ORANGE), Line("ratio/std", "staleness: new / old")),
        "log",
    ),
    "by_index": Panel(
        "From mini-batch to mini-batch",
        "Means over all steps. What grows with the index is staleness: the policy leaves the one that sampled.",
        "mean over steps",
        (
            Line("gap/ratio/std", "gap, standard deviation", ORANGE),
            Line("ratio/std", "staleness, standard deviation"),
            Line("first_order/error/mean", "first-order error", TEAL),
            Line("replay_bias/kl/mean", "replay bias, KL", PURPLE),
        ),
        "log",
        by_index=True,
        optional=True,
    ),
    "extreme": Panel(
        "Extreme tokens",
        "Tokens of which a factor of the importance weight is above 2 or below 1/2.",
        "share of tokens, F(2)",
        (Line("rollout/extreme_2", "gap: old / rollout", RED), Line("ratio/extreme_2", "staleness: new / old")),
        "percent",
    ),
    "ess": Panel(
        "Effective sample size",
        "(sum w)² / (n sum w²): 100 % if all importance weights are alike.",
        "effective sample size (share)",
        (Line("rollout/ess/fraction", "old against rollout"), Line("tis/ess/fraction", "weights of the loss", PURPLE)),
        "percent to 100",
    ),
    "router": Panel(
        "Router disagreement",
        "Experts of the rollout engine against those used in training (zero under replay), and against those that the "
        "training routers would have chosen by themselves.",
        "share that differs",
        (
            Line("router/native/token_any", "own, any layer", ORANGE),
            Line("router/native/flip", "own, per layer", PURPLE),
            Line("router/token_any", "in use, any layer"),
            Line("router/flip", "in use, per layer", TEAL),
        ),
        "percent",
    ),
    "replay_bias": Panel(
        "Replay bias",
        "The policy with replayed routes against itself with its own routing, at the same weights: KL[replayed || own] "
        "of a token's distribution over the full vocabulary.",
        "KL (nats per token)",
        (
            Line("replay_bias/kl/max", "largest", GREY, "dashed"),
            Line("replay_bias/kl/p99", "99 % of tokens below", ORANGE),
            Line("replay_bias/kl/mean", "mean"),
        ),
        "log",
        optional=True,
    ),
    "replay_bias_layers": Panel(
        "Replay bias by layer",
        "Share of tokens for which the policy, routed natively in all layers, uses other experts than those replayed.",
        "MoE layer",
        layers=("replay_bias/flip/layer_",),
        wide=True,
        optional=True,
    ),
    "missing_rows": Panel(
        "Missing routes",
        "Tokens for which the rollout engine gave no route; they are routed natively.",
        "share of tokens",
        (Line("rollout/missing_rows_fraction", "tokens without a recorded route", RED),),
        "percent",
    ),
    "router_layers": Panel(
        "Router disagreement by layer",
        "Share of tokens for which rollout and training routers choose different experts, per MoE layer and step.",
        "MoE layer",
        layers=LAYER_PREFIXES,
        wide=True,
    ),
    "ratio": Panel(
        "Policy ratio",
        "How far each mini-batch has moved from the policy that started the step.",
        "ratio of new to old policy",
        plot=plots.plot_ratio,
        plotted=("ratio/mean", "ratio/min", "ratio/max"),
    ),
    "clip": Panel(
        "Clipping",
        "Tokens whose gradient the trust region stops, by sign of the advantage, and weights at the cap.",
        "share of tokens",
        (
            Line("clip/high", "above, A > 0"),
            Line("clip/low", "below, A < 0", ORANGE),
            Line("tis/truncated", "weight capped (TIS)", PURPLE),
        ),
        "percent",
    ),
    "masks": Panel(
        "Other masks",
        "Tokens whose gradient is stopped by masks that do not ask whether the update leads outward, as IcePop's.",
        "share of tokens",
        (
            Line("clip/both", "whatever the advantage", TEAL),
            Line("clip/negative", "A < 0 alone", ORANGE),
            Line("clip/own", "your own", PURPLE),
        ),
        "percent",
        optional=True,
    ),
    "grad_norm": Panel(
        "Gradient norm",
        "Over all parameters, before clipping.",
        "gradient norm",
        (Line("grad_norm", "before clipping"),),
        "zero",
    ),
    "loss": Panel(
        "Loss",
        "A surrogate: its gradient matters, its value says little.",
        "loss",
        (Line("loss", "surrogate loss"),),
    ),
    "time": Panel(
        "Where the time goes",
        "Seconds of each phase. The gap between the phases of a step and the line is time outside of all phases. An "
        "evaluation, and the checkpoint of the step before, come on top.",
        "seconds per step",
        plot=plots.plot_time,
        plotted=tuple(f"time/{phase}_s" for phase in PHASES),
        wide=True,
    ),
    "speed": Panel(
        "Throughput",
        "Tokens of all ranks per second of a whole step.",
        "tokens per second",
        (Line("speed/tokens_per_s", "tokens of a step / its time", TEAL),),
        "zero",
    ),
}
"""By name of the PNG file."""
