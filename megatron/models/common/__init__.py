"""Code shared by the model families."""
