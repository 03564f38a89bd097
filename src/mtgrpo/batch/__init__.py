"""Trajectories into tensors: rows of tokens, and one flat entry for each sampled token."""
