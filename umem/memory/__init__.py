"""What a user switches on: modes, limits, hints, and what is counted."""
