"""Benchmarks of speed and memory, and the reference programs and models for comparison."""
