"""What a run will need: memory, bytes moved, and the arithmetic of its batches, from the configuration alone.

``layout`` divides the model, ``parameters`` counts it, ``activations``, ``training`` and ``engine`` turn counts into
bytes, ``traffic`` and ``batches`` are what moves and how often, ``checks`` refuses, ``plan`` puts it together and
``report`` prints. The formulas and what they were checked against: docs/plan.md.
"""
