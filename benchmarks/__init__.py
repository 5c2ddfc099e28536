"""Benchmarks of speed and memory, and the programs and models that they compare with."""
