"""Online eviction: keeps passes within the budget whose graphs are not expected back."""
