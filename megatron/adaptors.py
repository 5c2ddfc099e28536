"""What a plug-in changes in torch, DeepSpeed and this project: a list that can be read, switched off and taken back.

An adaptor is a named list of patches of one part. All adaptors of a device are applied when it is chosen, or none;
``disable`` puts back every attribute. Switches in the environment, read when they are applied:

| variable | is off |
|---|---|
| `DISABLE_ADAPTOR=1` | all adaptors |
| `ENABLE_TORCH_ADAPTOR=0` | those of torch |
| `ENABLE_DEEPSPEED_ADAPTOR=0` | those of DeepSpeed |
| `ENABLE_MEGATRON_ADAPTOR=0` | those of this project |
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("torch", "deepspeed", "megatron")
ALL_OFF = "DISABLE_ADAPTOR"
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """Another value for one attribute.

    Args:
        target: module, class where there is one, and attribute: ``torch.nn.functional.layer_norm``. Whoever imported
            the attribute by name keeps the old one: name the place where it is looked up.
        replacement: given the old value, returns the new one.
        why: what would go wrong without it.
    """

    target: str
    replacement: Callable[[Any], Any]
    why: str


@dataclass(frozen=True)
class Adaptor:
    """The patches of one part, torch, deepspeed or megatron, under a name."""

    part: str
    name: str
    patches: tuple[Patch, ...]

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"the part of adaptor {self.name} must be one of {', '.join(PARTS)}, got {self.part!r}")

    @property
    def switch(self) -> str:
        """The variable that switches this part off."""
        return f"ENABLE_{self.part.upper()}_ADAPTOR"


@dataclass(frozen=True)
class _Applied:
    """One attribute that has been replaced; ``old`` is missing where the owner had only inherited it."""

    target: str
    owner: Any
    attribute: str
    old: Any
    new: Any


class Applied:
    """Adaptors that have been applied, with the way back."""

    def __init__(self, adaptors: tuple[Adaptor, ...], patches: list[_Applied]) -> None:
        self.adaptors, self._patches = adaptors, patches

    def disable(self) -> None:
        """Put back every attribute as it was, the last one first. A second call does nothing.

        Raises:
            RuntimeError: someone else has replaced an attribute since; the others are as they were.
        """
        lost = []
        while self._patches:
            patch = self._patches.pop()
            if vars(patch.owner).get(patch.attribute, _MISSING) is not patch.new:
                lost.append(patch.target)
            elif patch.old is _MISSING:
                delattr(patch.owner, patch.attribute)
            else:
                setattr(patch.owner, patch.attribute, patch.old)
        if lost:
            raise RuntimeError(
                f"an attribute must be as the adaptor left it when it is taken back, got {', '.join(lost)} replaced by "
                "someone else. Undo that first"
            )


def enable(adaptors: Iterable[Adaptor], env: Mapping[str, str] | None = None) -> Applied:
    """Apply the adaptors that are switched on, all or none, and return the way back.

    Raises:
        ValueError: a switch has another value than 0 or 1, a target is not there, or two patches have one target.
    """
    wanted = tuple(adaptor for adaptor in adaptors if is_on(adaptor, env))
    found = [(adaptor, patch, *_find(adaptor, patch)) for adaptor in wanted for patch in adaptor.patches]
    places = [(id(owner), attribute) for _, _, owner, attribute in found]
    for number, (adaptor, patch, *_) in enumerate(found):
        if places[number] in places[:number]:
            raise ValueError(f"a target must be patched once, got {patch.target} again in {_called(adaptor)}")
    applied = Applied(wanted, [])
    try:
        for _, patch, owner, attribute in found:
            old = vars(owner).get(attribute, _MISSING)
            new = patch.replacement(getattr(owner, attribute))
            setattr(owner, attribute, new)
            applied._patches.append(_Applied(patch.target, owner, attribute, old, new))
    except BaseException:
        applied.disable()
        raise
    return applied


def is_on(adaptor: Adaptor, env: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment leaves ``adaptor`` on.

    Raises:
        ValueError: a switch has another value than 0 or 1.
    """
    env = os.environ if env is None else env
    return _switch(env, ALL_OFF, "0") == "0" and _switch(env, adaptor.switch, "1") == "1"


def rows(adaptors: Iterable[Adaptor], env: Mapping[str, str] | None = None) -> Iterator[tuple[str, str, str, str]]:
    """Yield (adaptor, whether it is on, target, why) of every patch."""
    for adaptor in adaptors:
        for patch in adaptor.patches:
            yield f"{adaptor.part}: {adaptor.name}", "on" if is_on(adaptor, env) else "off", patch.target, patch.why


def _switch(env: Mapping[str, str], name: str, default: str) -> str:
    value = env.get(name, "") or default
    if value not in ("0", "1"):
        raise ValueError(f"the environment's {name} must be 0 or 1, got {value!r}. Unset it to have {default}")
    return value


def _find(adaptor: Adaptor, patch: Patch) -> tuple[Any, str]:
    """Return the module or class that holds the target, and the attribute's name."""
    try:
        return target_of(patch)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"every target of an adaptor must be there, got {patch.target} in {_called(adaptor)}: {error}. Bring the "
            f"plug-in up to date with this version of {adaptor.part}, or set {adaptor.switch}=0 to do without"
        ) from None


def target_of(patch: Patch) -> tuple[Any, str]:
    """Return the module or class that holds the target of ``patch``, and the attribute's name.

    Raises:
        ImportError, AttributeError: there is none.
    """
    path, _, attribute = patch.target.rpartition(".")
    owner = _resolve(path)
    getattr(owner, attribute)
    return owner, attribute


def _resolve(path: str) -> Any:
    """Return the module at ``path``, or the class in the module before its last dot."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as missing:
        module, _, name = path.rpartition(".")
        if not module or not path.startswith(missing.name or path):
            raise
        return getattr(importlib.import_module(module), name)


def _called(adaptor: Adaptor) -> str:
    return f"the {adaptor.part} adaptor {adaptor.name!r}"
