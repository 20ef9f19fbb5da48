"""The reward math_strict: a grammar of what an answer may be made of.

- ``text``: one spelling for what has several, tokens, words, units.
- ``grammar``: from tokens to values of sympy, and what was left to be calculated in them.
- ``items``: values with names and units, lists and relations, and when they are equal.
- ``grade``: answers of a data set, and the last box of a response.
"""
