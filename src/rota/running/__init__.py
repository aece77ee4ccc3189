"""Running an experiment: its checks, its records, its folder and its checkpoints."""
