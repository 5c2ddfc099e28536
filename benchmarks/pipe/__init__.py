"""The parts of ``benchmarks/pipeline.py``: the model, the contenders, the processes they run in, the result."""
