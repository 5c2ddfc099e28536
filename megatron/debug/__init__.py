"""Inspection of a run: module inputs and outputs, the origin of the first NaN, and differences between two dumps.

This package is imported only if --debug-dump or --debug-nan is given. Tools read dumps with ``dump_files`` and
``compare``.
"""
