"""Inspection of a run: inputs and outputs of each module, the origin of the first NaN, and differences of two dumps.

This package is imported only if --debug-dump or --debug-nan is given. Tools read dumps with ``dump_files`` and
``compare``.
"""
