"""Read the values in a pickle without importing or calling any class or function that it names. No torch.

Each class or function that a pickle names is replaced by an empty subclass of ``InertObject``. Plain values
(numbers, texts, lists, dictionaries) are read as they are. An argparse.Namespace, for example, becomes an
``InertObject`` whose ``state`` is its attribute dictionary. Reading a pickle therefore never runs code from it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class InertObject:
    """A value of a class that the reader does not create.

    Attributes:
        path: the class's module and name, such as "argparse.Namespace".
        args: arguments to the constructor or function that built the value.
        state: the value's state; None if the pickle has none.
    """

    path = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> InertObject:
        """Create a value; a pickle may do so without calling ``__init__``."""
        value = super().__new__(cls)
        value.args, value.state = args, None
        return value

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Do nothing: the items of a list of an unknown class are dropped."""

    def __setitem__(self, key: Any, item: Any) -> None:
        """Do nothing: the items of a dictionary of an unknown class are dropped."""


def path_of(value: Any) -> str:
    """Return "module.name" of a class in a pickle, or of a value's class; "" for a plain value."""
    return str(getattr(value, "path", "")) if isinstance(value, InertObject | type) else ""


class _Reader(pickle.Unpickler):
    """Creates plain values, and ``InertObject`` for all others.

    Args:
        builders: "module.name" -> function called instead.
        load_storage: called with a tensor storage's persistent id.
    """

    def __init__(
        self, content: bytes, builders: dict[str, Callable[..., Any]], load_storage: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._builders, self._load_storage = builders, load_storage
        self._classes: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "torch.Size": _make_tuple,
            "builtins.set": _make_list,
            "builtins.frozenset": _make_list,
        }

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in self._builders:
            return self._builders[path]
        if path not in self._classes:
            self._classes[path] = type(name, (InertObject,), {"path": path})
        return self._classes[path]

    def persistent_load(self, pid: Any) -> Any:
        if self._load_storage is None:
            raise pickle.UnpicklingError("it refers to storages of tensors")
        return self._load_storage(pid)


def _make_tuple(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items)


def _make_list(items: Any = ()) -> list[Any]:
    return list(items)


def read_inertly(
    content: bytes,
    builders: dict[str, Callable[..., Any]] | None = None,
    load_storage: Callable[[Any], Any] | None = None,
) -> Any:
    """Read the value in ``content``.

    Args:
        builders: "module.name" -> function to call where the pickle calls this name.
        load_storage: function called with a storage's persistent id; None: there are no storages.

    Raises:
        ValueError: ``content`` is not a pickle.
    """
    try:
        return _Reader(content, builders or {}, load_storage).load()
    except Exception as error:  # a damaged pickle can raise any type
        raise ValueError(f"{type(error).__name__}: {error}") from error
