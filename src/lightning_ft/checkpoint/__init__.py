"""Differential checkpoints on any fsspec store."""
