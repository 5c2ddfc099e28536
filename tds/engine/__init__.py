"""The pipeline engine: runs training steps and evaluations in a schedule's order."""
