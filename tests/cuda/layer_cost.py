"""Kernels of one layer and of the chunked loss at full size, counted on the simulated device.

``python -m tests.cuda llama-7b`` prints the table of one case; see ``tests/cuda/__main__.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from megatron import device as devices
from megatron.config import parse
from megatron.config.loss_chunk import tokens_per_chunk
from megatron.device import DTYPES
from megatron.models.common.decoder import model_args
from megatron.models.common.experts import stack_expert_weights
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.transformer import TransformerLayer
from megatron.mpu.fp8_weights import sharing_quantized_weights
from megatron.mpu.groups import Group
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from tests.cuda import runs
from tests.cuda.device import Device, Operator, PhaseStats
from tests.cuda.fake_cuda import FakeCuda
from tests.cuda.groups import Groups
from tests.cuda.worker import LOSS_HIDDEN, LOSS_TOKENS, LOSS_VOCAB, CostCase
from tests.helpers.alive import LiveMemoryTracker

SHAPES = {
    "llama-7b": (
        "llama",
        "--hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048 --batch-size 4",
    ),
    "llama-7b-fp8": (
        "llama",
        "--hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048 --batch-size 4 "
        "--fp8-format e4m3",
    ),
    "moe-fp8": (
        "llama",
        "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --seq-length 2048 --batch-size 4 "
        "--num-experts 8 --moe-router-topk 2 --fp8-format e4m3",
    ),
    "gpt2-1.3b": (
        "gpt2",
        "--hidden-size 2048 --num-attention-heads 16 --hidden-bias --seq-length 2048 --batch-size 8",
    ),
    "llama-3-8b": (
        "llama",
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --seq-length 8192 "
        "--batch-size 1",
    ),
    "moe": (
        "llama",
        "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --seq-length 2048 --batch-size 4 "
        "--num-experts 8 --moe-router-topk 2",
    ),
}
"""Case -> family and flags of one layer."""
LAYER_FLAGS = (
    "--num-layers 1 --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0 --train-iters 1 --data-path none"
)
EXPERT_PARALLEL = "--expert-model-parallel-size 2"
"""Flag of a layer whose experts are distributed over two ranks, the second of which is simulated."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
ATTENTION = ("attention", "_varlen_attn")
"""Parts of the names of attention kernels."""

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Forward pass; returns the output and its gradient."""


@dataclass
class PassCost:
    """Kernels of one pass, forward or backward.

    Attributes:
        num_bytes: bytes read and written by (operator, location), without products and attention.
        launches: launches of the same kernels.
        num_products, num_attention: launches of matrix products and of attention kernels.
    """

    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_products: int = 0
    num_attention: int = 0

    @classmethod
    def of(cls, operators: Iterable[Operator]) -> PassCost:
        """Return the cost of ``operators``."""
        cost = cls()
        for operator in operators:
            if operator.name in PRODUCTS:
                cost.num_products += 1
            elif any(name in operator.name for name in ATTENTION):
                cost.num_attention += 1
            elif operator.num_bytes:
                cost.num_bytes[operator.name, operator.location] += operator.num_bytes
                cost.launches[operator.name, operator.location] += 1
        return cost


@dataclass
class Cost:
    """Kernels of a forward and a backward pass.

    Attributes:
        unit: bytes of one [s, b, h] in bf16 for a layer, number of logits for the loss.
        reads: waits of the host for the device in both passes, by operator and location.
        peak_bytes: peak memory of tensors that both passes allocate.
    """

    forward: PassCost
    backward: PassCost
    unit: int
    reads: Counter[str]
    peak_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that both passes move, without products and attention."""
        return self.forward.num_bytes.total() + self.backward.num_bytes.total()

    @property
    def units(self) -> float:
        """``num_bytes`` divided by ``unit``."""
        return self.num_bytes / self.unit

    @property
    def launches(self) -> int:
        """Launches of both passes, including attention, without products."""
        return sum(cost.launches.total() + cost.num_attention for cost in (self.forward, self.backward))

    def count(self, name: str) -> int:
        """Return the launches of operator ``name`` in both passes, at all locations."""
        return sum(n for cost in (self.forward, self.backward) for key, n in cost.launches.items() if key[0] == name)


