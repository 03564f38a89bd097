"""How weights leave the trainer: checkpoints on disk, pushes to servers."""
