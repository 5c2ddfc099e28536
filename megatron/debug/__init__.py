"""Looks into a run: what each module takes and gives, where the first NaN is made, and how two such records differ.

Nothing imports this package unless --debug-dump or --debug-nan is given; tools read dumps by ``folder``, ``joining``
and ``comparison``.
"""
