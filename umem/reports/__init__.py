"""What people see of traces and results: text, pictures."""
