"""Parts of ``benchmarks/zero.py``."""
