"""initialize_megatron: process groups, grid, all ranks run the same code and flags."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import Config
from megatron.device import identity
from megatron.errors import CheckpointError, ConfigError, PeerError, marked
from megatron.mpu.groups import Grid, Group
from megatron.mpu.initialize import initialize_model_parallel
from megatron.mpu.mappings import all_reduce
from megatron.training.device_setup import backend_of, check_device_fits, configure_device
from megatron.training.failure import fault_of_this_rank
from megatron.training.rendezvous import format_ranks, rendezvous

# Checks right after the ranks have met that all of them run the same thing: code, versions, arguments, environment.
#
# What differs goes wrong much later otherwise, or not at all: two versions of a layer train without a word.

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("torch", "triton", "deepspeed", "numpy", "tokenizers", "sentencepiece")
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "DISABLE_ADAPTOR", "DS_ACCELERATOR", "ENABLE_DEEPSPEED_ADAPTOR",
    "ENABLE_MEGATRON_ADAPTOR", "ENABLE_TORCH_ADAPTOR", "MEGATRON_ACCELERATOR", "MEGATRON_TEXT_VOCABULARY", "NCCL_ALGO",
    "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Of the environment: what changes numbers or what is sent. Names of network devices may differ between nodes."""
DEVICE_VARIABLES = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
"""What decides which GPU a rank takes."""
MOST_ROWS = 20
_OWN = ("run.local_rank",)


