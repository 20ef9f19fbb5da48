"""Answers of mathematics, for the reward math_strict:

- ``text``: the last box of a response; a single spelling for expressions with several spellings; tokens, words, units.
- ``grammar``: from tokens to values of sympy, and to the operations that were left to be calculated; values with names
  and units, lists and relations, and their equality.
- ``grade``: answers of a data set, and the last box of a response.
"""
