"""Half precision: halves where they save memory, float32 where they would cost accuracy."""
