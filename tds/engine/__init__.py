"""The pipeline engine: runs training steps and evaluations in the order of a schedule."""
