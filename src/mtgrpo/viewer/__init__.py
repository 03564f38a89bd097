"""A page on which runs can be looked at down to the single token: `mtgrpo view`."""
