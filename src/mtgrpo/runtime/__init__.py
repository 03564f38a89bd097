"""What a run needs of the machine: processes, files, memory, cores, the hub, text for a terminal."""
