"""Choices of a configuration: records of names and numbers, checked on construction.

Imports neither torch nor numpy: a configuration is checked before heavy packages are loaded.

    parts      the record of an objective, and valid values of the parts
    table      the named objectives
    stopping   rules for the number of samples of a prompt
    credit     choices of baseline and weights; names of objectives f(p)
"""
