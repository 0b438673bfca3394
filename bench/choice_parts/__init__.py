"""What bench/choice_live.py runs, dry and with its arithmetic."""
