"""Agents that know nothing of megarl: any program that speaks OpenAI's chat completions plays an episode.

    messages       requests and answers in OpenAI's form
    conversation   the requests of an episode as sequences: sampled tokens are kept, all other text is context
    endpoint       the HTTP server on the loopback address; plays the episode of an agent, and runs programs

``megarl.trainer.sampling.evaluation`` makes an agent from a configuration, and the player plays its episodes.
"""
