"""The founding table measured: a process a technique, and what each of them takes."""
