"""The configuration of a run: what can be set, what it means, and which settings go together.

A run is described by one TOML file. Values come from the defaults, then the file, then the command line. Nothing here
imports torch or Megatron, so that a wrong file is reported at once. The way through, from the command line down:

    file             reads the TOML file and flags, ``--table.key value``; every mistake is a ConfigError of one line
    root             ``Config``: all tables, checked, and the layout of its ranks; ``to_toml`` writes it
    rules            rules between tables
    tables/          each table with its keys, their help texts and its own checks
    plugs            objects that the user names as "package.module:name"; sampling engines and what they can do
    megatron_fields  the [megatron] table, checked against Megatron's source
"""

from megarl.config.root import Config, Layout
from megarl.config.tables import EnvironmentConfig, ParallelConfig, SamplingConfig, SftConfig, SGLangConfig

__all__ = ["Config", "EnvironmentConfig", "Layout", "ParallelConfig", "SGLangConfig", "SamplingConfig", "SftConfig"]
