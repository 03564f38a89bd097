"""From the command line to an Experiment: the configuration, its options, its help."""
