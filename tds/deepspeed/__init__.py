"""Drop-in replacement for DeepSpeed, based on the pipeline engine of tds.

Only this package imports DeepSpeed, and only ``api`` uses its private names. ``alias`` makes all other names of
DeepSpeed available under ``tds``. The other packages of tds do not import this package.
"""
