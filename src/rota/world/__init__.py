"""The simulated world: which clients can be reached, and what their devices are like."""
