"""Parameters, FLOPs and memory of a model by arithmetic, for the planner and ``--dry-run`` (no torch)."""
