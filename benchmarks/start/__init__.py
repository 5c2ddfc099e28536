"""What ``benchmarks/data_start.py`` is made of."""
