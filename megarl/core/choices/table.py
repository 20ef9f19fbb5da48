"""The table of named algorithms, each with its source and its use. Imports no torch.

``docs/objectives.md`` is generated from this table by ``tools/objectives_doc.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megarl.core.choices.parts import Factor, Gate, Mask, Objective, Penalty, Statistic


@dataclass(frozen=True, slots=True)
class Row:
    """One named algorithm."""

    objective: Objective
    """Its parts and default values."""
    source: str
    """Where it is from, and where the row departs from it."""
    use: str
    """When to use it, in one sentence or two."""


_RATIO, _WEIGHT = (Factor("theta_old"),), (Factor("theta_mu"),)
_REINFORCE = Objective(advantage="group_mean", aggregation="seq-mean-token-sum")
_MINIRL = replace(_REINFORCE, masks=(Mask.ppo(high=1.27),), factors=(Factor("theta_mu", high=5.0),))
_UNMASKED = Objective(advantage="grpo", aggregation="seq-mean-token-mean", factors=_RATIO)
_GRPO = replace(_UNMASKED, masks=(Mask.ppo(),))
_KL_GRPO = replace(
    _GRPO,
    masks=(Mask.ppo(scope="future_mean"),),
    factors=(Factor("theta_old", scope="future_mean"),),
    advantage="token_level_kl",
    std_ddof=0,
    kl_coef=0.01,
)
_DPPO = replace(_REINFORCE, factors=_WEIGHT)

_MINIRL_SOURCE = "Zheng et al., arXiv 2512.01374, eq. 7"
_FAMILY_SOURCE = "the family min(rho, 1) <= f(rho) <= max(rho, 1) of weight functions"
_DPPO_SOURCE = "DPPO, arXiv 2602.04879, eq. 12 to 16 and 23"


def _outward(statistic: Statistic, high: float) -> Mask:
    """DPPO's mask: a token whose update leads away from mu, and whose divergence is above ``high``."""
    return Mask("theta_mu", statistic, high=high, sign="outward")


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
            replace(_MINIRL, factors=_RATIO),
            f"{_MINIRL_SOURCE}, ablation",
            "To see what the correction of the gap between the engines does; expect it to be unstable on MoE models.",
        ),
        "minirl_no_clip": Row(
            replace(_MINIRL, masks=()),
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
            replace(_GRPO, masks=(Mask.ppo(high=1.28),), aggregation="token-mean"),
            "DAPO, arXiv 2503.14476; its re-sampling until all groups are mixed belongs to the sampler",
            "Long responses: every token counts the same, and rare tokens may grow faster than in grpo.",
        ),
        "gspo": Row(
            replace(
                _GRPO,
                masks=(Mask.ppo(0.9997, 1.0004, scope="sequence_mean"),),
                factors=(Factor("theta_old", scope="sequence_mean", log_ratio_cap=10.0),),
            ),
            "GSPO, arXiv 2507.18071; its token variant has these coefficients too, with an advantage per token",
            "MoE models without routing replay: the mean over the response hides what single tokens do.",
        ),
        "cispo": Row(
            replace(_UNMASKED, factors=(Factor("theta_old", high=1.2),), aggregation="token-mean"),
            "CISPO (MiniMax-M1, arXiv 2506.13585); its bounds are not printed, these are those of verl's example",
            "Off-policy training in which no token should lose its gradient; it has no lower bound.",
        ),
        "raft": Row(
            replace(_REINFORCE, advantage="raft", aggregation="seq-mean-token-mean"),
            "RAFT, arXiv 2304.06767; accepts what is correct, not the best of an all-wrong group",
            "Rejection-sampling fine-tuning: only correct responses train. Loses entropy quickly.",
        ),
        "raft_pp": Row(
            replace(_GRPO, advantage="raft", masks=(Mask.ppo(high=1.28),)),
            "RAFT++, arXiv 2504.11343 and 2505.02391",
            "RAFT with several mini-batches per step.",
        ),
        "reinforce_rej": Row(
            replace(
                _GRPO,
                advantage="raw_mixed",
                masks=(Mask.ppo(), Mask("theta_old", high=3.0, sign="negative")),
                aggregation="token-mean",
            ),
            "Reinforce-Rej, arXiv 2504.11343, as released: the raw reward in groups with contrast, 0 in the others, "
            "whose tokens stay in the denominator. Without its k3 penalty (0.001) and entropy term (0.001)",
            "With rewards of 0 and 1, only the correct responses of prompts that are not yet solved train.",
        ),
        "reinforce_rej_signed": Row(
            replace(_GRPO, advantage="signed", selection="mixed_groups"),
            "Reinforce-Rej as its paper reads: rewards of +1 and -1, without a baseline; uniform groups leave the "
            "denominators too",
            "As reinforce_rej, where wrong responses of mixed groups are to become less likely.",
        ),
        "ctpo": Row(
            replace(
                _GRPO,
                masks=(
                    Mask("theta_old", "log_ratio", "prefix", low=-0.025, high=0.05, sign="outward", growth=0.5),
                    Mask("theta_old", "log_ratio", "prefix", high=0.05, sign="negative", growth=0.5),
                ),
                factors=(Factor("theta_old", scope="prefix", log_ratio_cap=10.0),),
                aggregation="token-mean",
            ),
            "CTPO, arXiv 2605.07331, as released, without its extra sequence weight (a factor old_mu over "
            "sequence_sum, high = 5). As printed: without the second mask, and seq-mean-token-mean; prefix_grad = true "
            "takes that formula's derivative literally",
            "Long responses and tool use: each token is weighted by how likely its whole past has become.",
        ),
        "kl_grpo": Row(
            _KL_GRPO,
            "Token-level KL-regularised policy gradient, with the geometric mean of the ratios from a token on; "
            "prefix_grad = true takes that formula's derivative literally. beta has no published default, this is ours",
            "When the policy must stay near a reference: the KL of the rest of the response is part of the advantage.",
        ),
        "kl_grpo_token": Row(
            replace(_KL_GRPO, masks=_GRPO.masks, factors=_RATIO),
            "The same, with the ratio of the token alone, the first of those that the source names",
            "As kl_grpo, where the window must hold for every single token.",
        ),
        "power": Row(
            replace(_UNMASKED, factors=(Factor("theta_old", fn="power"),)),
            _FAMILY_SOURCE,
            "Off-policy training between no correction (power = 0) and full importance sampling (power = 1).",
        ),
        "upper_clip": Row(
            replace(_UNMASKED, factors=(Factor("theta_old", high=1.2),)),
            f"{_FAMILY_SOURCE}; the cap holds for either sign of the advantage",
            "Off-policy training with bounded weights and no token without gradient.",
        ),
        "ppo_upper": Row(
            replace(_GRPO, factors=(Factor("theta_old", high=1.2),)),
            "The other reading of upper_clip: PPO's mask times the capped ratio",
            "As grpo, where large ratios of bad responses must not blow up.",
        ),
        "adaptive_power": Row(
            replace(_UNMASKED, factors=(Factor("theta_old", fn="adaptive_power"),)),
            f"{_FAMILY_SOURCE}; the choice of q is ours",
            "Off-policy training whose staleness changes during the run: corrects as much as the sample size allows.",
        ),
        "dr_grpo": Row(
            replace(_GRPO, advantage="group_mean", aggregation="seq-mean-token-sum-norm", norm_length=3000),
            "Dr. GRPO, arXiv 2503.20783; norm_length is the most tokens of a response, 3000 in its runs",
            "As grpo, without its two biases: neither length nor the group's spread changes the weight of a token.",
        ),
        "grpo_mu": Row(
            replace(_GRPO, masks=(Mask.ppo(policies="theta_mu"),), factors=_WEIGHT),
            "The GRPO arm of DPPO, arXiv 2602.04879: PPO's window on theta/mu, without a cap",
            "As grpo without the old-log-prob pass: the window sees the gap between the engines too.",
        ),
        "dppo_tv": Row(
            replace(_DPPO, masks=(_outward("tv", 0.15),)),
            f"{_DPPO_SOURCE}; its MoE runs have 0.2 and a cap of 5",
            "Trust region by what a token's probability has moved: rare tokens may change by large ratios.",
        ),
        "dppo_kl": Row(
            replace(_DPPO, masks=(_outward("kl", 0.05),)),
            f"{_DPPO_SOURCE}; KL of the token against all others. Its MoE runs have a cap of 5",
            "As dppo_tv, and stricter where a probability comes close to 0 or 1.",
        ),
        "dppo_topk": Row(
            replace(_DPPO, masks=(_outward("topk_tv", 0.15),)),
            f"{_DPPO_SOURCE}: the sampler's K most likely tokens are classes of their own. Its delta is not printed, "
            "this is that of dppo_tv. Needs the column topk, which megarl's engines do not record",
            "As dppo_tv, where the distribution moves although the sampled token does not.",
        ),
        "drpo": Row(
            replace(_DPPO, gate=Gate("drpo", 0.15, 0.15), aggregation="seq-mean-token-sum-norm", norm_length=8192),
            "DRPO, arXiv 2606.09821, eq. 8 and 9. Its text and code have delta 12.5, with which the gate stays within "
            "8 % of 1 and bounds nothing; 0.15 is ours, after dppo_tv",
            "A smooth trust region: tokens beyond delta are pulled back instead of dropped.",
        ),
        "icepop": Row(
            replace(
                _GRPO,
                masks=(*_GRPO.masks, Mask("old_mu", low=0.5, high=5.0)),
                factors=(*_RATIO, Factor("old_mu")),
            ),
            "IcePop, Ling 2.6 report, arXiv 2606.15079, eq. 5",
            "MoE models without routing replay: tokens on which the engines disagree are dropped, whatever their sign.",
        ),
        "kpop": Row(
            replace(_GRPO, masks=(*_GRPO.masks, Mask("old_mu", "kl_sym", high=0.5))),
            "KPop, arXiv 2606.15079, 3.2.3: binary KL in both directions in the place of IcePop's ratio. Its bound is "
            "not printed; whether kept tokens are also weighted by old/mu is open, here they are not",
            "As icepop, for bounds that mean the same for rare and for likely tokens.",
        ),
        "dis": Row(
            replace(
                _DPPO,
                masks=(Mask("theta_mu", low=0.8, high=1.28, strict=True),),
                aggregation="token-mean",
            ),
            "DIS (SAO, arXiv 2607.07508, eq. 1 to 3; GLM-5.2); bounds, advantage and aggregation were not seen, these "
            "are ours",
            "Asynchronous sampling without an old-log-prob pass: only tokens near mu train, for either sign.",
        ),
        "deepseek_v32": Row(
            replace(
                _GRPO,
                advantage="group_mean",
                masks=(*_GRPO.masks, Mask("theta_mu", "log_ratio", "sequence_mean", low=-0.5, sign="negative")),
                penalties=(Penalty("unbiased"),),
            ),
            "DeepSeek-V3.2, arXiv 2512.02556, eq. 7 to 9: whole responses with A < 0 are dropped if they have become "
            "unlikely. delta is not printed, 0.5 is that of TRL's page; the penalty's coef is 0 until you set it",
            "MoE models with routing replay (its Keep Routing) and several mini-batches per step.",
        ),
        "seq_mis": Row(
            replace(
                _GRPO,
                masks=(*_GRPO.masks, Mask("old_mu", scope="sequence_sum", high=2.0)),
                factors=(*_RATIO, Factor("old_mu", scope="sequence_sum")),
                aggregation="token-mean",
            ),
            "Masked importance sampling over sequences, verl's rollout correction (its bound 2; TRL: 3)",
            "Short responses: exact weights of whole responses, and none that is too large.",
        ),
        "geo_rs": Row(
            replace(
                _GRPO,
                masks=(
                    *_GRPO.masks,
                    Mask("old_mu", scope="sequence_mean", low=0.999, high=1.001, denominator="leave"),
                ),
                aggregation="token-mean",
            ),
            "Geometric rejection sampling, verl's rollout correction",
            "Rejects responses on which the engines disagree on average, and takes them out of the denominator.",
        ),
        "sapo": Row(
            replace(_UNMASKED, gate=Gate("sapo", 1.0, 1.05)),
            "SAPO, arXiv 2511.20347",
            "A smooth window: the gradient fades with the distance of the ratio from 1, faster where A <= 0.",
        ),
        "ce_gppo": Row(
            replace(_UNMASKED, gate=Gate("ce_gppo", 1.0, 0.5), aggregation="token-mean"),
            "CE-GPPO, arXiv 2509.20712, eq. 10: beta 0.5 below the window, 1 above it",
            "As dapo, where tokens outside of the window keep a bounded gradient, which steadies the entropy.",
        ),
        "topr": Row(
            replace(
                _REINFORCE,
                advantage="raw",
                factors=(Factor("theta_mu", scope="sequence_sum", high=1.0, sign="negative"),),
            ),
            "TOPR, arXiv 2503.14286; for rewards with a sign, such as +1 and -1",
            "Very off-policy data: good responses train like demonstrations, bad ones only while they are likely.",
        ),
        "vespo": Row(
            replace(
                _UNMASKED,
                factors=(Factor("theta_mu", scope="sequence_sum", fn="vespo"),),
                aggregation="token-mean",
            ),
            "VESPO, arXiv 2602.10693, with TRL's (k, lambda): (2, 3) where A >= 0, else (3, 2)",
            "Asynchronous sampling: the weight of a response falls off smoothly on both sides of 1.",
        ),
        "gmpo": Row(
            replace(
                _UNMASKED,
                masks=(Mask("theta_old", "log_ratio", low=-0.4, high=0.4, sign="outward"),),
                factors=(Factor("theta_old", scope="sequence_mean", token_clip=0.4),),
            ),
            "GMPO, arXiv 2507.20673: the geometric mean of clipped ratios",
            "As grpo, less sensitive to single tokens with extreme ratios.",
        ),
        "minimal_mask": Row(
            replace(_DPPO, masks=(Mask("theta_mu", "difference", low=-0.5, sign="negative", strict=True),)),
            "DPPO, arXiv 2602.04879, 5.3: the smallest mask that kept its test stable",
            "To see what drives a collapse: drops only bad tokens whose probability has fallen by half or more.",
        ),
    }
)
"""Named algorithms. Their gradients, not their loss values, are those of the papers."""

OBJECTIVES: Mapping[str, Objective] = MappingProxyType({name: row.objective for name, row in TABLE.items()})
"""The parts of each named algorithm."""
