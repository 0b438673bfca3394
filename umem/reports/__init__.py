"""Reports on traces and results, for people and for other tools: text, pictures, pages."""
