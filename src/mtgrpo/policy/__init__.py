"""Tensors into new weights: the policy, its optimiser, its frozen reference."""
