"""Environments written for verifiers: their tasks, their harness and rewards, our tokens."""
