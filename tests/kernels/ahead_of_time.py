"""Compilation of the project's Triton kernels for NVIDIA GPUs without one, and the resources that ptxas reports.

``python -m tests.kernels.ahead_of_time`` prints a table of all kernels. Triton's compiler takes a target, and its wheel
contains ptxas.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import triton_launch
from tests.kernels.launches import CASES, Launch, record

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities: A100, H100, B200."""
POINTER_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel: per thread, except shared memory, which is per program."""

    num_warps: int
    num_registers: int
    shared_bytes: int
    stack_bytes: int
    spilled_bytes: int
    num_narrow_accesses: int
    """Instructions that access global memory with less than 4 bytes per thread, of which a warp has no full line."""


def architectures_of(launch: Launch) -> tuple[int, ...]:
    """Return the ``ARCHITECTURES`` that have the number formats of ``launch``; an A100 has no FP8."""
    has_fp8 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn for arg in launch.args)
    return tuple(architecture for architecture in ARCHITECTURES if architecture >= 89 or not has_fp8)


def compile_launch(launch: Launch, architecture: int) -> Resources:
    """Compile the kernel that Triton would compile on a GPU of compute capability ``architecture`` for ``launch``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    kernel = triton_launch.find_kernel(launch.kernel)
    signature, constants, attributes = specialize(kernel, launch)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: launch.options[name] for name in LAUNCH_OPTIONS if name in launch.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    suffix = "a" if architecture >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        command = [get_ptxas(architecture).path, "-v", f"-arch=sm_{architecture}{suffix}", path, "-o", f"{path}.cubin"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    accesses = re.findall(r"\b(?:ld|st)\.global[.\w]*?(?:\.v(\d))?\.[bfsu](\d+)\b", compiled.asm["ptx"])
    assert accesses, "the PTX has no access to global memory"
    num_narrow = sum(int(length or 1) * int(bits) < 32 for length, bits in accesses)
    return parse_resources(result.stderr, compiled.metadata.num_warps, compiled.metadata.shared, num_narrow)


def specialize(kernel: Any, launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Return signature, constants and attributes of the arguments, as Triton derives them at a launch.

    An integer 1 is a constant, and multiples of 16 (integers and addresses) are known to the compiler.
    """
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, launch.args, strict=False))
    values.update((name, value) for name, value in launch.options.items() if name in kernel.arg_names)
    for parameter in kernel.params:
        name, value, idx = parameter.name, values[parameter.name], parameter.num
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
            continue
        is_multiple = False
        if isinstance(value, torch.Tensor):
            signature[name] = POINTER_TYPES[value.dtype]
            is_multiple = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            is_multiple = value % 16 == 0 and not parameter.do_not_specialize_on_alignment
        if is_multiple and not parameter.do_not_specialize:
            attributes[idx,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def parse_resources(output: str, num_warps: int, shared_bytes: int, num_narrow_accesses: int) -> Resources:
    """Return the resources that ``ptxas -v`` has written to ``output``."""

    def number(pattern: str) -> int:
        match = re.search(pattern, output)
        assert match is not None, f"ptxas -v has not printed {pattern!r}:\n{output}"
        return int(match[1])

    return Resources(
        num_warps=num_warps,
        num_registers=number(r"Used (\d+) registers"),
        shared_bytes=shared_bytes,
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spilled_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        num_narrow_accesses=num_narrow_accesses,
    )


def table_rows() -> Iterator[str]:
    """Yield the rows of a Markdown table: kernel, case, and resources for each architecture."""
    yield (
        "| kernel | case | warps | "
        + " | ".join(f"registers, sm_{arch}" for arch in ARCHITECTURES)
        + " | shared memory, bytes | spills, bytes | accesses below 4 bytes |"
    )
    yield "|" + "---|" * (6 + len(ARCHITECTURES))
    for case, function in CASES.items():
        for launch in record(function):
            architectures = architectures_of(launch)
            resources = [compile_launch(launch, architecture) for architecture in architectures]
            counts = ["none"] * (len(ARCHITECTURES) - len(architectures)) + [str(r.num_registers) for r in resources]
            registers = " | ".join(counts)
            shared, spills = max(r.shared_bytes for r in resources), max(r.spilled_bytes for r in resources)
            name = launch.kernel.partition(":")[2]
            narrow = max(r.num_narrow_accesses for r in resources)
            yield f"| {name} | {case} | {resources[0].num_warps} | {registers} | {shared} | {spills} | {narrow} |"


if __name__ == "__main__":
    for row in table_rows():
        print(row, flush=True)
