"""What a run keeps in its folder: trajectories, summary, curve."""
