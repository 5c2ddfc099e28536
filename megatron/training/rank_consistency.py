"""Check that all ranks run the same code, versions, arguments and devices.

Without this check, a difference causes an error much later, or none: two layer versions would train silently.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import Config
from megatron.device import identity
from megatron.errors import ConfigError
from megatron.mpu.groups import Grid
from megatron.runtime.rendezvous import format_ranks

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("torch", "triton", "deepspeed", "numpy", "tokenizers", "sentencepiece")
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "DISABLE_ADAPTOR", "DS_ACCELERATOR", "ENABLE_DEEPSPEED_ADAPTOR",
    "ENABLE_MEGATRON_ADAPTOR", "ENABLE_TORCH_ADAPTOR", "MEGATRON_ACCELERATOR", "MEGATRON_TEXT_VOCABULARY", "NCCL_ALGO",
    "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Environment variables that affect results or communication. Names of network devices may differ between nodes."""
DEVICE_VARIABLES = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
"""Environment variables that determine the GPU of a rank."""
MAX_ROWS = 20
_PER_RANK_ARGUMENTS = ("run.local_rank",)


def check_ranks_identical(config: Config, grid: Grid) -> None:
    """Check that code, versions, arguments and environment are the same on all ranks. Collective.

    The check detects faults I05 and I06 of docs/reliability.md.

    Raises:
        ConfigError: they differ; the message lists the differences by rank and is the same on every rank.
    """
    if grid.world.size == 1:
        return
    local_facts = collect_facts(config)
    common = sorted((name, value) for name, value in local_facts.items() if not name.startswith("code"))
    digest = hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]
    # 100 bytes per rank; details are sent only after a mismatch.
    digests = grid.host.gather_objects((digest, local_facts.get("code")))
    if len({digest for digest, _ in digests}) == 1 and len({code for _, code in digests if code is not None}) == 1:
        return
    rows = list(differences(grid.host.gather_objects(local_facts)))
    listed_rows = rows[:MAX_ROWS] + ([f"and {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else [])
    raise ConfigError(
        "all ranks must run the same code with the same versions, arguments and environment; they differ in\n  "
        + "\n  ".join(listed_rows)
        + "\nStart every node with the same command, files and versions."
    )


def compare_devices(torch_device: torch.device, grid: Grid) -> None:
    """Check that no two ranks share a GPU, and that the GPU models are compatible. Collective.

    NCCL also rejects two ranks on one GPU, but late and only on some ranks. Different GPU models round differently:
    this is an error within a replica, and a warning between replicas.

    Raises:
        ConfigError: two ranks share a GPU, or a replica has different GPU models; the same on every rank. The message
            names the ranks and, for a shared GPU, the variables that select it.
    """
    if torch_device.type == "cpu" or grid.world.size == 1 or dist.get_backend() != "nccl":
        return
    device_variables = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in DEVICE_VARIABLES)
    ranks_by_gpu: dict[tuple[str, str], dict[int, str]] = {}
    devices = grid.host.gather_objects(
        (gethostname(), identity(torch_device), device_variables, device.model_name(torch_device))
    )
    _compare_gpu_models([gpu_model for *_, gpu_model in devices], grid)
    for rank, (host, device_id, variables_text, _) in enumerate(devices):
        if device_id:
            ranks_by_gpu.setdefault((host, device_id), {})[rank] = variables_text
    shared_gpus = {gpu: ranks for gpu, ranks in ranks_by_gpu.items() if len(ranks) > 1}
    if not shared_gpus:
        return
    rows = [
        f"{gpu} of {host}: " + "; ".join(f"rank {rank} ({variables_text})" for rank, variables_text in ranks.items())
        for (host, gpu), ranks in shared_gpus.items()
    ]
    raise ConfigError(
        "each rank must have a separate GPU, got several ranks on one:\n  "
        + "\n  ".join(rows[:MAX_ROWS])
        + "\nStart as many ranks on each host as it has GPUs, each with a distinct LOCAL_RANK. LOCAL_RANK=0 for all is "
        "correct only if CUDA_VISIBLE_DEVICES selects a different GPU for each. If speed does not matter, ranks may "
        "share a GPU with --distributed-backend gloo."
    )


def _compare_gpu_models(gpu_models: Sequence[str], grid: Grid) -> None:
    """Raise if a replica has different GPU models; warn if replicas differ."""
    if len(set(gpu_models)) == 1:
        return
    ranks_by_model = {
        gpu_model: format_ranks([rank for rank, model in enumerate(gpu_models) if model == gpu_model])
        for gpu_model in set(gpu_models)
    }
    models_text = "; ".join(f"{gpu_model} on rank {ranks}" for gpu_model, ranks in sorted(ranks_by_model.items()))
    for ranks in grid.topology.groups("pipe", "context", "tensor"):
        if len({gpu_models[rank] for rank in ranks}) > 1:
            raise ConfigError(
                f"the ranks of a replica must have the same GPU model, got {models_text}: other kernels would round "
                f"differently, and copies of a weight would diverge (ranks {format_ranks(ranks)}). Start them on hosts "
                "with the same GPU model"
            )
    if grid.world.rank == 0:
        log.warning(f"replicas have different GPU models, and the slowest limits the speed: {models_text}")


def collect_facts(config: Config) -> dict[str, str]:
    """Collect facts (name -> value) that must be equal on all ranks. Only local rank 0 reads the code."""
    values = {
        f"arguments: {name}": value for name, value in _flatten(config.to_dict()) if name not in _PER_RANK_ARGUMENTS
    }
    values |= {f"version: {name}": _package_version(name) for name in VERSIONS} | {
        "version: python": platform.python_version()
    }
    values |= {f"version: {name}": value for name, value in device.versions().items()}
    values |= {f"environment: {name}": os.environ.get(name, "unset") for name in VARIABLES}
    json_file = config.run.deepspeed_config
    if json_file:
        values["file: --deepspeed_config"] = f"crc {zlib.crc32(Path(json_file).read_bytes()):08x}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        values |= {"code": f"crc {code_checksum():08x}", "code: git commit": git_commit(ROOT)}
    return values


def differences(facts_by_rank: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a row with values and ranks for each fact that differs between ranks."""
    for name in sorted({name for facts_of_rank in facts_by_rank for name in facts_of_rank}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts_of_rank in enumerate(facts_by_rank):
            if name in facts_of_rank or not name.startswith("code"):
                ranks_by_value.setdefault(facts_of_rank.get(name, "none"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = (f"{value} on rank {format_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            yield f"{name}: {'; '.join(values)}"


def code_checksum(root: Path = ROOT, script: str | None = None) -> int:
    """Compute a checksum over names and contents of all code files and a script.

    Args:
        script: script path; None: the running script; "": no script.
    """
    files = [*sorted((root / "megatron").rglob("*.py")), *sorted((root / "tds").rglob("*.py"))]
    checksum = 0
    for path in files:
        checksum = zlib.crc32(f"{path.relative_to(root)}\0".encode() + path.read_bytes(), checksum)
    script_path = Path(sys.argv[0] if script is None else script)
    return zlib.crc32(script_path.read_bytes(), checksum) if script_path.is_file() else checksum


def git_commit(root: Path) -> str:
    """Read the commit checked out in ``root`` from git's files, or return "unknown"."""
    try:
        head = (root / ".git" / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        reference = head.removeprefix("ref: ")
        loose = root / ".git" / reference
        if loose.is_file():
            return loose.read_text().strip()
        packed = (root / ".git" / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {reference}")), "unknown")
    except OSError:
        return "unknown"


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
