"""What notebooks show of runs, federations and comparisons, and comparisons in Python."""
