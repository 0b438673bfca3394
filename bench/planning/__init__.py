"""Parts of bench/planners.py: the networks that it plans, and an optimum to compare with."""
