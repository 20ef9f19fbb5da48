"""The engine on transformers, in the trainer's own process.

engine (requests and weights) -> session (one batch whenever all episodes wait) -> decode (the loop over tokens), which
draws from a distribution and reads the routes with a recorder.
"""
