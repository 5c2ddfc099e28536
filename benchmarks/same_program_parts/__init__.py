"""What ``benchmarks/same_program.py`` is made of."""
