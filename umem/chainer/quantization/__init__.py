"""Models in 8 or 4 bits: what they are made of, how they are made, trained for it and saved."""
