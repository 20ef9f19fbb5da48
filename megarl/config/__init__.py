"""The configuration of a run: keys, meanings, and rules on combinations.

One TOML file describes a run. Values come from the defaults, then the file, then the command line. No module imports
torch or Megatron, so a wrong file is reported at once. In the order of the call, from the command line down:

    command          the record of a command; ``file`` and ``process_environment`` are called from here
    file             reads the TOML file and flags, ``--table.key value``; every mistake is a ConfigError of one line
    root             ``Config``: all tables, checked, and the layout of the ranks; ``to_toml`` writes the file
    refusals/        rules between tables, on ranks, on the model and on memory; texts in refusals.toml
    tables/          each table with keys, help texts and the table's own rules
    plugs            objects named "package.module:name"; sampling engines and their capabilities
    megatron_fields  the fields that the [megatron] table may not set, and what is set on GPUs
    process_environment, trust
"""

from megarl.config.root import Config, Layout
from megarl.config.tables import EnvironmentConfig, ParallelConfig, SamplingConfig, SftConfig, SGLangConfig

__all__ = ["Config", "EnvironmentConfig", "Layout", "ParallelConfig", "SGLangConfig", "SamplingConfig", "SftConfig"]
