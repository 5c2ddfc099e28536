"""The drop-in: DeepSpeed's interface on the pipeline engine of tds.

Only this package imports DeepSpeed, and only ``api`` uses private names of it. ``alias`` serves every other name of
DeepSpeed under ``tds``. The rest of tds does not import this package.
"""
