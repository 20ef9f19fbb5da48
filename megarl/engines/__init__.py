"""Sampling: from a prompt to a response with log-probabilities, routes and reward.

player      draws the samples of a sampling rule; a sample is an episode, turns and answers of an environment, and its
            reward
agents      episodes of programs that know nothing of megarl: OpenAI's chat completions in front of a session
protocol    the protocol of every sampling engine; an episode sees its ``Session``
weights     the tensors that an engine expects, and their form; takes in an update: checks the tensors and converts
            them into buckets, flat pieces of memory

local/      the engine on transformers, in the trainer's own process
sglang/     the engine on SGLang servers
tools/      environments, and the tools of a model

``local``, ``sglang`` and ``tools`` do not import each other. The engines build on ``protocol`` and ``weights``
only.
"""

BUCKET_BYTES = 256 << 20
"""Most bytes of a bucket of weights for servers."""
