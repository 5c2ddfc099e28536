"""Former names of attributes, which work for one release and warn."""

from __future__ import annotations

import warnings
from typing import Any


class Renamed:
    """A class attribute under its former name: reading it warns and returns the attribute with the current name.

    Assign it in the class body: ``former_name = Renamed("current_name")``.

    Args:
        current_name: attribute, property or method of the same class.
    """

    def __init__(self, current_name: str) -> None:
        self.current_name = current_name
        self.former_name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.former_name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        warn_renamed(f"{owner.__name__}.{self.former_name}", self.current_name)
        return getattr(owner if instance is None else instance, self.current_name)


def warn_renamed(former_name: str, current_name: str) -> None:
    """Warn that ``former_name`` is deprecated. The warning names the line that called the caller of this function."""
    message = f"{former_name} is now {current_name}; the next release removes the former name"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
