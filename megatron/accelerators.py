"""Kinds of devices and plug-ins; patches that a plug-in applies and takes back."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# What a plug-in changes in torch, DeepSpeed and this project: a list that can be read, switched off and taken back.
#
# An adaptor is a named list of patches of one part. All adaptors of a device are applied when it is chosen, or none;
# ``disable`` puts back every attribute. Switches in the environment, read when they are applied:
#
# | variable | is off |
# |---|---|
# | `DISABLE_ADAPTOR=1` | all adaptors |
# | `ENABLE_TORCH_ADAPTOR=0` | those of torch |
# | `ENABLE_DEEPSPEED_ADAPTOR=0` | those of DeepSpeed |
# | `ENABLE_MEGATRON_ADAPTOR=0` | those of this project |

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


def adaptor_rows(
    adaptors: Iterable[Adaptor], env: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str, str, str]]:
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


# The kinds of devices that ``--device`` may name: the CPU, CUDA, and what plug-ins register.
#
# A plug-in is a module, ``megatron_accelerator_X`` by convention, that calls ``register`` when it is imported: by a
# line in the user's script, or by ``MEGATRON_ACCELERATOR=megatron_accelerator_X`` in the environment. Nothing is looked
# for among installed packages: what is installed must not change what a run computes. Here is no torch, so that the
# command line can be checked without it.

VARIABLE = "MEGATRON_ACCELERATOR"
BUILT_IN = ("cpu", "cuda")
DTYPES = ("bf16", "fp16", "fp32", "fp64")
HOOKS = frozenset(
    (
        "backend",
        "bind",
        "can_pin",
        "default_generator",
        "default_precision",
        "finish_copies",
        "identity",
        "is_busy",
        "model_name",
        "name",
        "peak_memory_bytes",
        "synchronize",
        "total_memory_bytes",
    )
)
"""Functions of ``megatron.device`` that a plug-in may bring itself, with the same arguments."""

_registered: dict[str, Accelerator] = {}
_applied: dict[str, Applied] = {}


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device.

    Args:
        name: as ``--device`` and ``torch.device`` call it.
        is_available: whether this machine has one that can be used now.
        backend: torch.distributed's for tensors on it; "": DeepSpeed's accelerator says.
        dtypes: number formats that it computes in, of bf16, fp16, fp32 and fp64; the first is taken where none is said.
        prepare: called once, when the device is chosen and before anything is put on it.
        deepspeed: returns the accelerator object for DeepSpeed; None: DeepSpeed knows the device by its name.
        hooks: function of ``megatron.device`` -> what is called in its place for this kind; the others go to
            torch itself.
        adaptors: what must be patched elsewhere.
        module: where it comes from, for messages.
    """

    name: str
    is_available: Callable[[], bool]
    backend: str = ""
    dtypes: tuple[str, ...] = ("fp32",)
    prepare: Callable[[], None] | None = None
    deepspeed: Callable[[], Any] | None = None
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    adaptors: tuple[Adaptor, ...] = ()
    module: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in (*BUILT_IN, "auto", "meta"):
            raise ValueError(f"a plug-in's device must have a name of its own, got {self.name!r}. Choose another one")
        if unknown := sorted(set(self.hooks) - HOOKS):
            raise ValueError(
                f"the hooks of device {self.name} must be functions of megatron.device, got {', '.join(unknown)}. "
                f"There are {', '.join(sorted(HOOKS))}"
            )
        if not self.dtypes or set(self.dtypes) - set(DTYPES):
            raise ValueError(f"the dtypes of device {self.name} must be some of {', '.join(DTYPES)}, got {self.dtypes}")


def register(accelerator: Accelerator) -> None:
    """Let ``--device`` name ``accelerator``.

    Raises:
        ValueError: another one has its name.
    """
    if _registered.setdefault(accelerator.name, accelerator) is not accelerator:
        raise ValueError(
            f"each device must be registered once, got {accelerator.name} of {accelerator.module or 'a plug-in'} when "
            f"{_registered[accelerator.name].module or 'another one'} had done so. Import one of the two"
        )


def forget(name: str) -> None:
    """Take a plug-in's device out again, with its adaptors."""
    disable(name)
    _registered.pop(name, None)


def adapt(name: str, env: Mapping[str, str] | None = None) -> Applied:
    """Apply the adaptors of a plug-in's device unless that has been done, and return the way back.

    Raises:
        ValueError: a target is not there, or a switch in the environment is neither 0 nor 1.
    """
    if name not in _applied:
        _applied[name] = enable(_registered[name].adaptors, env)
    return _applied[name]


def applied(name: str) -> Applied | None:
    """Return what ``adapt`` has applied for this device, if it has."""
    return _applied.get(name)


def disable(name: str) -> None:
    """Put back every attribute that ``adapt`` has replaced for this device."""
    if (done := _applied.pop(name, None)) is not None:
        done.disable()


def names() -> tuple[str, ...]:
    """Return what ``--device`` may name, but for "auto"."""
    return (*BUILT_IN, *_registered)


def registered() -> tuple[Accelerator, ...]:
    """Return the devices of plug-ins, in the order in which they came."""
    return tuple(_registered.values())


def find(name: str) -> Accelerator | None:
    """Return the plug-in's device of that name; None for the CPU, CUDA, and names that nobody registered."""
    return _registered.get(name)


def load(env: Mapping[str, str] | None = None) -> None:
    """Import the modules that the environment's MEGATRON_ACCELERATOR names, with commas between them.

    Raises:
        ValueError: one cannot be imported.
    """
    env = os.environ if env is None else env
    for module in filter(None, env.get(VARIABLE, "").split(",")):
        try:
            importlib.import_module(module.strip())
        except ImportError as error:
            raise ValueError(
                f"the environment's {VARIABLE} must name modules that can be imported, got {module.strip()!r}: "
                f"{error}. Install the plug-in, or put its folder on PYTHONPATH"
            ) from error


def problem(requested: str) -> str | None:
    """Return why ``--device`` cannot be ``requested``, or None."""
    known = ("auto", *names())
    if requested in known:
        return None
    return (
        f"--device must be {', '.join(known[:-1])} or {known[-1]}, got {requested}. Another accelerator "
        f'comes by a plug-in: "import megatron_accelerator_{requested}" in the script, or '
        f"{VARIABLE}=megatron_accelerator_{requested} in the environment"
    )