def check_ranks_identical(config: Config, grid: Grid) -> None:
    """Raise if ranks differ in what must be the same (rows I05 and I06 of the faults note). Collective.

    Raises:
        ConfigError: with a table of what differs on which ranks; the same on every rank.
    """
    if grid.world.size == 1:
        return
    mine = facts(config)
    common = sorted((name, value) for name, value in mine.items() if not name.startswith("code"))
    digest = hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]
    found = grid.host.gather_objects((digest, mine.get("code")))  # some 100 bytes; all else only if something differs
    if len({digest for digest, _ in found}) == 1 and len({code for _, code in found if code is not None}) == 1:
        return
    rows = list(differences(grid.host.gather_objects(mine)))
    shown = rows[:MOST_ROWS] + ([f"and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else [])
    raise ConfigError(
        "all ranks must run the same code with the same versions, arguments and environment; they differ in\n  "
        + "\n  ".join(shown)
        + "\nStart every node with the same command, files and versions."
    )


def compare_devices(place: torch.device, grid: Grid) -> None:
    """Raise if two ranks have one GPU, which NCCL refuses, but late and on some of the ranks. Collective.

    GPUs of unlike kinds round unlike: within a replica they are refused, over replicas they are named.

    Raises:
        ConfigError: naming the ranks and what made them choose it; the same on every rank.
    """
    if place.type == "cpu" or grid.world.size == 1 or dist.get_backend() != "nccl":
        return
    chosen = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in DEVICE_VARIABLES)
    ranks_of: dict[tuple[str, str], dict[int, str]] = {}
    places = grid.host.gather_objects((gethostname(), identity(place), chosen, device.model_name(place)))
    _compare_kinds([kind for *_, kind in places], grid)
    for rank, (host, device_there, device_name, _) in enumerate(places):
        if device_there:
            ranks_of.setdefault((host, device_there), {})[rank] = device_name
    shared = {which: ranks for which, ranks in ranks_of.items() if len(ranks) > 1}
    if not shared:
        return
    rows = [
        f"{which} of {host}: " + "; ".join(f"rank {rank} ({device_name})" for rank, device_name in ranks.items())
        for (host, which), ranks in shared.items()
    ]
    raise ConfigError(
        "each rank must have a GPU of its own, got several ranks on one:\n  "
        + "\n  ".join(rows[:MOST_ROWS])
        + "\nStart as many ranks on each host as it has GPUs, each with a LOCAL_RANK of its own; LOCAL_RANK=0 for all "
        "is right only where CUDA_VISIBLE_DEVICES names another GPU for each. For numbers only, ranks may share a GPU: "
        "--distributed-backend gloo."
    )


def _compare_kinds(kinds: Sequence[str], grid: Grid) -> None:
    """Raise if the ranks of a replica have GPUs of unlike kinds, and say so if replicas have."""
    if len(set(kinds)) == 1:
        return
    ranks_of = {kind: format_ranks([rank for rank, one in enumerate(kinds) if one == kind]) for kind in set(kinds)}
    named = "; ".join(f"{kind} on rank {ranks}" for kind, ranks in sorted(ranks_of.items()))
    for ranks in grid.topology.groups("pipe", "context", "tensor"):
        if len({kinds[rank] for rank in ranks}) > 1:
            raise ConfigError(
                f"the ranks of a replica must have GPUs of one kind, got {named}: other kernels would round otherwise, "
                f"and copies of a weight drift apart (ranks {format_ranks(ranks)}). Start them on hosts of one kind"
            )
    if grid.world.rank == 0:
        log.warning(f"replicas have GPUs of unlike kinds, and the slowest sets the pace: {named}")


def facts(config: Config) -> dict[str, str]:
    """Return what must be the same on all ranks, by name; the code on the first rank of each machine only."""
    found = {f"arguments: {name}": value for name, value in _flat(config.to_dict()) if name not in _OWN}
    found |= {f"version: {name}": _version(name) for name in VERSIONS} | {"version: python": platform.python_version()}
    found |= {f"version: {name}": value for name, value in device.versions().items()}
    found |= {f"environment: {name}": os.environ.get(name, "unset") for name in VARIABLES}
    json_file = config.run.deepspeed_config
    if json_file:
        found["file: --deepspeed_config"] = f"crc {zlib.crc32(Path(json_file).read_bytes()):08x}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        found |= {"code": f"crc {code_checksum():08x}", "code: git commit": commit(ROOT)}
    return found


def differences(everyone: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a row for each fact that is not the same on all ranks that have it: the values, with their ranks."""
    for name in sorted({name for one in everyone for name in one}):
        ranks_of: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            if name in one or not name.startswith("code"):
                ranks_of.setdefault(one.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{value} on rank {format_ranks(ranks)}" for value, ranks in ranks_of.items())
            yield f"{name}: {'; '.join(values)}"


def code_checksum(root: Path = ROOT) -> int:
    """Return a checksum over the names and contents of the code and of the script that runs."""
    files = [*sorted((root / "megatron").rglob("*.py")), *sorted((root / "tds").rglob("*.py"))]
    checksum = 0
    for path in files:
        checksum = zlib.crc32(f"{path.relative_to(root)}\0".encode() + path.read_bytes(), checksum)
    script = Path(sys.argv[0])
    return zlib.crc32(script.read_bytes(), checksum) if script.is_file() else checksum


def commit(root: Path) -> str:
    """Return the commit that is checked out in ``root``, or "unknown"; read from git's files, which is quick."""
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


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


# From a started process to a grid of ranks that is known to work.

MOST_MESHED = 128
"""Ranks of a job up to which gloo connects each with each as soon as a group is made."""

MOST_QUEUES = "32"
"""Of CUDA_DEVICE_MAX_CONNECTIONS."""
ALLOCATOR = "expandable_segments:True,pinned_max_round_threshold_mb:64"
"""Of PYTORCH_ALLOC_CONF."""


@dataclass(frozen=True)
class World:
    """This rank's device and grid."""

    kind: str
    device: torch.device
    grid: Grid
    local_rank: int
    loss_stage: int | None = None  # None: the last

    @property
    def rank(self) -> int:
        return self.grid.rank

    @property
    def reads_data(self) -> bool:
        """Whether this rank opens the corpus: the first tensor rank of the first stage and of that of the loss.

        The ranks of a context group read the same samples, each for its own pieces.
        """
        of_loss = self.grid.pipe.size - 1 if self.loss_stage is None else self.loss_stage
        return self.grid.tensor.rank == 0 and self.grid.pipe.rank in (0, of_loss)

    @property
    def decision_group(self) -> tuple[Group, torch.device]:
        """All ranks, and where the numbers lie on which they agree that each host knows by itself.

        Those of a device would make the host wait for its work. On a CPU the group is the one whose time limit is a
        step's.
        """
        on_host = torch.device("cpu")
        return (self.grid.world if self.device == on_host else self.grid.host), on_host

    def any(self, wishes: Sequence[bool]) -> list[bool]:
        """Return, for each of this rank's ``wishes``, whether any rank has it. Collective."""
        group, place = self.decision_group
        votes = torch.tensor(wishes, dtype=torch.float32, device=place)
        return [vote > 0 for vote in all_reduce(votes, group, dist.ReduceOp.MAX).tolist()]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.grid.host.size > 1:
            dist.barrier(group=self.grid.host.handle)

    @property
    def name(self) -> str:
        """This rank in words, for messages."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return any rank in words."""
        place = self.grid.topology.coordinate(rank)
        context = f", context {place.context}" if self.grid.topology.context > 1 else ""
        return f"rank {rank} (stage {place.pipe}, tensor {place.tensor}, data {place.data}{context})"


def start(config: Config, signal_name: Callable[[], str | None] = lambda: None) -> World:
    """Form the process groups, choose the device, and check that all ranks run the same thing. Collective.

    Args:
        signal_name: returns the signal that has asked this process to stop, or None.

    Raises:
        ConfigError: the device or backend cannot be used, or ranks differ in code, versions or arguments, or share a
            number or a GPU.
        PeerError: not all ranks came.
        StopRequest: asked to stop while others were missing.
    """
    give_queues(has_pipeline=config.parallel.has_pipeline, tensor_size=config.parallel.model_parallel_size)
    let_memory_grow()
    connect_as_needed()
    kind = configure_device(config)
    check_device_fits(config, kind)
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(config.run.local_rank or 0)))
    asked = config.parallel.distributed_backend
    is_through_host = asked == "gloo" and kind != "cpu"  # gloo does not send what lies on a device
    place = _bind(kind, _shared_device(kind, local_rank) if is_through_host else local_rank)
    if kind == "cpu":
        device.keep_freed_memory()
    timeout = timedelta(seconds=config.parallel.phase_timeout_s)  # Phases sets that of a step once there is one
    backend = _backend(asked, kind, is_through_host=is_through_host)
    _init_process_group(backend, kind, timeout, signal_name)
    parallel = config.parallel
    sizes = parallel.model_parallel_size, parallel.pipe_parallel_size
    beside = parallel.context_parallel_size, parallel.expert_model_parallel_size if config.model.num_experts else 1
    grid = initialize_model_parallel(*sizes, place, timeout, *beside)
    world = World(kind=kind, device=place, grid=grid, local_rank=local_rank, loss_stage=config.parallel.loss_stage)
    compare_devices(place, grid)
    _touch_every_group(grid, place)
    check_ranks_identical(config, grid)
    device.seed(config.run.seed)
    return world


