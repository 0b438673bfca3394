"""What bench/gpu_run.py is made of; needs the standard library alone."""
