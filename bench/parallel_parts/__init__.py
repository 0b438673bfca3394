"""The program that each rank of bench/parallel_graph.py runs."""
