"""`tds.X` is `deepspeed.X`: finder and followed modules, version check, `quiet`."""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# DeepSpeed, once it is sure that its version and torch's are right and that nothing is compiled for a CPU.

IS_VERBOSE = os.environ.get("TDS_VERBOSE", "0") not in ("", "0")
OLDEST, BELOW = (0, 19, 6), (0, 20)
"""Of DeepSpeed."""
OLDEST_TORCH = (2, 11)
"""What ``pyproject.toml`` asks for is newer: lower versions are let through for machines that have nothing else."""


def theirs(name: str = "deepspeed") -> Any:
    """Return a module of DeepSpeed. It is looked up by its name, so that whoever asks does without until then.

    Raises:
        ImportError: DeepSpeed or torch is missing, or of a version that tds was not written against.
    """
    _prepare()
    return importlib.import_module(name)


@functools.cache
def _prepare() -> None:
    check_torch()
    check_versions()
    spare_the_compiler(importlib.import_module("deepspeed"))
    if IS_VERBOSE:
        _log_from(logging.INFO)


def log_from(level: int) -> None:
    """Let DeepSpeed's logger tell what is of ``level`` or above."""
    _prepare()
    _log_from(level)


def _log_from(level: int) -> None:
    logger = importlib.import_module("deepspeed.utils").logger
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def check_versions(installed: str | None = None) -> None:
    """Do nothing if DeepSpeed's version is one that tds was written against.

    Raises:
        ImportError: it is older or newer, or not installed.
    """
    _check("deepspeed", installed, OLDEST, BELOW)


def check_torch(installed: str | None = None) -> None:
    """Do nothing if torch is as new as that which tds was tried with.

    Raises:
        ImportError: it is older, or not installed.
    """
    _check("torch", installed, OLDEST_TORCH, None)


def _check(package: str, installed: str | None, oldest: tuple[int, ...], below: tuple[int, ...] | None) -> None:
    wanted = f">={_text(oldest)}" + (f",<{_text(below)}" if below else "")
    if installed is None:
        from importlib import metadata  # not at the top: every --help would wait for the mail parser that it brings

        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError as missing:
            raise ImportError(
                f"tds needs {package}, which is not installed: pip install '{package}{wanted}'"
            ) from missing
    numbers = []
    for part in installed.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    version = tuple(numbers)
    if version < oldest or (below is not None and version >= below):
        raise ImportError(
            f"tds needs {package} {wanted}, got {installed}: it builds on private parts that change between versions. "
            f"pip install '{package}{wanted}'"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def spare_the_compiler(deepspeed: ModuleType) -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce at start on a CPU (35 s, and needs g++).

    Where DeepSpeed has not asked yet which of its operations can be compiled, it never does: that runs a compiler and
    imports setuptools, and all it would learn is about this one.
    """
    if importlib.import_module("deepspeed.accelerator").get_accelerator().device_name() == "cpu":
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


# ``tds.X`` is ``deepspeed.X``: the same module object under a second name, and the same names, looked up when used.
#
# ``import tds.ops.adam`` asks the finder below, which answers with ``deepspeed.ops.adam`` itself, whose ``__name__``,
# ``__spec__`` and ``__loader__`` stay DeepSpeed's. Files of tds win. The few modules of ours that stand for one of
# DeepSpeed's (``follow``) own the names that they define; everything else is read from it and set on it. DeepSpeed is
# imported at the first name that is asked of it.

OURS, THEIRS = "tds", "deepspeed"
FOLDER = Path(__file__).parents[1]


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
    for name in [name for name in list(sys.modules) if name.startswith(f"{THEIRS}.")]:
        module, own = sys.modules[name], OURS + name.removeprefix(THEIRS)
        is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if module is not None and not is_loading and own not in _own_files():
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


# DeepSpeed's own lines on the screen: off unless asked for by ``TDS_VERBOSE=1`` or ``tds.quiet(False)``.

SPEAKERS = ("deepspeed.runtime.pipe.module", "deepspeed.runtime.pipe.topology", "deepspeed.runtime.utils")
"""Modules with a ``print``."""
_is_quiet = not IS_VERBOSE


def quiet(on: bool = True) -> None:
    """Switch DeepSpeed's informational lines off (``on``) or on; warnings always show."""
    global _is_quiet
    _is_quiet = on
    log_from(logging.WARNING if on else logging.INFO)


@contextmanager
def without_prints() -> Iterator[None]:
    """Drop the ``print`` lines of DeepSpeed's own modules meanwhile; a user's prints stay."""
    if not _is_quiet:
        yield
        return
    modules = [theirs(name) for name in SPEAKERS]
    for module in modules:
        module.print = _drop
    try:
        yield
    finally:
        for module in modules:
            module.print = builtins.print


def _drop(*_: Any, **__: Any) -> None:
    return None
