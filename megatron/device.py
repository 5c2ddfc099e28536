"""Every device call of the project goes through here, so that another accelerator is one file."""

from __future__ import annotations

import ctypes
import functools
import os

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 2**30


def choose(requested: str = "auto") -> str:
    """Return the device type to use: ``requested``, or "cuda" where there is one, else "cpu".

    DS_ACCELERATOR=cpu, which DeepSpeed reads too, makes "auto" mean the CPU.

    Raises:
        ValueError: "cuda" is requested and no CUDA device can be used.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {requested}")
    if requested == "auto":
        is_cpu_wanted = os.environ.get("DS_ACCELERATOR") == "cpu"
        return "cuda" if torch.cuda.is_available() and not is_cpu_wanted else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda needs a CUDA device and a CUDA build of torch, found none. "
            "Use --device cpu, or install torch for your CUDA version."
        )
    return requested


def bind(kind: str, local_rank: int) -> torch.device:
    """Make device ``local_rank`` of this kind the current one and return it."""
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(kind)


def keep_freed_memory() -> bool:
    """Let glibc keep what this process frees; return whether it will.

    As it comes, glibc gives a freed tensor of some megabytes back to the system, which hands out zeroed pages for the
    next one: a training step on a CPU then spends much of its time there. Where another allocator is in charge, or the
    user has set one of glibc's own variables (``MALLOC_...``), nothing is changed.

    Source: mallopt(3), ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``.
    """
    if any(variable.startswith("MALLOC_") for variable in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_M_TRIM_THRESHOLD, _LARGEST_KEPT), mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)])


def name(kind: str) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name() if kind == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def backend(kind: str) -> str:
    """Return torch.distributed's backend for this kind of device."""
    return "nccl" if kind == "cuda" else "gloo"


def default_precision(kind: str) -> str:
    """Return bf16 on GPUs that have it, fp16 on older ones, fp32 on CPU."""
    if kind != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def synchronize(kind: str) -> None:
    """Wait until all work given to the device is done."""
    if kind == "cuda":
        torch.cuda.synchronize()


def finish_copies(place: torch.device) -> None:
    """Wait until what was given to the current stream of ``place`` is done."""
    if place.type == "cuda":
        torch.cuda.current_stream(place).synchronize()


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Return memory of the host for tensors of ``place``, pinned where copies can then run beside the computation."""
    return torch.empty(shape, dtype=dtype, pin_memory=place.type == "cuda")


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``host_memory``, beside the computation; ``copy_from_host`` waits for it."""
    if source.device.type != "cuda":
        target.copy_(source)
        return
    beside = _copy_stream(source.device)
    beside.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(beside):
        target.copy_(source, non_blocking=True)
    source.record_stream(beside)  # its memory is not given to another before the copy has read it


def copy_from_host(source: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return what ``copy_to_host`` has put into ``source``, on ``place``."""
    if place.type != "cuda":
        return source.clone()
    target = torch.empty(source.shape, dtype=source.dtype, device=place)
    beside, current = _copy_stream(place), torch.cuda.current_stream(place)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        target.copy_(source, non_blocking=True)
    current.wait_stream(beside)
    return target


@functools.cache
def _copy_stream(place: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(place)


def is_busy(place: torch.device) -> bool:
    """Return whether ``place`` still has work: the host is ahead, and waits for it or soon will."""
    if place.type != "cuda":
        return False
    try:
        return not torch.cuda.default_stream(place).query()
    except RuntimeError:  # the device itself has failed
        return False


def seed(value: int) -> None:
    """Seed torch's default generators of the CPU and of all devices."""
    torch.manual_seed(value)


def default_generator(place: torch.device) -> torch.Generator:
    """Return the generator that torch's random functions on ``place`` use."""
    if place.type == "cuda":
        index = place.index if place.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def rng_states(kind: str) -> dict[str, torch.Tensor]:
    """Return the states of the default generators, as byte tensors by device kind."""
    states = {"cpu": torch.get_rng_state()}
    if kind == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what ``rng_states`` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def peak_memory_bytes(kind: str) -> int:
    """Return the most memory that this process has held: the allocator's peak on CUDA, resident size on CPU."""
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory_bytes(kind: str) -> int:
    """Return the memory of the device, or of the node for a CPU."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
