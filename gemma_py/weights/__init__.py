"""Weights: opening checkpoints, checking and packing tensors, and the cache of packed weights on disk."""
