"""Sampling: from a prompt to a response with its log-probabilities, routes and reward.

    player      draws what a sampling rule asks for; one sample is an episode and its reward
    episodes    turns of the model and answers of an environment, joined into one sequence
    engine      the protocol of every sampling engine; an episode sees its ``Session``
    weights     checks and converts the tensors of a weight update

    local/      the engine on transformers, in the trainer's own process
    sglang/     the engine on SGLang servers
    tools/      environments, and the tools that a model may call

``local``, ``sglang`` and ``tools`` do not import each other. The engines build on ``engine`` and ``weights``
only. ``rollout`` imports ``core``, ``config``, ``data`` and ``models``.
"""
