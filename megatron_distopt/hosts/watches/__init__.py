"""What a user did between two steps, found out before the next one: the same for all hosts."""
