"""What goes into a run and what comes out of it, as files; and rewards. Imports only config, core and errors.

The way through:

    records          examples of any source, each with the place it was read from
    tokenizer        the tokenizer of a model folder, checked; chat: its chat template
    prompts          prompts and demonstrations as tokens; the order in which prompts are taken; prompt_table holds them
    prepare          ``megarl data prepare``
    benchmarks       what an evaluation asks
    rewards          reward functions: protocol, built-in ones, what they may return
    reward_model     the one that asks a reward model over HTTP
    judge            calls them, in processes of their own
    reasoning_steps  from the steps of a process reward to tokens
    traces           files of routing traces; tensor_file: files of named arrays
    pickles          the pickles in checkpoints, read without running anything
    tiny             the quickstart's model and task
    files            files and folders that appear complete or not at all
"""
