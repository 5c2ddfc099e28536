"""Drop-in replacement for DeepSpeed, based on tds's pipeline engine.

Only this package imports DeepSpeed, and only ``api`` uses its private names. ``alias`` makes DeepSpeed's other names
available under ``tds``. tds's other packages do not import this package.
"""
