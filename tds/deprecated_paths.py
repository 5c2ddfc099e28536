"""Former import paths: they work for one release, and say with a DeprecationWarning where their names are now."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any


def find_moved(path: str, name: str, homes: Sequence[str], stacklevel: int = 3) -> Any:
    """Return what ``path.name`` was, warning of the new place.

    Args:
        homes: modules that have the names of ``path`` now, or one of them as ``module:name``.

    Raises:
        AttributeError: none of them has it.
    """
    for home in homes:
        module, _, renamed = home.partition(":")
        if renamed.partition("=")[0] not in ("", name):
            continue
        new = renamed.partition("=")[2] or name
        found = importlib.import_module(module)
        if hasattr(found, new):
            warnings.warn(f"{path}.{name} is {module}.{new} now", DeprecationWarning, stacklevel=stacklevel)
            return getattr(found, new)
    raise AttributeError(f"module {path!r} has no attribute {name!r}")


class MovedModules(MetaPathFinder, Loader):
    """Finds former modules: empty ones, whose names are looked up at their new places."""

    def __init__(self) -> None:
        self.homes: dict[str, tuple[str, ...]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in self.homes else None

    def exec_module(self, module: ModuleType) -> None:
        name, homes = module.__name__, self.homes[module.__name__]

        def look_up(attribute: str) -> Any:
            if attribute.startswith("__") and attribute.endswith("__"):
                raise AttributeError(attribute)
            return find_moved(name, attribute, homes)

        module.__getattr__ = look_up  # type: ignore[method-assign]


_FINDER = MovedModules()


def forward(homes: Mapping[str, tuple[str, ...]]) -> None:
    """Let these former modules be found, each with the modules that have its names now."""
    _FINDER.homes.update(homes)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def look_up(path: str, name: str, former: Mapping[str, str], home: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return what a package's ``__getattr__`` is asked for: names on first use, of which some were called otherwise.

    Args:
        former: name that was there -> the whole dotted name of what it is now.
        home: name that is there -> its module.

    Raises:
        AttributeError: it is neither.
    """
    if name in former:
        module, _, new = former[name].rpartition(".")
        return find_moved(path, name, (f"{module}:{name}={new}",), stacklevel=4)
    if name not in home:
        raise AttributeError(f"module {path!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(home[name]), name)
    setattr(sys.modules[path], name, found)  # the package is not asked for it again
    return found
