"""The tables of a configuration, a file for each or for a few small ones.

``base`` has what all share. A table checks its own keys; ``together`` holds all tables, which ``megarl.config.rules``
checks against each other. The docstring below a field is its help text. Nothing here imports torch.
"""

from megarl.config.tables.data import DataConfig, RewardConfig, SftConfig
from megarl.config.tables.environment import EnvironmentConfig
from megarl.config.tables.launch import LaunchConfig
from megarl.config.tables.model import ModelConfig, ParallelConfig, RecomputeConfig
from megarl.config.tables.rollout import RolloutConfig, SGLangConfig
from megarl.config.tables.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from megarl.config.tables.sampling import CreditConfig, EstimateConfig, GvmConfig, SamplingConfig
from megarl.config.tables.train import OptimConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "CreditConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EstimateConfig",
    "EvalConfig",
    "GvmConfig",
    "LaunchConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RecomputeConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SGLangConfig",
    "SamplingConfig",
    "SftConfig",
    "TrainConfig",
]
