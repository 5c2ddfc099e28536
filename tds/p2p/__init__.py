"""Point-to-point communication between stages."""
