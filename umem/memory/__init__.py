"""Memory modes, limits, hints and counts, as users turn them on."""
