"""Rows of ``OBJECTIVES`` and the routing watch inside the training stacks of others: one module per stack.

Import the module of your stack. Each imports the stack's packages itself, and nothing else of megarl than the kit.
"""
