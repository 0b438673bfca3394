"""Predictions: replays of a trace on models of GPUs; all of it simulated."""
