"""Answers of mathematics.

For the reward math_strict, a grammar:

- ``text``: a single spelling for expressions with several spellings; tokens, words, units.
- ``grammar``: from tokens to values of sympy, and to the operations that were left to be calculated.
- ``items``: values with names and units, lists and relations, and their equality.
- ``grade``: answers of a data set, and the last box of a response.

For the reward math_verify:

- ``lenient``: the last box, in a form that math-verify understands.
"""
