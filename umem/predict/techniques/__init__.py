"""Techniques for a step that does not fit, each a function of its trace."""
