"""Reports as an HTML page."""
