"""Parameters, FLOPs and memory of a model, computed without torch for the planner and ``--dry-run``."""
