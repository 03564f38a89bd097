"""IFEval: instructions that a program can check, and the checks."""
