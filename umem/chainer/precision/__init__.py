"""Half precision: float16 where it saves memory, float32 where float16 would cost accuracy."""
