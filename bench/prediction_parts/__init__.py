"""The models of bench/prediction.py."""
