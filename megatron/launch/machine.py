"""Detection of this machine's devices without importing torch, and defaults for variables of the run scripts.

``python -m megatron.launch.machine`` prints shell assignments for GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR,
MASTER_PORT, pp_size and mp_size, and for LAUNCH_FLAGS. Values set by the user are never changed.

| usable GPUs | GPUS_PER_NODE | pp_size x mp_size |
|---|---|---|
| none | 4 processes on the CPU | 2 x 2 |
| 1 | 1 | 1 x 1 |
| 2, 3 | 2 | 2 x 1 |
| 4 or more | the largest multiple of 4 | 2 x 2 |

With cp_size above 1 (default 1), the row for the number of GPUs divided by cp_size applies.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron import log
from megatron.errors import ConfigError

CPU_PROCESSES = 4
VARIABLE_NAMES = ("GPUS_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "pp_size", "mp_size")
PRELOADED_MODULES = (
    "torch",
    "deepspeed",
    "torch._inductor.codecache",
    "torch.distributed.checkpoint",
    "torch.utils.cpp_extension",
    "megatron.training.startup",
    "megatron.training.initialize",
    "megatron.training.setup",
    "megatron.training.run_callbacks",
    "megatron.training.run_lock",
    "megatron.training.start_table",
    "megatron.training.callbacks.checkpointer",
    "megatron.training.callbacks.console",
    "megatron.training.callbacks.run_description",
    "megatron.training.callbacks.stability_guard",
    "megatron.training.callbacks.replica_check",
    "megatron.training.callbacks.precision_speed",
    "megatron.training.callbacks.straggler",
    "megatron.training.callbacks.heartbeat",
    "megatron.models.common.decoder",
    "megatron.models.common.pipeline",
    "megatron.data.gpt_dataset",
)
"""Modules imported before ranks on a CPU are forked. Optimizers and causal attention import the compiler's modules."""


def count_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Count the GPUs that a rank started with ``env`` could use; 0 means training on the CPU.

    MEGATRON_NUM_GPUS overrides the count, for machines whose driver does not report it.

    Raises:
        ConfigError: MEGATRON_NUM_GPUS is not a number.
    """
    if env.get("DS_ACCELERATOR") == "cpu":
        return 0
    if env.get("MEGATRON_NUM_GPUS"):
        return _parse_number("MEGATRON_NUM_GPUS", env["MEGATRON_NUM_GPUS"])
    visible_devices = env.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and (not visible_devices.strip() or visible_devices.strip().startswith("-1")):
        return 0
    num_present = _nvidia_gpus()
    if not num_present or not _torch_has_cuda():
        return 0
    return min(num_present, len(visible_devices.split(","))) if visible_devices is not None else num_present


def _nvidia_gpus() -> int:
    """Count NVIDIA GPUs with nvidia-smi or from device files."""
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            output = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
            return len(re.findall(r"^GPU ", output, re.M))
        except (OSError, subprocess.SubprocessError):
            pass
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _torch_has_cuda() -> bool:
    """Return True if torch was built with CUDA, according to its version file; importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    return bool(re.search(r"^cuda\b.*=\s*['\"]\d", version.read_text(), re.M)) if version.is_file() else False