def give_queues(*, has_pipeline: bool, tensor_size: int = 1) -> None:
    """Give the streams of a pipeline, if it is on GPUs, a queue each; ahead of whatever asks for a device.

    With CUDA's 8 for all of them the work of a stage may lie behind a receive that waits. Tensor ranks without a
    pipeline get one for all: kernels start in the order of their calls, so that a sum starts ahead of the product that
    hides it. What the user says holds.
    """
    if has_pipeline:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MOST_QUEUES)
    elif tensor_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def let_memory_grow() -> None:
    """Let torch's allocators grow what they hold rather than hold pieces; ahead of whatever asks for a device.

    Pinned memory is rounded up to a power of two below 64 MiB alone: main params on the host would take up to twice
    their bytes. What the user says, by the newer or the older name of the variable, holds.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        is_known = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
        os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATOR if is_known else ALLOCATOR.partition(",")[0]


def connect_as_needed() -> None:
    """Let gloo connect two ranks at their first message, in a job of many ranks; ahead of the first group.

    For a mesh every rank reads from the store what every other one wrote, a number for each rank in it: at 10,000 ranks
    2e8 messages and 8e12 bytes, and 10,000 connections of each rank. What the user says holds.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > MOST_MESHED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def stop() -> None:
    """Leave the process groups together: no rank ends while another still works. Collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _backend(asked: str | None, kind: str, *, is_through_host: bool) -> str:
    """Return torch.distributed's backend."""
    if not is_through_host:
        return asked or backend_of(kind)
    from tds.p2p import host_copies

    host_copies.register()
    return host_copies.NAME


def _shared_device(kind: str, local_rank: int) -> int:
    """Return the number of this rank's device where a host may have more ranks than devices: they take them in turn."""
    number, ranks = device.count(kind), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < number < ranks:
        return local_rank
    if os.environ.get("RANK") == "0":
        log.info(f"{ranks} ranks share {number} {kind} device{'' if number == 1 else 's'} on this host")
    os.environ["LOCAL_RANK"] = str(local_rank % number)  # by which DeepSpeed takes its device
    return local_rank % number


def _bind(kind: str, local_rank: int) -> torch.device:
    try:
        return device.bind(kind, local_rank)
    except ValueError as error:
        with marked(is_of_this_rank=True):  # the ranks with a device wait for this one
            raise ConfigError(str(error)) from None


def _init_process_group(
    backend: str, kind: str, timeout: timedelta, signal_name: Callable[[], str | None] = lambda: None
) -> None:
    if dist.is_initialized():
        return
    if backend == "nccl" and kind != "cuda":
        raise ConfigError("--distributed-backend nccl needs CUDA devices, found none. Use gloo.")
    if "RANK" not in os.environ:  # started by hand, alone
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = rendezvous(rank, size, timeout, signal_name)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"all {size} ranks have met, and must connect within {timeout.total_seconds():.0f} s "
            f"(--phase-timeout-minutes), got: {error}. Can the hosts reach each other?"
        ) from error


def _touch_every_group(grid: Grid, place: torch.device) -> None:
    """Send one number through each group: what cannot communicate fails here, not in the first step."""
    touched: set[tuple[int, ...]] = set()
    for name in ("tensor", "pipe", "context", "data", "data_context", "expert", "expert_data", "model", "world"):
        group: Group = getattr(grid, name)
        if group.size == 1 or group.ranks in touched:
            continue
        touched.add(group.ranks)
        value = torch.ones(1, device=place)
        try:
            dist.all_reduce(value, group=group.handle)
        except dist.DistError as error:
            own = fault_of_this_rank(error, is_set_up=True)
            if own is None:
                raise
            raise own from None
        if value.item() != group.size:
            raise PeerError(f"the {name} group must have {group.size} ranks, heard from {value.item():.0f}")


# What rank 0 alone may do, and all ranks must know of.

Given = TypeVar("Given")


def run_on_rank_0(world: World, do: Callable[[], Given]) -> Given:
    """Return on every rank what ``do()`` gives on rank 0. Collective.

    Raises:
        CheckpointError, ConfigError: of ``do``, on all ranks alike.
    """
    given: Any = None
    if world.rank == 0:
        try:
            given = do()
        except (CheckpointError, ConfigError) as error:
            error.is_of_this_rank = False
            given = error
    given = world.grid.host.broadcast_object(given)
    if isinstance(given, Exception):
        raise given
    return given
