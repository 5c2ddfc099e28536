"""``tds.X`` is ``deepspeed.X``: the same module object under a second name, and the same names, looked up when used.

``import tds.ops.adam`` asks the finder below, which answers with ``deepspeed.ops.adam`` itself, whose ``__name__``,
``__spec__`` and ``__loader__`` stay DeepSpeed's. Files of tds win. The few modules of ours that stand for one of
DeepSpeed's (``follow``) own the names that they define; everything else is read from it and set on it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

OURS, THEIRS = "tds", "deepspeed"


class Finder(MetaPathFinder, Loader):
    """Finds ``tds.*`` that is no file of tds in DeepSpeed.

    It stands ahead of Python's finder, which would load the files of ``deepspeed.ops`` a second time as ``tds.ops``.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0]) if fullname.startswith(f"{OURS}.") else None
        if parent is None:
            return None
        is_ours = parent.__name__.partition(".")[0] == OURS
        if is_ours and PathFinder.find_spec(fullname, parent.__path__) is not None:
            return None
        theirs = importlib.util.find_spec(theirs_of(fullname))
        if theirs is None:
            return None
        is_package = theirs.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=theirs.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Put DeepSpeed's module in the place of the empty one that Python has made."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(theirs_of(name))
        name_loaded()


_FINDER = Finder()


def install() -> None:
    """Let ``import tds.X`` find ``deepspeed.X`` from now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    name_loaded()


def name_loaded() -> None:
    """Give every module of DeepSpeed that is loaded its name in tds.

    Else importing it by that name would make Python set it as an attribute of its parent, where DeepSpeed may have put
    something else by then: ``deepspeed.utils.tensor_fragment`` is a class and a module.
    """
    for name, module in list(sys.modules.items()):
        is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if name.startswith(f"{THEIRS}.") and module is not None and not is_loading:
            sys.modules.setdefault(OURS + name.removeprefix(THEIRS), module)


def theirs_of(name: str) -> str:
    """Return DeepSpeed's name of a module of tds."""
    return THEIRS + name.removeprefix(OURS)


class _Following(ModuleType):
    """A module of ours that stands for one of DeepSpeed's."""

    _theirs: ModuleType
    _own: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [each for each in dir(self) if not each.startswith("_")]
        if name == "__path__":
            raise AttributeError(f"module {self.__name__!r} is no package")
        return getattr(self._theirs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_ours = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if name in self._own or name.startswith("__") or is_ours:
            super().__setattr__(name, value)
        else:
            setattr(self._theirs, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._theirs, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._theirs), *self._own})


def follow(name: str, own: Sequence[str]) -> None:
    """Make the module ``name`` stand for DeepSpeed's, except for the names in ``own``."""
    module = sys.modules[name]
    vars(module).update(_theirs=importlib.import_module(theirs_of(name)), _own=frozenset(own))
    module.__class__ = _Following
