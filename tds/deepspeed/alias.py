"""``tds.X`` as an alias for ``deepspeed.X``: import finder, module aliases, version check, ``quiet``."""

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

# Version checks for torch and DeepSpeed, and DeepSpeed's import.

IS_VERBOSE = os.environ.get("TDS_VERBOSE", "0") not in ("", "0")
MIN_DEEPSPEED, DEEPSPEED_LIMIT = (0, 19, 6), (0, 20)
"""Oldest supported version of DeepSpeed, and the first one that is not supported."""
MIN_TORCH = (2, 11)
"""Oldest accepted version of torch. ``pyproject.toml`` requires a newer one, which some machines do not have."""


def import_deepspeed(name: str = "deepspeed") -> Any:
    """Import and return a DeepSpeed module, after checking the versions.

    Importing by name lets callers defer DeepSpeed's import.

    Raises:
        ImportError: DeepSpeed or torch is missing, or its version is not supported.
    """
    _prepare()
    return importlib.import_module(name)


@functools.cache
def _prepare() -> None:
    check_torch()
    check_versions()
    skip_shm_compilation(importlib.import_module("deepspeed"))
    if IS_VERBOSE:
        _set_log_level(logging.INFO)


def set_log_level(level: int) -> None:
    """Set the level of DeepSpeed's logger and its handlers."""
    _prepare()
    _set_log_level(level)


def _set_log_level(level: int) -> None:
    logger = importlib.import_module("deepspeed.utils").logger
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def check_versions(installed: str | None = None) -> None:
    """Check that DeepSpeed's version is supported.

    Args:
        installed: the version to check; None: the installed one.

    Raises:
        ImportError: DeepSpeed is too old, too new or not installed.
    """
    _check("deepspeed", installed, MIN_DEEPSPEED, DEEPSPEED_LIMIT)


def check_torch(installed: str | None = None) -> None:
    """Check that torch's version is supported.

    Args:
        installed: the version to check; None: the installed one.

    Raises:
        ImportError: torch is too old or not installed.
    """
    _check("torch", installed, MIN_TORCH, None)


def _check(package: str, installed: str | None, oldest: tuple[int, ...], below: tuple[int, ...] | None) -> None:
    requirement = f">={_format_version(oldest)}" + (f",<{_format_version(below)}" if below else "")
    if installed is None:
        from importlib import metadata  # imported here: it imports the email parser, which slows --help

        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise ImportError(
                f"tds requires {package}, which is not installed. Run pip install '{package}{requirement}'"
            ) from error
    components = []
    for component in installed.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in component if c.isdigit())
        components.append(int(digits or 0))
    version = tuple(components)
    if version < oldest or (below is not None and version >= below):
        raise ImportError(
            f"tds requires {package} {requirement}, got {installed}: it uses private APIs that change between "
            f"versions. Run pip install '{package}{requirement}'"
        )


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def skip_shm_compilation(deepspeed: ModuleType) -> None:
    """Prevent DeepSpeed from compiling its shared-memory all-reduce at start on a CPU (takes 35 s and needs g++).

    The operation is marked as incompatible in DeepSpeed's cache of compatible operations. If the cache does not exist
    yet, this function creates it, so that DeepSpeed does not build it, which would run a compiler and import
    setuptools.
    """
    if importlib.import_module("deepspeed.accelerator").get_accelerator().device_name() == "cpu":
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


# ``tds.X`` is the same module object as ``deepspeed.X`` under a second name.
#
# ``import tds.ops.adam`` uses the finder below, which returns the module ``deepspeed.ops.adam`` with DeepSpeed's
# ``__name__``, ``__spec__`` and ``__loader__``. tds's files take precedence. A few modules in tds replace one of
# DeepSpeed's (``forward_to_deepspeed``): they define some names themselves, and get and set all other names on
# DeepSpeed's module. DeepSpeed is imported on the first access to its names.

TDS, DEEPSPEED = "tds", "deepspeed"
TDS_DIR = Path(__file__).parents[1]