def num_cores() -> int:
    """Count the cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(num_ranks: int) -> int:
    """Divide this process's cores among the ranks of a node; at least 1 OpenMP thread per rank."""
    return max(1, num_cores() // num_ranks)


def crowding_warning(num_ranks: int) -> str | None:
    """Return a warning if this machine has many more ranks than cores, or None."""
    cores = num_cores()
    if num_ranks <= max(CPU_PROCESSES, 2 * cores):
        return None
    return (
        f"{num_ranks} ranks share {cores} core{'' if cores == 1 else 's'}: steps are slow, and timeouts may expire. "
        f"Start at most {max(CPU_PROCESSES, 2 * cores)} ranks on this node (--nproc-per-node; in the run scripts "
        "GPUS_PER_NODE, or a smaller pp_size x mp_size)"
    )


def resolve(env: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return a value for each of ``VARIABLE_NAMES``: the user's, otherwise SLURM's, otherwise the default.

    Raises:
        ConfigError: a value is not a number, or the devices do not fit pp_size x mp_size.
    """
    values = {name: env[name] for name in VARIABLE_NAMES if env.get(name)}
    for name, value in from_slurm(env).items():
        values.setdefault(name, value)
    has_address = "MASTER_ADDR" in values
    for name, value in (("NNODES", "1"), ("NODE_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        values.setdefault(name, value)
    is_elastic = ":" in values["NNODES"]  # MIN:MAX: the flags apply to MAX nodes
    numeric = {**values, "NNODES": values["NNODES"].partition(":")[2]} if is_elastic else values
    numbers = {name: _parse_number(name, value) for name, value in numeric.items() if name != "MASTER_ADDR"}
    if numbers["NNODES"] > 1 and not has_address and not is_elastic:
        raise ConfigError(
            f"NNODES={numbers['NNODES']} needs MASTER_ADDR, the host name under which the other nodes reach node 0. "
            "Set MASTER_ADDR to the same host on every node (127.0.0.1 if all are on this machine)."
        )
    numbers |= _resolve_layout(numbers, gpus, _parse_number("cp_size", env.get("cp_size") or "1"))
    return {name: values.get(name, str(numbers.get(name))) for name in VARIABLE_NAMES}


def _resolve_layout(numbers: Mapping[str, int], gpus: int, context: int) -> dict[str, int]:
    """Return matching values of GPUS_PER_NODE, pp_size and mp_size for cp_size; values set by the user are kept."""
    nodes = numbers["NNODES"]
    devices = numbers.get("GPUS_PER_NODE") or gpus or CPU_PROCESSES
    if gpus and devices > gpus:
        raise ConfigError(
            f"GPUS_PER_NODE must not exceed the GPUs of this node, got GPUS_PER_NODE={devices} and {gpus} GPU(s). "
            "Lower it, or train on the CPU with DS_ACCELERATOR=cpu."
        )
    pipe, tensor = _default_split(numbers, devices // context)
    product = max(pipe, 1) * tensor * context
    if "GPUS_PER_NODE" in numbers:
        per_node = devices
    elif not gpus:
        per_node = _fit_devices(max(devices, -(-product // nodes)), nodes, product, upwards=product > devices * nodes)
    else:
        per_node = _fit_devices(devices, nodes, product, upwards=False)
    if per_node == 0 or per_node * nodes % product:
        flag_text, got_text, factor_text = (
            (" x cp_size", f", cp_size={context}", f" x {context}") if context > 1 else ("", "", "")
        )
        raise ConfigError(
            f"GPUS_PER_NODE x NNODES must be a multiple of pp_size x mp_size{flag_text}, got "
            f"GPUS_PER_NODE={per_node or devices}, NNODES={nodes}, pp_size={pipe}, mp_size={tensor}{got_text} "
            f"({per_node or devices} x {nodes} = {(per_node or devices) * nodes} devices, {max(pipe, 1)} x {tensor}"
            f"{factor_text} = {product} required). Lower pp_size or mp_size, or use more devices."
        )
    return {"GPUS_PER_NODE": per_node, "pp_size": pipe, "mp_size": tensor}


def _default_split(numbers: Mapping[str, int], devices: int) -> tuple[int, int]:
    """Return (pp_size, mp_size): the user's values, otherwise the table's row for this number of devices per node."""
    is_chosen = "GPUS_PER_NODE" in numbers
    pipe, tensor = numbers.get("pp_size"), numbers.get("mp_size")
    if pipe is None and tensor is None:
        if devices >= 4 and not (is_chosen and devices % 4):
            return 2, 2
        return (2, 1) if devices >= 2 and not (is_chosen and devices % 2) else (1, 1)
    fixed = max(pipe if pipe is not None else tensor or 1, 1)
    remaining = devices * numbers["NNODES"] // fixed
    default_size = 2 if remaining >= 2 and devices * numbers["NNODES"] % (2 * fixed) == 0 else 1
    return (pipe if pipe is not None else default_size), (tensor if tensor is not None else default_size)


def _fit_devices(devices: int, nodes: int, product: int, *, upwards: bool) -> int:
    """Return the number of devices per node whose total is a multiple of ``product``; 0 if there is none.

    Args:
        upwards: return the smallest such number that is at least ``devices``; otherwise the largest one that is at most
            ``devices``.
    """
    counts = range(devices, devices + product + 1) if upwards else range(devices, 0, -1)
    return next((count for count in counts if count * nodes % product == 0), 0)


def _parse_number(name: str, value: str) -> int:
    minimum = 0 if name in ("NODE_RANK", "pp_size", "MEGATRON_NUM_GPUS") else 1
    if not re.fullmatch(r"\d+", value) or int(value) < minimum:
        raise ConfigError(f"{name} must be a whole number, at least {minimum}, got {name}={value!r}.")
    return int(value)


def from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Read NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT from SLURM's variables; empty outside SLURM.

    Raises:
        ConfigError: SLURM has started this script more than once on a node.
    """
    if "SLURM_JOB_ID" not in env:
        return {}
    is_step = "SLURM_STEP_ID" in env
    nodes = (is_step and env.get("SLURM_STEP_NUM_NODES")) or env.get("SLURM_NNODES") or env.get("SLURM_JOB_NUM_NODES")
    tasks = env.get("SLURM_STEP_NUM_TASKS") if is_step else None
    if nodes and tasks and int(tasks) > int(nodes):
        raise ConfigError(
            f"SLURM must start the script once per node, got {tasks} tasks on {nodes} node(s). "
            "Start the run script with `srun --ntasks-per-node=1 bash SCRIPT`; it starts the ranks itself."
        )
    hosts = (is_step and env.get("SLURM_STEP_NODELIST")) or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    variables = {
        "NNODES": nodes,
        "NODE_RANK": env.get("SLURM_NODEID"),
        "MASTER_ADDR": first_host(hosts) if hosts else None,
        "MASTER_PORT": str(20000 + int(re.sub(r"\D", "", env["SLURM_JOB_ID"]) or 0) % 20000),
    }
    return {name: value for name, value in variables.items() if value}


def first_host(nodelist: str) -> str:
    """Parse the first host from a list such as ``gpu[003-010,20],login1``."""
    tool = shutil.which("scontrol")
    if tool:
        result = subprocess.run([tool, "show", "hostnames", nodelist], capture_output=True, text=True, check=False)
        if result.returncode == 0 and result.stdout.split():
            return result.stdout.split()[0]
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group(0) if first else nodelist)


def main() -> int:
    """Print the shell assignments for ``eval`` in a run script."""
    try:
        gpus = count_gpus()
        values = resolve(os.environ, gpus)
    except ConfigError as error:
        log.error(f"error: {error}")
        return 2
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    if gpus:
        lines += ["LAUNCH_FLAGS="]
    else:
        lines += [
            "export DS_ACCELERATOR=cpu",
            "export CUDA_VISIBLE_DEVICES=",
            f"LAUNCH_FLAGS='--preload {','.join(PRELOADED_MODULES)}'",
        ]
        if _nvidia_gpus() and os.environ.get("DS_ACCELERATOR") != "cpu":
            log.warning("this machine has a GPU that cannot be used (CPU build of torch, or CUDA_VISIBLE_DEVICES)")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
