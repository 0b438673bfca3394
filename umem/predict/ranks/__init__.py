"""The memory and time of a recorded step on several ranks; all figures are simulated."""
