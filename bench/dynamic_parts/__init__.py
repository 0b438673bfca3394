"""What bench/dynamic.py trains: programs whose graph is another one at each step."""
