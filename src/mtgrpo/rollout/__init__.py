"""From a task to scored trajectories: chat (tokens), play (the turn loop), group (siblings), stream (batches)."""
