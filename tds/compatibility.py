"""What must hold before DeepSpeed is used: its version, and that nothing is compiled for a CPU."""

from __future__ import annotations

from importlib import metadata

OLDEST = (0, 19, 6)
BELOW = (0, 20)


def check_versions(installed: str | None = None) -> None:
    """Do nothing if DeepSpeed's version is one that tds was written against.

    Raises:
        ImportError: it is older or newer.
    """
    if installed is None:
        try:
            installed = metadata.version("deepspeed")
        except metadata.PackageNotFoundError as missing:
            raise ImportError(
                "tds needs deepspeed, which is not installed: pip install 'deepspeed>=0.19.6,<0.20'"
            ) from missing
    numbers = []
    for part in installed.split("+")[0].split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    version = tuple(numbers)
    if version < OLDEST or version >= BELOW:
        raise ImportError(
            f"tds needs deepspeed >=0.19.6,<0.20, got {installed}: it builds on private parts of the engine that "
            "change between versions. pip install 'deepspeed>=0.19.6,<0.20'"
        )


def spare_the_compiler() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce at start on a CPU (35 s, and needs g++).

    Where DeepSpeed has not asked yet which of its operations can be compiled, it never does: that runs a compiler and
    imports setuptools, and all it would learn is about this one.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
