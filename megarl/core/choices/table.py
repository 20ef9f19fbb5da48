"""The table of named algorithms, each with its source and its use. Imports no torch.

``docs/objectives.md`` is generated from this table by ``tools/objectives_doc.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megarl.core.choices.parts import Objective


@dataclass(frozen=True, slots=True)
class Row:
    """One named algorithm."""

    objective: Objective
    """Its parts and default values."""
    source: str
    """Where it is from, and where the row departs from it."""
    use: str
    """When to use it, in one sentence or two."""


_MINIRL = Objective(
    advantage="group_mean",
    weight="theta_mu",
    mask="ppo",
    aggregation="seq-mean-token-sum",
    cap=5.0,
    eps_low=0.2,
    eps_high=0.27,
)
_REINFORCE = Objective(advantage="group_mean", weight="none", mask="none", aggregation="seq-mean-token-sum")
_GRPO = Objective(advantage="grpo", weight="theta_old", mask="ppo", aggregation="seq-mean-token-mean")
_UNMASKED = replace(_GRPO, mask="none")
_KL_GRPO = replace(_GRPO, ratio="future_mean", advantage="token_level_kl", std_ddof=0, kl_coef=0.01)

_MINIRL_SOURCE = "Zheng et al., arXiv 2512.01374, eq. 7"
_FAMILY_SOURCE = "the family min(rho, 1) <= f(rho) <= max(rho, 1) of weight functions"

TABLE: Mapping[str, Row] = MappingProxyType(
    {
        "minirl": Row(
            _MINIRL,
            _MINIRL_SOURCE,
            "The default for MoE models with routing replay: corrects the gap between the engines, and staleness.",
        ),
        "minirl_length_norm": Row(
            replace(_MINIRL, aggregation="seq-mean-token-mean"),
            f"{_MINIRL_SOURCE}, ablation",
            "To see what the factor 1/|y| does; it biases the first-order expansion of the sequence objective.",
        ),
        "minirl_no_is": Row(
            replace(_MINIRL, weight="theta_old", cap=None),
            f"{_MINIRL_SOURCE}, ablation",
            "To see what the correction of the gap between the engines does; expect it to be unstable on MoE models.",
        ),
        "minirl_no_clip": Row(
            replace(_MINIRL, mask="none"),
            f"{_MINIRL_SOURCE}, ablation",
            "To see what the trust mask does; with several mini-batches per step, expect it to be unstable.",
        ),
        "reinforce": Row(
            _REINFORCE,
            "Williams 1992, with the group's mean as baseline",
            "On-policy training (one mini-batch per step) with exact engines; the simplest thing that works.",
        ),
        "rloo": Row(
            replace(_REINFORCE, advantage="rloo"),
            "Ahmadian et al., arXiv 2402.14740",
            "As reinforce, with an unbiased baseline: a factor G/(G-1) that matters for small or unequal groups.",
        ),
        "grpo": Row(
            _GRPO,
            "DeepSeekMath, arXiv 2402.03300, eq. 3, without its KL term; the PPO minimum in the form of its gradient",
            "The common baseline for dense models.",
        ),
        "dapo": Row(
            replace(_GRPO, eps_high=0.28, aggregation="token-mean"),
            "DAPO, arXiv 2503.14476; its re-sampling until all groups are mixed belongs to the sampler",
            "Long responses: every token counts the same, and rare tokens may grow faster than in grpo.",
        ),
        "gspo": Row(
            replace(_GRPO, ratio="sequence_mean", eps_low=3e-4, eps_high=4e-4, log_ratio_cap=10.0),
            "GSPO, arXiv 2507.18071; its token variant has these coefficients too, with an advantage per token",
            "MoE models without routing replay: the mean over the response hides what single tokens do.",
        ),
        "cispo": Row(
            replace(_UNMASKED, weight_fn="clip", eps_low=10.0, aggregation="token-mean"),
            "CISPO (MiniMax-M1, arXiv 2506.13585); its bounds are not printed, these are those of verl's example",
            "Off-policy training in which no token should lose its gradient; eps_low above 1 means no lower bound.",
        ),
        "raft": Row(
            replace(_REINFORCE, advantage="raft", aggregation="seq-mean-token-mean"),
            "RAFT, arXiv 2304.06767; accepts what is correct, not the best of an all-wrong group",
            "Rejection-sampling fine-tuning: only correct responses train. Loses entropy quickly.",
        ),
        "raft_pp": Row(
            replace(_GRPO, advantage="raft", eps_high=0.28),
            "RAFT++, arXiv 2504.11343 and 2505.02391",
            "RAFT with several mini-batches per step.",
        ),
        "reinforce_rej": Row(
            replace(_GRPO, advantage="group_mean", selection="mixed_groups"),
            "Reinforce-Rej, arXiv 2504.11343",
            "As grpo without its division by the standard deviation; uniform groups leave the denominators too.",
        ),
        "ctpo": Row(
            replace(
                _GRPO,
                ratio="prefix",
                window="log",
                window_power=0.5,
                eps_low=0.025,
                eps_high=0.05,
                dual_clip=0.05,
                aggregation="token-mean",
                log_ratio_cap=10.0,
            ),
            'CTPO, arXiv 2605.07331, as released, without its extra sequence weight (gap = "old_mu", gap_ratio = '
            '"sequence_product", gap_high = 5). As printed: dual_clip = "off", aggregation = "seq-mean-token-mean"; '
            "prefix_grad = true takes that formula's derivative literally",
            "Long responses and tool use: each token is weighted by how likely its whole past has become.",
        ),
        "kl_grpo": Row(
            _KL_GRPO,
            "Token-level KL-regularised policy gradient, with the geometric mean of the ratios from a token on; "
            "prefix_grad = true takes that formula's derivative literally. beta has no published default, this is ours",
            "When the policy must stay near a reference: the KL of the rest of the response is part of the advantage.",
        ),
        "kl_grpo_token": Row(
            replace(_KL_GRPO, ratio="token"),
            "The same, with the ratio of the token alone, the first of those that the source names",
            "As kl_grpo, where the window must hold for every single token.",
        ),
        "power": Row(
            replace(_UNMASKED, weight_fn="power"),
            _FAMILY_SOURCE,
            "Off-policy training between no correction (power = 0) and full importance sampling (power = 1).",
        ),
        "upper_clip": Row(
            replace(_UNMASKED, weight_fn="upper_clip"),
            f"{_FAMILY_SOURCE}; the cap holds for either sign of the advantage",
            "Off-policy training with bounded weights and no token without gradient.",
        ),
        "ppo_upper": Row(
            replace(_GRPO, weight_fn="upper_clip"),
            "The other reading of upper_clip: PPO's mask times the capped ratio",
            "As grpo, where large ratios of bad responses must not blow up.",
        ),
        "adaptive_power": Row(
            replace(_UNMASKED, weight_fn="adaptive_power"),
            f"{_FAMILY_SOURCE}; the choice of q is ours",
            "Off-policy training whose staleness changes during the run: corrects as much as the sample size allows.",
        ),
    }
)
"""Named algorithms. Their gradients, not their loss values, are those of the papers."""

OBJECTIVES: Mapping[str, Objective] = MappingProxyType({name: row.objective for name, row in TABLE.items()})
"""The parts of each named algorithm."""
