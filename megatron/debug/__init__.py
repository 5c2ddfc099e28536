"""Debugging: module input and output dumps, detection of the first NaN, and comparison of two dumps.

Training imports this package only with --debug-dump or --debug-nan. Tools use ``dump_files`` to read dumps and
``compare`` to compare them.
"""
