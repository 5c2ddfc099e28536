"""The model, cases and contenders of ``pipeline.py``; each contender is built into ``step(batches) -> loss``.

The model is a GPT of plain ``torch.nn`` layers on [b, s, h]. Attention and feed-forward are separate layers, so that
a chunk can end after either of them. The head is not tied. Each layer initializes its weights from its index, so all
contenders start from the same weights. They use torch's fused AdamW and do not clip gradients.

| kind | engine |
|---|---|
| alone, side by side | the layers in a plain loop, in one process or in one process per stage |
| stock | DeepSpeed's PipelineModule and engine |
| torch | ``torch.distributed.pipelining`` with ``Schedule1F1B`` |
| ours | ``tds`` with one of its schedules |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.contenders import GPTSizes
from tds.device import keep_freed
from tds.schedule.simulate import placement_for

SEED, STD = 1234, 0.02
Batch = tuple[torch.Tensor, torch.Tensor]
Bounds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A comparison in which all contenders take turns.

    Args:
        bar: required speed of our best contender, relative to two one-process runs side by side; None for no
            requirements.
    """

    name: str
    sizes: GPTSizes = field(default_factory=GPTSizes)
    micro_batch_size: int = 4
    num_micro_batches: int = 8
    num_stages: int = 2
    bar: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sizes.tokens_per_sample * self.micro_batch_size * self.num_micro_batches

    def specs(self) -> list[LayerSpec]:
        """Return the layers of the model."""
        model_sizes = self.sizes
        h, vocab_size = model_sizes.hidden_size, model_sizes.vocab_size
        layers = [LayerSpec(Embedding, vocab_size, model_sizes.seq_length, h)]
        for idx in range(model_sizes.num_layers):
            layers += [LayerSpec(Attention, idx, h, model_sizes.num_attention_heads), LayerSpec(Mlp, idx, h)]
        return [*layers, LayerSpec(nn.LayerNorm, h), LayerSpec(Head, h, vocab_size)]

    def batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step: random tokens and labels [b, s], the same for every contender."""
        text = self.sizes.batch(self.num_micro_batches * self.micro_batch_size, step)["text"]
        return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in text.split(self.micro_batch_size)]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An engine and its settings.

    Args:
        kind: "alone", "side by side", "stock", "torch" or "ours".
        partition: bounds of the chunks in layers, or a ``partition_method`` of DeepSpeed.
        split_text: number of transformer layers of each chunk as text, for tables.
        should_keep_freed: make the C allocator keep freed memory, as our engine does by default.
    """

    name: str
    kind: str
    partition: Bounds | str = ()
    split_text: str = ""
    schedule: str = "1f1b"
    num_chunks: int = 1
    should_keep_freed: bool = False

    def num_ranks(self, case: Case) -> int:
        """Return the number of processes."""
        return 1 if self.kind == "alone" else case.num_stages


class Embedding(nn.Module):
    """Maps tokens [b, s] to hidden states [b, s, h]."""

    def __init__(self, vocab_size: int, seq_length: int, h: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab_size, h), nn.Embedding(seq_length, h)
        initialize(self, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.position.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Pre-norm causal attention with a residual connection, [b, s, h]."""

    def __init__(self, layer_idx: int, h: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        initialize(self, 2 * layer_idx + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.norm(x)).view(b, s, 3, self.num_heads, h // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # 3 x [b, a, s, d]
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(context.transpose(1, 2).reshape(b, s, h))


class Mlp(nn.Module):
    """Pre-norm feed-forward layer with a residual connection, [b, s, h]."""

    def __init__(self, layer_idx: int, h: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        initialize(self, 2 * layer_idx + 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Head(nn.Linear):
    """Maps hidden states [b, s, h] to logits [b, s, v]."""

    def __init__(self, h: int, vocab_size: int) -> None:
        super().__init__(h, vocab_size, bias=False)
        initialize(self, -1)


def initialize(module: nn.Module, seed: int) -> None:
    """Initialize matrices with normal(0, ``STD``) values that depend on ``seed`` only, and biases with zeros."""
    generator = torch.Generator().manual_seed(SEED + 1000 + seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all contenders use."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def build_layers(specs: Iterable[LayerSpec]) -> nn.Sequential:
    """Return the layers as one module."""
    return nn.Sequential(*(spec.build() for spec in specs))


@dataclass
class Built:
    """A contender on this rank.

    Args:
        step: trains on the micro-batches of a step; returns the loss, or None if this rank does not know it.
        module: the layers of this rank.
    """

    step: Callable[[list[Batch]], float | None]
    module: Any


def build(case: Case, contender: Contender, rank: int) -> Built:
    """Build a contender on this rank. Collective over its ranks."""
    if contender.should_keep_freed:
        keep_freed()
    if contender.kind in ("alone", "side by side"):
        return _build_plain(case)
    if contender.kind == "torch":
        return _build_torch(case, contender, rank)
    return _build_engine(case, contender)


def _build_plain(case: Case) -> Built:
    module = build_layers(case.specs())
    optimizer = make_optimizer(module)

    def step(batches: list[Batch]) -> float:
        total = torch.zeros(())
        for tokens, labels in batches:
            loss = loss_fn(module(tokens), labels) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return Built(step, module)


def _build_torch(case: Case, contender: Contender, rank: int) -> Built:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    start, stop = contender.partition[rank : rank + 2]
    module = build_layers(case.specs()[start:stop])
    optimizer = make_optimizer(module)
    stage = PipelineStage(module, rank, case.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.num_micro_batches, loss_fn=loss_fn)

    def step(batches: list[Batch]) -> float | None:
        losses: list[torch.Tensor] = []
        if stage.is_first:
            schedule.step(torch.cat([tokens for tokens, _ in batches]), return_outputs=False)
        elif stage.is_last:
            schedule.step(target=torch.cat([labels for _, labels in batches]), losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return Built(step, module)


def _build_engine(case: Case, contender: Contender) -> Built:
    """Build DeepSpeed's engine or ours."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    partition = contender.partition
    options: dict[str, Any] = {
        "loss_fn": loss_fn,
        "topology": PipeModelDataParallelTopology(num_pp=case.num_stages, num_mp=1, num_dp=1),
        "partition_method": partition if isinstance(partition, str) else list(partition),
    }
    pipeline: dict[str, Any] = {}
    if contender.kind == "ours":
        import tds as library

        pipeline["schedule"] = contender.schedule
        if contender.num_chunks > 1:
            options["chunks"] = pipeline["chunks"] = contender.num_chunks
            options["placement"] = placement_for(contender.schedule)
    else:
        import deepspeed as library
    module = library.PipelineModule(case.specs(), **options)
    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch_size,
        "gradient_accumulation_steps": case.num_micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pipeline": pipeline,
    }
    engine = library.initialize(model=module, optimizer=make_optimizer(module), config=config)[0]
    return Built(lambda batches: float(engine.train_batch(iter(batches))), module)
