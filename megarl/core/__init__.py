"""The ground floor: what the algorithms compute, in plain torch and numpy.

Nothing here reads a file (but its own tables), talks to another process, or knows Megatron or a config
object, so every formula can be called and tested with a handful of numbers. Core imports nothing of megarl but
``megarl.errors``.

Packages:

    choices        records that a configuration makes: objectives, sampling rules, credit; imports no torch or numpy
    objectives     the one equation: columns of a batch -> a coefficient per token
    sampling       which prompts get how many samples, which of them train, with what credit

Modules:

    types          the records that flow
    ratios         masked log-ratios, and sums over packed sequences
    advantages     rewards of a group -> one advantage per response, or per token
    packing        sequences into micro-batches
    parallel       which tokens a context- or sequence-parallel rank holds
    metrics        statistics that merge exactly over micro-batches and ranks
    rollout_codec  rollouts as bytes, to exchange them between ranks
    replay_blockers which settings of Megatron-Core bypass routing replay
    fp8            weights in FP8 blocks, and the errors of that
"""
