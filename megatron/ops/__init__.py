"""Functions of tensors: no groups, no parameters."""
