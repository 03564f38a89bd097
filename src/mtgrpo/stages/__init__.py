"""What a run does: warm start, evaluation, training."""
