"""The parts of ``benchmarks/scaling.py``: what is measured here, what is predicted for larger machines, pictures."""
