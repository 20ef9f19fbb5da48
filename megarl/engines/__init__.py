"""Sampling: from a prompt to a response with its log-probabilities, routes and reward.

    player      draws what a sampling rule asks for; one sample is an episode and its reward
    episodes    turns of the model and answers of an environment, joined into one sequence
    engine      the protocol of every sampling engine; an episode sees its ``Session``
    weights     which tensors an engine expects, and in what form
    buckets     takes in a weight update: checks the tensors and converts them by shape, in flat pieces of memory

    local/      the engine on transformers, in the trainer's own process
    sglang/     the engine on SGLang servers
    tools/      environments, and the tools that a model may call

``local``, ``sglang`` and ``tools`` do not import each other. The engines build on ``engine``, ``weights``
and ``buckets`` only. ``rollout`` imports ``core``, ``config``, ``data`` and ``models``.
"""
