"""The ground floor: what the algorithms compute, in plain torch and numpy.

Nothing here reads a file, talks to another process, or knows Megatron or a config object, so every formula can be
called and tested with a handful of numbers. The way through:

    types        the records that flow
    advantages   rewards of a group -> one advantage per sequence, or per token
    ratios       masked log-ratios, and sums over packed sequences
    columns      the per-token inputs of an objective, checked; global denominators
    parts        the record that an algorithm is; what goes together
    table        the named algorithms
    family       weight functions between no correction and importance sampling
    weights      importance weight, trust mask and KL of each token
    sampling     what is drawn, and what of it trains
    objectives   the one equation: columns -> a coefficient per token
    metrics      statistics that merge exactly over micro-batches and ranks
    diagnostics  entropy, KL, effective sample size, extreme tokens
    routing      routing traces: validate and compare
    turns        turns of a conversation into one sequence
    packing      sequences into micro-batches
    parallel     which tokens a context- or sequence-parallel rank holds
    reference    the same mathematics as slow loops: the oracle of the tests (objectives: reference_objectives)
"""
