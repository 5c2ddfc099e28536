"""Parts of benchmarks/kill.py: runs that are killed at random moments, and what must be true of them afterwards."""
