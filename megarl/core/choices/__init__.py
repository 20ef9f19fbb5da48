"""What a configuration can choose in ``core``: records of names and numbers, checked when they are made.

Imports neither torch nor numpy, so that a configuration is checked before anything heavy is loaded.

    parts      the record that an objective is, and what its parts may be
    table      the named objectives
    family     weight functions between no correction and importance sampling
    own        calls functions of the user
    stopping   rules that say how many samples a prompt gets
    credit     choices of baseline, unbiased combination and weights; names of objectives f(p)
"""
