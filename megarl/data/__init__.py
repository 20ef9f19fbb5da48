"""Prompts, rewards, and the quickstart's task. Imports only config, core, files and errors.

Prompts:

    records          examples of any source, each with the place in the source
    tokenizer        the tokenizer of a model folder, checked; tokens of reasoning steps
    prompts          prompts and demonstrations as tokens; the chat template; the order of prompts
    benchmarks       the problems of an evaluation
    tiny             the quickstart's model and task

Rewards:

    rewards          the protocol, results, the built-in functions
    math             answers of mathematics: the grammar of math_strict
    reward_model     a reward from a reward model over HTTP
    judge            calls reward functions, in worker processes
"""
