"""What flight records of all ranks say together: where time went, who was late, which link is slow."""
