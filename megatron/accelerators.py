"""Device types and their plug-ins; patches that a plug-in applies and reverts."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Patches of a plug-in to torch, DeepSpeed and this project: an explicit list that can be disabled and reverted.
#
# An adaptor is a named list of patches to one package (``PARTS``). When a device is chosen, all of its adaptors are
# applied, or none. ``disable`` restores every attribute. Environment switches, read when the adaptors are applied:
#
# | variable | turns off |
# |---|---|
# | `DISABLE_ADAPTOR=1` | all adaptors |
# | `ENABLE_TORCH_ADAPTOR=0` | adaptors of torch |
# | `ENABLE_DEEPSPEED_ADAPTOR=0` | adaptors of DeepSpeed |
# | `ENABLE_MEGATRON_ADAPTOR=0` | adaptors of this project |

PARTS = ("torch", "deepspeed", "megatron")
ALL_OFF = "DISABLE_ADAPTOR"
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """A replacement for one attribute.

    Args:
        target: module, class if any, and attribute, such as ``torch.nn.functional.layer_norm``. Modules that imported
            the attribute by name keep the original, so name the module in which it is looked up.
        replacement: returns the new value, given the old one.
        why: the failure that the patch prevents.
    """

    target: str
    replacement: Callable[[Any], Any]
    why: str


@dataclass(frozen=True)
class Adaptor:
    """Named patches to one package: torch, deepspeed or megatron."""

    part: str
    name: str
    patches: tuple[Patch, ...]

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"the package of adaptor {self.name} must be one of {', '.join(PARTS)}, got {self.part!r}")

    @property
    def switch(self) -> str:
        """Environment variable that turns off all adaptors for this package."""
        return f"ENABLE_{self.part.upper()}_ADAPTOR"


@dataclass(frozen=True)
class _Applied:
    """One replaced attribute; ``old`` is ``_MISSING`` if the owner had only inherited the attribute."""

    target: str
    owner: Any
    attribute: str
    old: Any
    new: Any


class Applied:
    """Adaptors that have been applied and can be reverted."""

    def __init__(self, adaptors: tuple[Adaptor, ...], patches: list[_Applied]) -> None:
        self.adaptors, self._patches = adaptors, patches

    def disable(self) -> None:
        """Restore every attribute in reverse order of replacement. A second call does nothing.

        Raises:
            RuntimeError: other code has since replaced an attribute; all other attributes are restored.
        """
        overwritten = []
        while self._patches:
            patch = self._patches.pop()
            if vars(patch.owner).get(patch.attribute, _MISSING) is not patch.new:
                overwritten.append(patch.target)
            elif patch.old is _MISSING:
                delattr(patch.owner, patch.attribute)
            else:
                setattr(patch.owner, patch.attribute, patch.old)
        if overwritten:
            raise RuntimeError(
                f"an adaptor can only restore attributes that it replaced last, got {', '.join(overwritten)} "
                "replaced by other code. Revert the other code's patch first"
            )


def enable(adaptors: Iterable[Adaptor], env: Mapping[str, str] | None = None) -> Applied:
    """Apply all adaptors that are switched on, or none if an error occurs; the result can revert them.

    Raises:
        ValueError: a switch is neither 0 nor 1, a target does not exist, or two patches have the same target.
    """
    active = tuple(adaptor for adaptor in adaptors if is_on(adaptor, env))
    targets = [(adaptor, patch, *_find_target(adaptor, patch)) for adaptor in active for patch in adaptor.patches]
    locations = [(id(owner), attribute) for _, _, owner, attribute in targets]
    for idx, (adaptor, patch, *_) in enumerate(targets):
        if locations[idx] in locations[:idx]:
            raise ValueError(f"a target must be patched only once, got {patch.target} again in {_describe(adaptor)}")
    applied = Applied(active, [])
    try:
        for _, patch, owner, attribute in targets:
            old = vars(owner).get(attribute, _MISSING)
            new = patch.replacement(getattr(owner, attribute))
            setattr(owner, attribute, new)
            applied._patches.append(_Applied(patch.target, owner, attribute, old, new))
    except BaseException:
        applied.disable()
        raise
    return applied


def is_on(adaptor: Adaptor, env: Mapping[str, str] | None = None) -> bool:
    """Return True unless the environment turns ``adaptor`` off.

    Raises:
        ValueError: a switch is neither 0 nor 1.
    """
    env = os.environ if env is None else env
    return _switch(env, ALL_OFF, "0") == "0" and _switch(env, adaptor.switch, "1") == "1"


def adaptor_rows(
    adaptors: Iterable[Adaptor], env: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield (adaptor, "on" or "off", target, reason) for every patch."""
    for adaptor in adaptors:
        for patch in adaptor.patches:
            yield f"{adaptor.part}: {adaptor.name}", "on" if is_on(adaptor, env) else "off", patch.target, patch.why


def _switch(env: Mapping[str, str], name: str, default: str) -> str:
    value = env.get(name, "") or default
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {name} must be 0 or 1, got {value!r}. Unset it to use {default}")
    return value


def _find_target(adaptor: Adaptor, patch: Patch) -> tuple[Any, str]:
    """Call ``target_of`` and convert errors to a ValueError that names the adaptor and the fix."""
    try:
        return target_of(patch)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"every target of an adaptor must exist, got {patch.target} in {_describe(adaptor)}: {error}. Update the "
            f"plug-in for this version of {adaptor.part}, or set {adaptor.switch}=0 to disable its adaptors"
        ) from None


