"""Mutants: deliberate faults in the package, each of which a named test must detect.

A mutant replaces one function, method or module value at run time, so renaming a local variable or moving a line does
not touch it. Each file of this folder holds the mutants of one package:

    @mutant("megatron.mpu.mappings:all_reduce", "tests/mpu/test_layers.py::test_column_then_row_matches_two_linears")
    def all_reduce_is_skipped(original):
        return lambda x, group, op=None: x

The decorated function receives the original and returns its replacement.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import tests.mutants

OUR_PACKAGES = ("megatron", "tds", "pretrain_", "tests.")


class Mutant(NamedTuple):
    """One deliberate fault.

    Args:
        name: file and function that define the mutant, as ``optim.clipping_is_skipped``.
        target: ``package.module:function``, ``package.module:Class.method`` or ``package.module:VALUE``.
        make: returns the replacement for the original.
        tests: pytest ids, at least one of which must fail.
        raises: the package itself raises on this fault; otherwise an assertion of a test must fail.
        needs: an optional package that the target's module imports.
    """

    name: str
    target: str
    make: Callable[[Any], Any]
    tests: tuple[str, ...]
    raises: bool
    needs: str | None

    @property
    def can_be_applied(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


MUTANTS: dict[str, Mutant] = {}


def mutant(
    target: str, *tests: str, raises: bool = False, needs: str | None = None
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register the decorated function as the maker of a mutant."""

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        assert name not in MUTANTS, f"two mutants are named {name}"
        MUTANTS[name] = Mutant(name, target, make, tests, raises, needs)
        return make

    return register


def call_after_init(original: Callable[..., None], change_object: Callable[[Any], None]) -> Callable[..., None]:
    """Return an ``__init__`` that changes the new object after the original has run."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        change_object(self)

    return init


def load_mutants() -> dict[str, Mutant]:
    """Import every file of mutants and return the mutants by name."""
    for module in pkgutil.iter_modules(tests.mutants.__path__):
        if not module.name.startswith(("test_", "conftest")):
            importlib.import_module(f"tests.mutants.{module.name}")
    return MUTANTS


def find_target(target: str) -> tuple[Any, str, Any]:
    """Return the module or class that owns the target, the attribute's name, and the attribute (a raw descriptor)."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, inspect.getattr_static(owner, name)


def apply_mutant(selected: Mutant) -> None:
    """Replace the target of a mutant in this process, including the references of modules that imported it by name."""
    owner, name, original = find_target(selected.target)
    if isinstance(original, (staticmethod, classmethod)):
        replacement = type(original)(selected.make(original.__func__))
    else:
        replacement = selected.make(original)
    setattr(owner, name, replacement)
    if isinstance(owner, ModuleType):
        replace_references(name, original, replacement)


def replace_references(name: str, original: Any, replacement: Any) -> None:
    """Replace the references of other modules; a value that is no function or class only under its own name.

    Small integers and strings are shared by the interpreter, so identity says nothing about them.
    """
    is_unique = isinstance(original, (FunctionType, type))
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(OUR_PACKAGES):
            continue
        for key, value in list(vars(module).items()):
            if value is original and (is_unique or key == name):
                setattr(module, key, replacement)
