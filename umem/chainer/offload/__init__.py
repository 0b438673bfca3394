"""Offload: what backward needs goes down one tier, and comes back before its use."""
