"""Which policies an objective compares. Imports no torch."""

from megarl.core.choices.parts import Objective


def reads_policies(objective: Objective) -> set[str]:
    """Return the ratios that weight, masks and gap factor of an objective are of: "theta_mu", "theta_old", "old_mu".

    A cap on old/mu alone splits the weight theta/mu into old/mu and theta/old. What a function of the user reads is not
    known.
    """
    weights = {"theta_old", "old_mu"} if objective.decoupled else {objective.weight}
    trusts = objective.mask == "ppo" or objective.dual_clip is not None
    return (weights | {objective.gap} | ({"theta_old"} if trusts else set())) - {"none"}
