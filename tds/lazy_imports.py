"""Package attributes that are imported on first access (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def lazy_attribute(package: str, name: str, modules: Mapping[str, str]) -> Any:
    """Import a package attribute and store it there, so that ``__getattr__`` is called once per attribute.

    Args:
        package: ``__name__`` of the package whose ``__getattr__`` calls this function.
        modules: attribute -> module that defines it.

    Raises:
        AttributeError: ``modules`` does not contain ``name``.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(modules[name]), name)
    setattr(sys.modules[package], name, value)
    return value
