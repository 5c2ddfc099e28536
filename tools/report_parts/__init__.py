"""The parts of tools/report.py: run folders in, one HTML page out."""
