"""The simulated world: who can be reached, what the clients' devices are like, and what a round costs."""