class Finder(MetaPathFinder, Loader):
    """Finds modules ``tds.*`` in DeepSpeed, unless tds has a file for them.

    Python's finder would load the files in ``deepspeed.ops`` a second time as ``tds.ops``, so this finder precedes it
    in ``sys.meta_path``.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0]) if fullname.startswith(f"{TDS}.") else None
        if parent is None:
            return None
        is_tds_parent = parent.__name__.partition(".")[0] == TDS
        if is_tds_parent and PathFinder.find_spec(fullname, parent.__path__) is not None:
            return None
        was_loaded = fullname in sys.modules
        _add_all_aliases()
        if not was_loaded:  # otherwise Python would treat the entry as a module that is being reloaded
            sys.modules.pop(fullname, None)
        spec = importlib.util.find_spec(deepspeed_name(fullname))
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that Python has created by DeepSpeed's module."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(deepspeed_name(name))
        add_aliases()


_FINDER = Finder()


def install() -> None:
    """Install the finder, so that ``import tds.X`` finds ``deepspeed.X``."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    add_aliases()


def add_aliases() -> None:
    """Add every loaded DeepSpeed module to ``sys.modules`` under its name in tds.

    Without this, importing a module by its name in tds would make Python set it as an attribute of its parent package,
    and overwrite another object with that name: ``deepspeed.utils.tensor_fragment`` is both a class and a module.
    """
    for name in [name for name in list(sys.modules) if name.startswith(f"{DEEPSPEED}.")]:
        module, tds_name = sys.modules[name], TDS + name.removeprefix(DEEPSPEED)
        is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
        if module is not None and not is_loading and tds_name not in _tds_modules():
            sys.modules.setdefault(tds_name, module)


@functools.cache
def _tds_modules() -> frozenset[str]:
    """List tds's modules that have a file."""
    files = ((path.parent if path.stem == "__init__" else path.with_suffix("")) for path in TDS_DIR.rglob("*.py"))
    return frozenset(".".join((TDS, *file.relative_to(TDS_DIR).parts)) for file in files)


@functools.cache
def _add_all_aliases() -> None:
    """Import DeepSpeed and add its modules under their names in tds."""
    import_deepspeed()
    add_aliases()


def deepspeed_name(name: str) -> str:
    """Convert a module name of tds to DeepSpeed's."""
    return DEEPSPEED + name.removeprefix(TDS)


class _ForwardingModule(ModuleType):
    """A tds module that replaces one of DeepSpeed's and forwards all other names to it."""

    _own: Mapping[str, str]
    _files: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            raise AttributeError(f"module {self.__name__!r} is not a package")
        if name in self._own:
            value = vars(self)[name] = getattr(importlib.import_module(self._own[name]), name)
            return value
        if name in self._files:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name == "__all__":
            return [entry for entry in dir(self) if not entry.startswith("_")]
        return getattr(self._deepspeed_module(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_file = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if is_file and name in self._own:
            return  # the import system sets an imported submodule here, but ``tds.initialize`` must stay the function
        if is_file or name in self._own or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._deepspeed_module(), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._deepspeed_module(), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._deepspeed_module()), *self._own})

    def _deepspeed_module(self) -> ModuleType:
        _add_all_aliases()
        return import_deepspeed(deepspeed_name(self.__name__))  # type: ignore[no-any-return]


def forward_to_deepspeed(name: str, defined_names: Mapping[str, str]) -> None:
    """Make the module ``name`` forward to DeepSpeed's, except for its own files and the names in ``defined_names``.

    Args:
        defined_names: maps each name to the module that defines it, which is imported on first access.
    """
    module = sys.modules[name]
    files = frozenset(info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ())))
    vars(module).update(_own=defined_names, _files=files)
    module.__class__ = _ForwardingModule


# DeepSpeed's output: off unless ``TDS_VERBOSE=1`` is set or ``tds.quiet(False)`` is called.

PRINTING_MODULES = ("deepspeed.runtime.pipe.module", "deepspeed.runtime.pipe.topology", "deepspeed.runtime.utils")
"""Modules of DeepSpeed that call ``print``."""
_is_quiet = not IS_VERBOSE


def quiet(on: bool = True) -> None:
    """Turn quiet mode on or off. In quiet mode, DeepSpeed logs only warnings and errors."""
    global _is_quiet
    _is_quiet = on
    set_log_level(logging.WARNING if on else logging.INFO)


@contextmanager
def without_prints() -> Iterator[None]:
    """Suppress the ``print`` calls of DeepSpeed's modules in the block; other prints still appear."""
    if not _is_quiet:
        yield
        return
    modules = [import_deepspeed(name) for name in PRINTING_MODULES]
    for module in modules:
        module.print = _discard
    try:
        yield
    finally:
        for module in modules:
            module.print = builtins.print


def _discard(*_: Any, **__: Any) -> None:
    return None
