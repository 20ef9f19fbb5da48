"""megarl: stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core."""

__version__ = "0.1.0"
