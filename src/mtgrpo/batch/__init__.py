"""Trajectories into tensors: a forest of tokens, and one flat entry for each sampled token."""
