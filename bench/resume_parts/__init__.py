"""What bench/resume.py is made of."""
