"""Runs saved to disk and found again: directories that are whole or not there. Knows no framework."""
