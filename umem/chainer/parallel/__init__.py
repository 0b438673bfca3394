"""What several ranks do together, through MPI."""
