"""Predictions: replays of a trace, and which technique makes it fit; all of it simulated."""
