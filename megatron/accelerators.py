"""The kinds of devices that ``--device`` may name: the CPU, CUDA, and what plug-ins register.

A plug-in is a module, ``megatron_accelerator_X`` by convention, that calls ``register`` when it is imported: by a line
in the user's script, or by ``MEGATRON_ACCELERATOR=megatron_accelerator_X`` in the environment. Nothing is looked for
among installed packages: what is installed must not change what a run computes. Here is no torch, so that the command
line can be checked without it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.adaptors import Adaptor, Applied, enable

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
