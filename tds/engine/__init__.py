"""The pipeline engine: one training step and one evaluation by a schedule."""
