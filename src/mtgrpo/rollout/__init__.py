"""From a task to scored trajectories: the turn loop, groups of siblings, the stream of groups."""
