"""Parameters, FLOPs and memory for a model, computed without torch for the planner and ``--dry-run``."""
