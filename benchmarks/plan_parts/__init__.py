"""The parts of ``benchmarks/plan.py``: layouts, short trainings, and their estimates beside them."""
