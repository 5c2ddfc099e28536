"""Layouts: several ranks on the one GPU over gloo, and NCCL itself, each against one process on the same GPU.

Every case is one start of tools/check_layout.py: the same seed, tokens and global batch in one process and in the
layout; losses, gradient norm and every gradient must agree within the tool's bounds. Ranks that share a GPU send
through the host (tds/p2p/host_copies.py), which shows their numbers and no speed. What the one process shows is kept
for all cases of one model and number format. NCCL has one rank here, and as many as there are GPUs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, Case, Machine, Part, Skip, python

LIMIT_S, DRY_LIMIT_S = 240.0, 900.0
"""Of a case: starts of Python, three cases at once; the dry form runs beside other tests."""
MICRO_BATCHES = 4
"""Of a step, over all replicas."""
SIZES = {
    "gpt2": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --batch-size 2 --steps 5",
    "t5": "--model t5 --num-layers 2 --hidden-size 256 --num-attention-heads 4 --enc-seq-length 128 --steps 5",
}
TOY_SIZES = {
    "gpt2": "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --batch-size 1 --steps 2",
    "t5": "--model t5 --num-layers 2 --hidden-size 16 --num-attention-heads 4 --enc-seq-length 16 --steps 2",
}
TENSOR, PIPE, DATA = "--model-parallel-size 2", "--pipe-parallel-size 2", "--data-parallel-size 2"
LAYOUTS = {
    "gpt2 fp64 tp 2": TENSOR,
    "gpt2 fp64 pp 2, 1f1b": PIPE,
    "gpt2 fp64 dp 2": DATA,
    "gpt2 fp64 tp 2 x pp 2": f"{TENSOR} {PIPE}",
    "gpt2 fp64 dp 2, ZeRO 1": f"{DATA} --zero-stage 1",
    "gpt2 fp64 dp 2, ZeRO 2": f"{DATA} --zero-stage 2",
    "gpt2 fp64 dp 2, ZeRO 3": f"{DATA} --zero-stage 3",
    "gpt2 fp64 pp 2, gpipe": f"{PIPE} --pipeline-schedule gpipe",
    "gpt2 fp64 pp 2, zb-h1": f"{PIPE} --pipeline-schedule zb-h1",
    "gpt2 fp64 pp 2, interleaved": f"{PIPE} --pipeline-chunks 2",
    "gpt2 fp64 pp 2, zb-h1 with chunks": f"{PIPE} --pipeline-chunks 2 --pipeline-schedule zb-h1",
    "gpt2 fp32 tp 2 x pp 2": f"{TENSOR} {PIPE}",
    "gpt2 fp32 dp 2, ZeRO 3": f"{DATA} --zero-stage 3",
    "t5 fp64 tp 2 x pp 2": f"{TENSOR} {PIPE}",
    "gpt2 fp64 tp 2 x pp 2 x dp 2": f"{TENSOR} {PIPE} {DATA}",
}
"""By name, which begins with the model and the number format."""
ALL_GPUS = {"tp": "--model-parallel-size", "pp": "--pipe-parallel-size", "dp": "--data-parallel-size"}


def cases(machine: Machine) -> Sequence[Case]:
    """Return one process, every layout over gloo, and NCCL."""
    limit_s = DRY_LIMIT_S if machine.is_dry else LIMIT_S
    made = [Case("gpt2 fp64 one process twice", _one_process, limit_s)]
    made += [Case(name, _layout(name, layout), limit_s) for name, layout in LAYOUTS.items()]
    made.append(Case("nccl, one rank", _nccl_alone))
    made += [Case(f"nccl, {axis} over all GPUs", _nccl_over_all(axis), limit_s) for axis in ALL_GPUS]
    return made


def _one_process(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    told = _reference(machine, "gpt2", "fp64")[1]
    return f"a second start against the first: {_text(told)}", _figures(told)


def _layout(name: str, layout: str) -> Callable[[Machine, Path], tuple[str, dict[str, Any]]]:
    model, dtype, _ = name.split(" ", 2)

    def run(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        reference, _ = _reference(machine, model, dtype)
        told = _compare(machine, folder, model, dtype, f"{layout} --distributed-backend gloo", reference)
        return f"{told['ranks']} ranks over gloo against one process: {_text(told)}", _figures(told)

    return run


def _nccl_over_all(axis: str) -> Callable[[Machine, Path], tuple[str, dict[str, Any]]]:
    def run(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        _needs_nccl(machine)
        number = machine.num_devices
        if number < 2:
            raise Skip("NCCL gives each rank a GPU of its own; there is one GPU")
        heads = number * -(-4 // number)
        sizes = f"--num-layers {heads} --num-attention-heads {heads} --hidden-size {64 * heads}"
        micro = f"--gas {number}" if axis != "dp" else "--gas 1"
        layout = f"{sizes} {micro} {ALL_GPUS[axis]} {number} --distributed-backend nccl"
        told = _compare(machine, folder, "gpt2", "fp64", layout)
        return f"{number} GPUs against one process: {_text(told)}", _figures(told)

    return run


def _nccl_alone(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    _needs_nccl(machine)
    told = python(machine, "-m", "benchmarks.gpu.layouts").check().text
    return told.splitlines()[-1], {}


def _needs_nccl(machine: Machine) -> None:
    if machine.kind != "cuda":
        raise Skip("NCCL needs a GPU")


def _reference(machine: Machine, model: str, dtype: str) -> tuple[Path, dict[str, Any]]:
    """Return the kept numbers of one process, and how a second start of it compared; made by whoever asks first."""

    def make() -> tuple[Path, dict[str, Any]]:
        machine.work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"one-{model}-{dtype}-", dir=machine.work))
        return folder / "trace", _compare(machine, folder, model, dtype, "", folder / "trace")

    return machine.once(f"layouts {model} {dtype}", make)


def _compare(
    machine: Machine, folder: Path, model: str, dtype: str, layout: str, reference: Path | None = None
) -> dict[str, Any]:
    """Return what tools/check_layout.py found.

    Raises:
        AssertionError: it broke, or the layout is not equal to one process.
    """
    words = [*(TOY_SIZES if machine.is_dry else SIZES)[model].split(), "--device", machine.kind]
    if "--gas" not in layout:
        words += ["--gas", str(MICRO_BATCHES // (2 if DATA in layout else 1))]
    words += [*layout.split(), *(["--fp32"] if dtype == "fp32" else [])]
    words += ["--json", str(folder / "seen.json"), *(["--reference", str(reference)] if reference else [])]
    done = python(machine, str(ROOT / "tools" / "check_layout.py"), *words)
    if not (folder / "seen.json").exists():
        done.check()
    told: dict[str, Any] = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    assert told["is_equal"], f"not equal to one process: {_text(told)}"
    done.check()
    return told


def _text(told: dict[str, Any]) -> str:
    """Return what was seen beside what is allowed, in a line."""
    seen = told["seen"]
    names = {"loss": "losses", "first_norm": "gradient norm", "gradient": f"worst gradient ({told['worst']})"}
    return ", ".join(
        f"{text} {seen[name]['observed']:.1e} (allowed {seen[name]['allowed']:.0e})" for name, text in names.items()
    )


def _figures(told: dict[str, Any]) -> dict[str, Any]:
    return {"ranks": told["ranks"], **{name: one["observed"] for name, one in told["seen"].items()}}


def try_nccl() -> str:
    """Return a line on NCCL with this process as its one rank: every collective of the project, on the GPU.

    Raises:
        AssertionError: one gave other numbers.
    """
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    given = torch.randn(64, 32, dtype=torch.float64, device="cuda")
    wanted = given.clone()
    operations: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda out: dist.all_reduce(out.copy_(given)),
        "broadcast": lambda out: dist.broadcast(out.copy_(given), 0),
        "all_gather": lambda out: dist.all_gather([out], given),
        "all_gather_into_tensor": lambda out: dist.all_gather_into_tensor(out, given),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, [given]),
        "reduce_scatter_tensor": lambda out: dist.reduce_scatter_tensor(out, given),
        "all_to_all_single": lambda out: dist.all_to_all_single(out, given),
        "reduce": lambda out: dist.reduce(out.copy_(given), 0),
    }
    for name, operation in operations.items():
        out = torch.zeros_like(given)
        operation(out)
        assert torch.equal(out, wanted), f"{name} over NCCL must give back what one rank gave"
    dist.barrier()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    dist.destroy_process_group()
    return f"NCCL {version} with one rank: {', '.join(operations)} give back what was given"


PART = Part("layouts", "every layout against one process, several ranks on one GPU over gloo", cases, 300.0, at_once=3)

if __name__ == "__main__":
    print(try_nccl())
    sys.exit(0)