def measure(library: FakeCuda, case: CostCase) -> Cost:
    """Run forward and backward of ``case`` on the simulated device and count the kernels."""
    device = Device(library)
    device.traces_backward = True
    runs.patch_torch(device)
    with device, sharing_quantized_weights(case.is_later_micro_batch):
        run, unit = make_loss(case.extra) if case.name == "loss" else make_layer(device, *SHAPES[case.name], case.extra)
        output, grad = run()  # fills caches, such as the table of rotary positions
        if case.is_later_micro_batch:
            output.backward(grad)
        device.stats = PhaseStats()
        start = len(device.operators)
        with LiveMemoryTracker("cuda") as alive:
            output, grad = run()
            middle = len(device.operators)
            output.backward(grad)
    if device.stats.mixed:
        raise AssertionError(f"{case} combines tensors of the host and of the device: {dict(device.stats.mixed)}")
    passes = device.operators[start:middle], device.operators[middle:]
    return Cost(*map(PassCost.of, passes), unit, device.stats.reads, alive.peak_bytes)


def make_layer(device: Device, family: str, flags: str, extra: str) -> tuple[Run, int]:
    """Return the forward pass of a layer with one tensor-parallel rank, and the bytes of its input."""
    num_ranks = 2 if EXPERT_PARALLEL in extra else 1
    precision = "" if "--fp16" in extra else "--bf16"
    config = parse(f"{LAYER_FLAGS} {precision} {flags} {extra}".split(), world_size=num_ranks, family=family)
    parallel = ParallelContext() if num_ranks == 1 else ParallelContext(expert=make_group(device, num_ranks))
    dtype = DTYPES[config.precision.dtype or "bf16"]
    with torch.device("meta"):
        layer = TransformerLayer(model_args(config, for_training=True), parallel, 0)
    for parameter in layer.parameters():
        fake = torch.empty(parameter.shape, dtype=dtype, device="cuda")
        runs.replace_parameter(parameter, torch.nn.Parameter(fake))
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cuda"))
    devices.replace_data = runs.set_parameter_tensor
    stack_expert_weights(layer)  # as a run does after moving its model to the device
    shape = config.batch.seq_length, config.batch.batch_size, config.model.hidden_size
    x = torch.empty(shape, dtype=dtype, device="cuda").requires_grad_()
    grad = torch.empty_like(x)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        x.grad = None
        layer.zero_grad()
        return layer(x), grad

    return run, x.numel() * x.element_size()


def make_group(device: Device, num_ranks: int) -> Group:
    """Return a process group in which this process is the first of ``num_ranks`` ranks; the others are simulated."""
    Groups(device, 0, num_ranks).install()
    torch.distributed.init_process_group("nccl")
    ranks = tuple(range(num_ranks))
    return Group(ranks, 0, torch.distributed.new_group(list(ranks)))


def make_loss(extra: str) -> tuple[Run, int]:
    """Return the forward pass of the chunked loss in bf16, and the number of logits.

    Args:
        extra: see ``CostCase``.
    """
    x, table = (
        torch.empty(num_rows, LOSS_HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for num_rows in (LOSS_TOKENS, LOSS_VOCAB)
    )
    table.requires_grad_("frozen" not in extra)
    cap, has_kernels = 30.0 if "cap" in extra else 0.0, "torch" not in extra
    targets = torch.empty(LOSS_TOKENS, dtype=torch.int64, device="cuda")
    weights, grad = torch.empty(LOSS_TOKENS, device="cuda"), torch.empty((), device="cuda")
    chunk_tokens = tokens_per_chunk(None, LOSS_TOKENS, LOSS_VOCAB, LOSS_HIDDEN, is_on_cpu=False)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        loss = linear_cross_entropy(
            x, table, targets, weights,
            vocab_size=LOSS_VOCAB, chunk_tokens=chunk_tokens, cap=cap, has_kernels=has_kernels,
        )  # fmt: skip
        return loss, grad

    return run, LOSS_TOKENS * LOSS_VOCAB


def table_lines(cost: Cost) -> Iterator[str]:
    """Yield the lines of a table of all kernels, by pass, the largest traffic first."""
    yield f"{cost.units:.1f} units, {cost.launches} launches without products"
    for title, pass_cost in (("forward", cost.forward), ("backward", cost.backward)):
        yield (
            f"{title}: {pass_cost.num_bytes.total() / cost.unit:.1f} units, {pass_cost.launches.total()} kernels, "
            f"{pass_cost.num_attention} attention, {pass_cost.num_products} products"
        )
        for key, num_bytes in pass_cost.num_bytes.most_common():
            yield f"  {num_bytes / cost.unit:6.2f}  {pass_cost.launches[key]:3} x {key[0]:32} {key[1]}"
