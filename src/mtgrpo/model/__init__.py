"""The policy's network: one loader, one forward, used by the trainer and by the local engine alike."""
