"""Training on several ranks through MPI."""
