"""Training run on the simulated device: start, model and engine, two steps, an evaluation and a save."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import tempfile
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.bias
from torch._subclasses.fake_tensor import FakeTensor

from megatron import device, triton_launch
from megatron.arguments import resolve_dtype
from megatron.checkpoint import shard_file
from megatron.checkpoint.staging_buffer import StagingBuffer
from megatron.config import parse
from megatron.config.batch import Share
from megatron.models.registry import FAMILIES
from megatron.mpu import data
from megatron.ops import document_attention, flex_attention
from megatron.training import capture, global_vars, initialize, kernel_rows, setup, train_progress
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from tests.cuda.device import Device, PhaseStats
from tests.cuda.fake_cuda import FakeCuda
from tests.cuda.groups import ORIGINAL as PLAIN_GROUPS
from tests.cuda.groups import Groups, PeerConnection
from tests.cuda.order import StreamOrder

ROOT = Path(__file__).resolve().parents[2]
CONTAINER_TYPES = (dict, list, set, deque, defaultdict, OrderedDict)
CACHED_FUNCTION_TYPE = type(functools.cache(lambda: None))
PHASES = ("start", "build", "step 1", "step 2", "evaluation", "save")


@dataclass
class Outcome:
    """Result of one rank.

    Attributes:
        phases: events by phase.
        wrong: tensors that a collective's backend cannot send.
        started: collectives by name and backend.
        faults: operators whose order on two streams is undefined.
        loss: loss of the last step.
        cpu_s: processor time of the run.
    """

    phases: dict[str, PhaseStats] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    faults: dict[str, int] = field(default_factory=dict)
    loss: float = 0.0
    cpu_s: float = 0.0


ORIGINAL_CONSTRUCTORS = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
READ_METHODS = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}
LOWER_RIGHT = object()
"""Stands for torch's causal bias of the last queries, for which torch calls the kernel's causal variant, not a mask."""
ORIGINAL_BROADCAST = data._broadcast


def load_program(family: str) -> Any:
    """Return the module of a family's pretraining program."""
    folder = ROOT if family in ("gpt2", "t5") else ROOT / "examples" / family
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"pretrain_{family}")


def import_all() -> None:
    """Import the modules that runs need, before the process forks."""
    import deepspeed.pipe
    import torch._dynamo
    import torch.nn.attention.bias  # noqa: F401

    deepspeed.DeepSpeedEngine.register_compile_pass = lambda *_: None  # it imports a compiler, which takes 3 s
    for family in FAMILIES:
        load_program(family)
        for module_path in (
            FAMILIES[family].model,
            FAMILIES[family].pipeline,
            FAMILIES[family].costs,
            FAMILIES[family].data,
        ):
            if module_path:
                importlib.import_module(module_path.partition(":")[0])


RESTORED_PACKAGES = ("megatron", "tds", "deepspeed", "torch.distributed")
"""Packages whose modules a run changes."""


@contextlib.contextmanager
def restore_state(library: FakeCuda) -> Iterator[None]:
    """Restore the state of modules, torch and the environment after a run."""
    modules = [
        m for name, m in list(sys.modules.items()) if f"{name}.".startswith(tuple(f"{p}." for p in RESTORED_PACKAGES))
    ]
    namespaces = [(vars(module), dict(vars(module))) for module in modules]
    containers = {
        id(value): (value, value.copy())
        for _, before in namespaces
        for name, value in before.items()
        if type(value) in CONTAINER_TYPES and not name.startswith("__")
    }
    environment = dict(os.environ)
    library.take_log()
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            PLAIN_GROUPS["destroy_process_group"]()
        for namespace, before in namespaces:
            for name in [name for name in namespace if name not in before]:
                del namespace[name]
            namespace.update(before)
        for value, before in containers.values():
            value.clear()
            value.extend(before) if isinstance(value, (list, deque)) else value.update(before)
        for _, before in namespaces:
            for value in before.values():
                if isinstance(value, CACHED_FUNCTION_TYPE):
                    value.cache_clear()
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        gc.collect()


