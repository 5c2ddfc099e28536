"""``tds.X`` is ``deepspeed.X``: the same module object under a second name, and the same names, looked up when used.

``import tds.ops.adam`` asks the finder below, which answers with ``deepspeed.ops.adam`` itself, whose ``__name__``,
``__spec__`` and ``__loader__`` stay DeepSpeed's. Files of tds win. The few modules of ours that stand for one of
DeepSpeed's (``follow``) own the names that they define; everything else is read from it and set on it. DeepSpeed is
imported at the first name that is asked of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tds.compatibility import theirs

OURS, THEIRS = "tds", "deepspeed"
FOLDER = Path(__file__).parent


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
        was_there = fullname in sys.modules
        _name_all()
        if not was_there:  # else Python takes what is there now for a module to be loaded anew
            sys.modules.pop(fullname, None)
        found = importlib.util.find_spec(theirs_of(fullname))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

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
        own = OURS + name.removeprefix(THEIRS)
        if name.startswith(f"{THEIRS}.") and module is not None and not is_loading and own not in _own_files():
            sys.modules.setdefault(own, module)


@functools.cache
def _own_files() -> frozenset[str]:
    """Return the modules of tds that have a file here, by name."""
    files = ((path.parent if path.stem == "__init__" else path.with_suffix("")) for path in FOLDER.rglob("*.py"))
    return frozenset(".".join((OURS, *file.relative_to(FOLDER).parts)) for file in files)


@functools.cache
def _name_all() -> None:
    """Import DeepSpeed, with names in tds for what comes with it."""
    theirs()
    name_loaded()


def theirs_of(name: str) -> str:
    """Return DeepSpeed's name of a module of tds."""
    return THEIRS + name.removeprefix(OURS)


class _Following(ModuleType):
    """A module of ours that stands for one of DeepSpeed's."""

    _own: Mapping[str, str]
    _files: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            raise AttributeError(f"module {self.__name__!r} is no package")
        if name in self._own:
            value = vars(self)[name] = getattr(importlib.import_module(self._own[name]), name)
            return value
        if name in self._files:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name == "__all__":
            return [each for each in dir(self) if not each.startswith("_")]
        return getattr(self._followed(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_file = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if is_file and name in self._own:
            return  # Python puts a file there that it has imported: ``tds.initialize`` stays the function
        if is_file or name in self._own or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._followed(), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._followed(), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._followed()), *self._own})

    def _followed(self) -> ModuleType:
        """Return the module of DeepSpeed that this one stands for."""
        _name_all()
        return theirs(theirs_of(self.__name__))  # type: ignore[no-any-return]


def follow(name: str, own: Mapping[str, str]) -> None:
    """Make the module ``name`` stand for DeepSpeed's, except for its own files and the names in ``own``.

    Args:
        own: name -> the file that has it, which is imported when the name is first asked for.
    """
    module = sys.modules[name]
    files = frozenset(info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ())))
    vars(module).update(_own=own, _files=files)
    module.__class__ = _Following
