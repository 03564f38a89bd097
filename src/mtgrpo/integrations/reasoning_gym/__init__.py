"""Generated puzzles of the package reasoning-gym, and its own grading of them."""
