"""Sampling engines: the protocol, and the local engine on transformers."""
