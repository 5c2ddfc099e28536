"""The parts of ``benchmarks/data.py``: preprocessing, reading, spans, and what they share."""