def replace_parameter(parameter: torch.nn.Parameter, fake: torch.Tensor) -> None:
    """Replace the tensor of ``parameter`` by ``fake``; the object and its attributes stay the same."""
    tensor_class, attributes = type(fake), dict(fake.__dict__)
    torch._C._swap_tensor_impl(parameter, fake)
    parameter.__class__ = tensor_class if tensor_class is FakeTensor else torch.nn.Parameter
    parameter.__dict__.update(attributes)


def set_parameter_tensor(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Set the tensor of ``parameter``, as ``megatron.device.replace_data`` does."""
    if isinstance(parameter, FakeTensor) == isinstance(tensor, FakeTensor):
        parameter.data = tensor
        return
    replace_parameter(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))


def move_module(module: torch.nn.Module, target: torch.device) -> None:
    """Move ``module`` to ``target`` in place; replaces ``tds.device.move``, which sets ``Parameter.data``."""
    for parameter in module.parameters():
        if not isinstance(parameter, FakeTensor):
            replace_parameter(parameter, torch.nn.Parameter(parameter.detach().to(target), parameter.requires_grad))
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = buffer.to(target)


def fake_module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Move ``module`` in place; replaces ``Module.to``, which would create new parameter objects for fake tensors."""
    target = next((torch.device(arg) for arg in args if isinstance(arg, (str, torch.device))), None)
    if target is not None and target.type == "cuda":
        move_module(module, target)
    return module


class Run:
    """Run of one rank."""

    def __init__(self, library: FakeCuda, case: Any, rank: int, connections: dict[int, PeerConnection]) -> None:
        self.case, self.rank = case, rank
        self.device = Device(library)
        self.groups = Groups(self.device, rank, case.size, connections)
        self.outcome = Outcome()
        self.names: list[str] = []
        self.shapes: dict[str, torch.Size] = {}

    def fill_shapes(self, table: torch.Tensor) -> None:
        """Fill ``table`` with the shapes of a batch's tensors, as a message from the first tensor rank would."""
        for row, name in zip(table, self.names, strict=True):
            shape = self.shapes[name]
            row[: len(shape)] = torch.tensor(shape)

    def phase(self, name: str) -> None:
        self.device.stats = self.outcome.phases[name] = PhaseStats()

    def execute(self) -> Outcome:
        """Run all phases."""
        self._start_cpu_s = time.process_time()
        self.groups.install()
        _patch(self)
        with self.device:
            self._start_and_step()
        self.outcome.wrong, self.outcome.started = self.groups.wrong, self.groups.started
        self.outcome.cpu_s = time.process_time() - self._start_cpu_s
        order = StreamOrder()
        order.replay(self.device.library.take_log(), self.device.operators)
        self.outcome.faults = order.faults
        return self.outcome

    def _start_and_step(self) -> None:
        program = load_program(self.case.family)
        config = parse(
            self.case.argv,
            world_size=self.case.size,
            family=self.case.family,
            defaults=getattr(program, "DEFAULTS", None),
        )
        self.phase("start")
        world = initialize.start(config)
        config = resolve_dtype(config, device.default_precision(world.device_type))
        streams = setup.make_streams(config, world)
        global_vars.set_current(config, mock_tokenizer(config), streams)
        self.phase("build")
        engine = setup.build_engine(config, world, streams, program.model_provider, program.forward_step)
        run_data = RunData(
            {"train": random_data(config), "valid": random_data(config)} if world.reads_data else {}, None
        )
        batches = run_data.batches("train", config, world)
        samples = RunData({"train": random_data(config)}, None).batches("train", config, world)
        self.shapes = {name: tensor.shape for name, tensor in next(iter(samples)).items()}
        for step in range(self.case.steps):
            self.phase(f"step {step + 1}")
            share = Share(0, min(step + 1, self.case.gas), min(step + 1, self.case.gas))
            self.outcome.loss = engine.train_step(batches, step, share).loss
        if not self.case.runs_all_phases:
            return
        self.phase("evaluation")
        engine.evaluate_batch(run_data.batches("valid", config, world))
        self.phase("save")
        progress = train_progress.TrainProgress(2, 2, 0)
        state = {"config": config, "module": engine.module, "optimizer": engine.optimizer, "world": world}
        self._save(capture.capture(progress, fingerprint=None, **state).records)

    def _save(self, records: list[Any]) -> None:
        """Copy ``records`` as ``--async-save`` does and read the copies, then write a file as a blocking save does."""
        copies, _ = StagingBuffer().copy(records)
        for copy in copies:
            if copy.is_owner and not copy.tensor.is_meta:
                copy.tensor.numpy()
        tensors = {f"{i}": record.tensor for i, record in enumerate(records) if record.is_owner}
        with tempfile.TemporaryDirectory() as folder:
            shard_file.write_shard_file(Path(folder) / "shard", tensors)


def create_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.tensor`` or ``torch.as_tensor`` with a blocking copy to the device."""

    def make(values: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = original(values, *args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return make


def gpu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Apply ``scaled_dot_product_attention`` by the kernel that CUDA selects, whose shape function a CPU build has.

    This is flash attention for 16-bit tensors without a mask, otherwise the memory-efficient kernel.
    """
    if enable_gqa:
        num_repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(num_repeats, 1), value.repeat_interleave(num_repeats, 1)
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def watch_reads(device: Device, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tensor method ``original``, by which the host reads values, such that ``device`` records the reads."""

    def watched_read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device.record_host_read(tensor)
        return original(tensor, *args, **kwargs)

    return watched_read


def patch_torch(device: Device) -> None:
    """Replace functions of torch and of the project that fake tensors or a CPU build of torch do not support."""
    for name in ORIGINAL_CONSTRUCTORS:
        setattr(torch, name, create_on_host(ORIGINAL_CONSTRUCTORS[name]))
    torch.nn.Module.to = fake_module_to
    for name, read in READ_METHODS.items():  # methods that call no operator
        setattr(torch.Tensor, name, watch_reads(device, read))
    FakeTensor.tolist = lambda tensor: device.tolist(tensor)
    FakeTensor.data_ptr = lambda tensor: device.storage(tensor) * 2**40 + tensor.storage_offset()
    torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init = property(lambda mode: True)
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None  # torch 2.11 allocates a real tensor there
    torch.backends.cudnn.version = lambda: None  # a CUDA build of torch loads CUDA's library to query it

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if attn_mask is LOWER_RIGHT:
            return gpu_attention(query, key, value, *args, is_causal=True, **kwargs)
        if attn_mask is not None:
            stats = device.stats
            stats.masks[device.location()] += 1
            stats.largest_mask = max(stats.largest_mask, attn_mask.numel())
        return gpu_attention(query, key, value, attn_mask, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = attention
    torch.nn.attention.bias.causal_lower_right = lambda *_: LOWER_RIGHT

    def block_attention(
        query: Any, key: Any, value: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
    ) -> Any:
        device.stats.block_mask_sizes.append(
            sum(x.numel() for x in block_mask.as_tuple() if isinstance(x, torch.Tensor))
        )
        return gpu_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)  # Triton's has these shapes

    def can_use_flash(parameters: Any) -> bool:  # a CPU build of torch returns False for all
        return parameters.query.dtype in (torch.bfloat16, torch.float16)

    document_attention.can_use_flash_attention = can_use_flash
    document_attention.has_triton = triton_launch.has_triton = kernel_rows.has_triton = lambda: True
    triton_launch.hook = device.launch_triton
    flex_attention.flexible_attention = block_attention


def _patch(run: Run) -> None:
    """Replace the functions of the project by which ``run`` differs from a run on a GPU."""
    patch_torch(run.device)
    setup.move = move_module
    device.replace_data = set_parameter_tensor  # ``parameter.data`` of a real parameter cannot be a fake tensor

    def broadcast(names: list[str], *args: Any) -> Any:
        run.names = names
        return ORIGINAL_BROADCAST(names, *args)

    data._broadcast = broadcast
    run.groups.on_missing = run.fill_shapes
    initialize.rendezvous = lambda *_: None
