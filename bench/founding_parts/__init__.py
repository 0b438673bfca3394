"""The network of bench/founding_table.py, and what is done to its step."""
