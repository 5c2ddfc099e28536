"""Finding the rank that did not come."""
