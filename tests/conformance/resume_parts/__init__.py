"""What resume.py is made of."""
