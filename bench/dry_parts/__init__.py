"""Programs of bench/dry_runs.py."""
