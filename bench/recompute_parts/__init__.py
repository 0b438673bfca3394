"""What bench/recompute.py measures, and how."""
