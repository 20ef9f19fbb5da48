"""Recipes for public models, the models' config.json, and scripts for Slurm and for one machine (docs/recipes.md).

``*.toml`` are configurations, ``models/`` has the shapes for ``megarl plan``, ``scripts/`` run ``megarl launch``;
``shipped`` finds and copies them (``megarl recipes``). Imports the standard library and ``megarl.errors`` alone.
"""