def target_of(patch: Patch) -> tuple[Any, str]:
    """Find the module or class with the patch's target, and the attribute's name.

    Raises:
        ImportError, AttributeError: the target does not exist.
    """
    path, _, attribute = patch.target.rpartition(".")
    owner = _resolve(path)
    getattr(owner, attribute)
    return owner, attribute


def _resolve(path: str) -> Any:
    """Import the module at ``path``, or get the class in a module if the last component is not a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as missing:
        module, _, name = path.rpartition(".")
        if not module or not path.startswith(missing.name or path):
            raise
        return getattr(importlib.import_module(module), name)


def _describe(adaptor: Adaptor) -> str:
    return f"the {adaptor.part} adaptor {adaptor.name!r}"


# Device types that ``--device`` accepts: the CPU, CUDA, and those registered by plug-ins.
#
# A plug-in is a module, ``megatron_accelerator_X`` by convention, that calls ``register`` when it is imported: by a
# line in the user's script, or by ``MEGATRON_ACCELERATOR=megatron_accelerator_X`` in the environment. Installed
# packages are not searched for plug-ins, since installing a package must not change the result of a run. This module
# does not import torch, so that the command line can be checked without it.

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
"""Functions of ``megatron.device`` that a plug-in may override, with the same arguments."""

_registered: dict[str, Accelerator] = {}
_applied: dict[str, Applied] = {}


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A device type.

    Args:
        name: name in ``--device`` and ``torch.device``.
        is_available: returns True if this machine has a usable device.
        backend: torch.distributed's backend for tensors of this type; if "", DeepSpeed's accelerator determines it.
        dtypes: supported number formats out of bf16, fp16, fp32 and fp64; the first one is the default.
        prepare: called once when the device is chosen, before it is used.
        deepspeed: returns the accelerator object for DeepSpeed; None if DeepSpeed knows the device by its name.
        hooks: function of ``megatron.device`` -> its replacement for this type; other functions call torch.
        adaptors: patches to other packages.
        module: module that defines the plug-in, for messages.
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
            raise ValueError(
                f"the name of a plug-in's device must be an unused identifier, got {self.name!r}. Rename it"
            )
        if unknown := sorted(set(self.hooks) - HOOKS):
            raise ValueError(
                f"the hooks of device {self.name} must be functions of megatron.device, got {', '.join(unknown)}. "
                f"Use {', '.join(sorted(HOOKS))}"
            )
        if not self.dtypes or set(self.dtypes) - set(DTYPES):
            raise ValueError(f"the dtypes of device {self.name} must be some of {', '.join(DTYPES)}, got {self.dtypes}")


def register(accelerator: Accelerator) -> None:
    """Add ``accelerator`` to the ``--device`` values.

    Raises:
        ValueError: another device has the same name.
    """
    if _registered.setdefault(accelerator.name, accelerator) is not accelerator:
        raise ValueError(
            f"each device must be registered only once, got {accelerator.name} from "
            f"{accelerator.module or 'a plug-in'} and from {_registered[accelerator.name].module or 'another one'}. "
            "Import only one of the two"
        )


def forget(name: str) -> None:
    """Unregister a plug-in's device and revert its adaptors."""
    disable(name)
    _registered.pop(name, None)


def adapt(name: str, env: Mapping[str, str] | None = None) -> Applied:
    """Apply a plug-in device's adaptors if they are not applied yet; the result can revert them.

    Raises:
        ValueError: a target does not exist, or a switch in the environment is neither 0 nor 1.
    """
    if name not in _applied:
        _applied[name] = enable(_registered[name].adaptors, env)
    return _applied[name]


def applied(name: str) -> Applied | None:
    """Return the adaptors that ``adapt`` has applied for this device; None before that call."""
    return _applied.get(name)


def disable(name: str) -> None:
    """Restore every attribute that ``adapt`` has replaced for this device."""
    if (applied_adaptors := _applied.pop(name, None)) is not None:
        applied_adaptors.disable()


def names() -> tuple[str, ...]:
    """Return the ``--device`` values, except "auto"."""
    return (*BUILT_IN, *_registered)


def registered() -> tuple[Accelerator, ...]:
    """Return all plug-in devices in registration order."""
    return tuple(_registered.values())


def find(name: str) -> Accelerator | None:
    """Look up a plug-in device by name; None for the CPU, CUDA and unknown names."""
    return _registered.get(name)


def load(env: Mapping[str, str] | None = None) -> None:
    """Import the modules in the environment's MEGATRON_ACCELERATOR, a comma-separated list.

    Raises:
        ValueError: a module cannot be imported.
    """
    env = os.environ if env is None else env
    for module in filter(None, env.get(VARIABLE, "").split(",")):
        try:
            importlib.import_module(module.strip())
        except ImportError as error:
            raise ValueError(
                f"the environment variable {VARIABLE} must name importable modules, got {module.strip()!r}: "
                f"{error}. Install the plug-in, or put its folder on PYTHONPATH"
            ) from error


def problem(requested: str) -> str | None:
    """Return the error message for an unknown ``--device`` value, or None."""
    accepted = ("auto", *names())
    if requested in accepted:
        return None
    return (
        f"--device must be {', '.join(accepted[:-1])} or {accepted[-1]}, got {requested}. Load the plug-in of "
        f'another accelerator by "import megatron_accelerator_{requested}" in the script, or '
        f"{VARIABLE}=megatron_accelerator_{requested} in the environment"
    )
