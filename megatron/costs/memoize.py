"""Memoization of the methods of cost models.

The planner's search asks one cost model for the same values in thousands of layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Item = TypeVar("Item")
Owner = TypeVar("Owner")
Params = ParamSpec("Params")


def memoized_list(
    method: Callable[Concatenate[Owner, Params], list[Item]],
) -> Callable[Concatenate[Owner, Params], list[Item]]:
    """Cache the lists that ``method`` returns, by its arguments, in the instance.

    Each call returns its own copy of the list. The instance must be immutable and must have a ``__dict__``; the cache
    is not part of its fields, so ``dataclasses.replace`` starts with an empty one.
    """

    @wraps(method)
    def call(self: Owner, /, *args: Params.args, **kwargs: Params.kwargs) -> list[Item]:
        cache = self.__dict__.setdefault("_memoized", {})
        key = method, args, tuple(kwargs.items())
        if key not in cache:
            cache[key] = method(self, *args, **kwargs)
        return list(cache[key])

    return call
