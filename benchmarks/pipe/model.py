"""Cases and contenders of ``pipeline.py``: what is trained, and each contender as ``step(batches) -> loss``.

The GPT that they train is a list of pipeline layers that build alike everywhere:

| layers | list | runs under tensor parallelism |
|---|---|---|
| whole | embedding, ``num_layers`` blocks, norm, head | no |
| half | the same with each block as two layers, attention and feed-forward | no |
| tensor | embedding, ``num_layers`` layers of ``megatron.models``, norm, head | yes |
| t5 | the units of ``megatron.models.T5ModelPipe``: a model of its own | no |

The first two are plain ``torch.nn`` on [b, s, h] and compute the same function from the same weights: each layer fills
its own by its place in the list of halves. The head is not tied. All contenders start from the same weights:

| kind | what it is |
|---|---|
| alone, side by side | the layers in a plain loop, that keeps freed memory as our engine does; side by side: in two |
| stock | DeepSpeed's PipelineModule and engine |
| dualpipev | DeepSpeed's DualPipeVModule and its engine |
| torch | ``torch.distributed.pipelining`` with ``Schedule1F1B`` |
| ours | ``tds`` with each of its schedules |

All use torch's fused AdamW and do not clip. The loss is None on ranks that are not told it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.contenders import START_ID, GPTSizes, Sizes, config_of
from megatron.models import registry
from megatron.models.common.language_model import model_loss
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize, named_parameters
from megatron.models.common.pipeline import layer_specs as decoder_layer_specs
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model, t5_model_args_from, t5_rule
from megatron.models.t5.pipeline import T5ModelPipe, layer_specs
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tds.device import keep_freed
from tds.schedule import LOOP
from tds.schedule.simulate import placement_for

SEED, STD = 1234, 0.02
Batch = tuple[Any, Any]
Bounds = tuple[int, ...]
MOST_KEPT = 128
"""Micro-batches times layers whose activations one contender may keep."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison, all of whose contenders take turns.

    Args:
        bar: speed that ours must reach, as a part of two one-process runs side by side; None: reported without bars.
        balance: how much longer than the shortest the longest stage of our best may take, as measured ahead.
        loss_tolerance: how far apart the losses of contenders may be in their first steps.
    """

    name: str
    sizes: Sizes = field(default_factory=GPTSizes)
    micro_batch_size: int = 4
    num_micro_batches: int = 8
    num_stages: int = 2
    tensor: int = 1
    bar: float | None = None
    balance: float | None = None
    loss_tolerance: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sizes.tokens_per_sample * self.micro_batch_size * self.num_micro_batches

    @property
    def has_gpipe(self) -> bool:
        """Whether GPipe takes part: where it keeps gigabytes, 24 GiB are not enough for all contenders together."""
        return self.num_micro_batches * self.sizes.num_layers <= MOST_KEPT


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who trains it, and how.

    Args:
        kind: "alone", "side by side", "stock", "dualpipev", "torch" or "ours".
        layers: as in ``make_model``.
        partition: bounds, or the name of a method of the engine's.
        keeps_freed: let the allocator keep freed memory; our engine does so by itself.
    """

    name: str
    kind: str
    layers: str = "half"
    partition: Bounds | str = ()
    schedule: str = "1f1b"
    chunks: int = 1
    keeps_freed: bool = False

    @property
    def placement(self) -> str:
        """How the pieces of ours lie."""
        return placement_for(self.schedule)

    @property
    def num_trials(self) -> int:
        """How many steps it takes before it runs as it will: "auto" tries schedules first."""
        return 4 if self.schedule == "auto" else 0

    def num_ranks(self, case: Case) -> int:
        """Return how many processes it runs in."""
        if self.kind in ("alone", "side by side"):
            return 1 if self.kind == "alone" else case.num_stages * case.tensor
        return case.num_stages * case.tensor


class Embedding(nn.Module):
    """Tokens [b, s] to [b, s, h]."""

    def __init__(self, vocab_size: int, seq_length: int, h: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab_size, h), nn.Embedding(seq_length, h)
        fill(self, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.position.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal attention behind a norm, added to the stream [b, s, h]."""

    def __init__(self, number: int, h: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        fill(self, 2 * number + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.norm(x)).view(b, s, 3, self.num_heads, h // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # 3 x [b, a, s, d]
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(context.transpose(1, 2).reshape(b, s, h))


class Mlp(nn.Module):
    """Feed-forward behind a norm, added to the stream [b, s, h]."""

    def __init__(self, number: int, h: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        fill(self, 2 * number + 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward as one layer."""

    def __init__(self, number: int, h: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(number, h, num_heads), Mlp(number, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Head(nn.Linear):
    """[b, s, h] to logits [b, s, v]."""

    def __init__(self, h: int, vocab_size: int) -> None:
        super().__init__(h, vocab_size, bias=False)
        fill(self, -1)


def fill(module: nn.Module, number: int) -> None:
    """Fill tables and matrices with normal(0, ``STD``) numbers that depend on ``number`` alone; biases with zeros."""
    generator = torch.Generator().manual_seed(SEED + 1000 + number)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


class Chain(nn.Module):
    """Layers ``first ... first + len(specs)`` of a model, one after the other, under the names of a PipelineModule."""

    def __init__(self, specs: Iterable[LayerSpec], first: int = 0) -> None:
        super().__init__()
        for index, spec in enumerate(specs):
            self.add_module(str(first + index), spec.build())

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        for layer in self.children():
            x = layer(x)
        return x


@dataclass(frozen=True)
class Model:
    """What a contender needs to train one case.

    Args:
        specs: the layers.
        loss_fn: (logits, labels) to the mean loss.
        finish: fills weights that the layers left unset; called with the built module.
        inputs_of: from tokens [b, s] to what the first layer takes.
    """

    specs: list[LayerSpec]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    finish: Callable[[nn.Module], None]
    inputs_of: Callable[[torch.Tensor], Any]

    def whole(self) -> nn.Module:
        """Return the module that one process trains."""
        return Chain(self.specs)

    def staged(self, options: dict[str, Any]) -> Any:
        """Return the module that our engine trains; ``options`` are those of a ``tds.PipelineModule``."""
        import tds

        return tds.PipelineModule(self.specs, **options)

    def batches(self, case: Case, step: int) -> list[Batch]:
        """Return the micro-batches of a step: random tokens, the same for every contender."""
        text = case.sizes.batch(case.num_micro_batches * case.micro_batch_size, step)["text"]
        parts = text.split(case.micro_batch_size)
        return [(self.inputs_of(each[:, :-1].contiguous()), each[:, 1:].contiguous()) for each in parts]


def make_model(case: Case, layers: str, tensor_group: Any = None) -> Model:
    """Return the model of ``case`` as ``layers`` ("whole", "half", "tensor" or "t5") cut it."""
    if layers == "t5":
        return make_t5_model(case)
    if layers == "tensor":
        return make_tensor_model(case, tensor_group)
    return Model(plain_specs(case, layers), mean_cross_entropy, lambda module: None, lambda tokens: tokens)


def plain_specs(case: Case, layers: str) -> list[LayerSpec]:
    """Return the layers of the plain model, ``"whole"`` or ``"half"``."""
    h, a, v = case.sizes.hidden_size, case.sizes.num_attention_heads, case.sizes.vocab_size
    blocks: list[LayerSpec] = []
    for number in range(case.sizes.num_layers):
        if layers == "whole":
            blocks.append(LayerSpec(Block, number, h, a))
        else:
            blocks += [LayerSpec(Attention, number, h, a), LayerSpec(Mlp, number, h)]
    first = LayerSpec(Embedding, v, case.sizes.seq_length, h)
    return [first, *blocks, LayerSpec(nn.LayerNorm, h), LayerSpec(Head, h, v)]


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


@dataclass(frozen=True)
class T5Stages(Model):
    """Our own T5, whole in one process or cut into stages.

    Its units are those that ``megatron.costs.cost`` counts.

    Args:
        lengths: (micro-batch size, encoder length, decoder length).
        num_stages: of the case.
    """

    sizes: T5ModelArgs
    lengths: tuple[int, int, int]
    num_stages: int

    def whole(self) -> nn.Module:
        return T5Model(self.sizes, ParallelContext())

    def staged(self, options: dict[str, Any]) -> Any:
        partition = options["partition_method"]
        return T5ModelPipe(
            self.sizes,
            ParallelContext(),
            Topology(tensor=1, pipe=self.num_stages, data=1),
            partition=partition,
            chunks=options.get("chunks", 1),
            placement=options.get("placement", LOOP),
            has_segments=False,
            probe=self.lengths if partition == "profile" else None,
        )

    def batches(self, case: Case, step: int) -> list[Batch]:
        """Return the micro-batches of a step: random inputs and targets, the same for every contender."""
        fields = case.sizes.batch(case.num_micro_batches * case.micro_batch_size, step)
        parts = [fields[name].split(case.micro_batch_size) for name in ("inputs", "targets")]
        found = []
        for inputs, targets in zip(*parts, strict=True):
            starts = torch.full_like(targets[:, :1], START_ID)
            shifted = torch.cat([starts, targets[:, :-1]], dim=1)
            found.append(((inputs, shifted), (targets, torch.ones(targets.shape))))
        return found


def make_t5_model(case: Case) -> Model:
    """Return the model of ``case``, with the initial weights of a run of its sizes."""
    config = config_of(case.sizes)
    sizes, place = t5_model_args_from(config.model, config.own), ParallelContext()

    def loss_fn(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total, count = model_loss(logits, labels[0], labels[1], sizes, place)
        return total / count

    def finish(module: nn.Module) -> None:
        initialize(named_parameters(module), seed=SEED, rule=t5_rule(sizes, config.model.init_method_std))

    lengths = (case.micro_batch_size, config.own.enc_seq_length, config.own.dec_seq_length)
    specs = layer_specs(sizes, place)
    return T5Stages(specs, loss_fn, finish, lambda tokens: tokens, sizes, lengths, case.num_stages)


def cut_by_cost(case: Case, num_chunks: int = 1) -> Bounds:
    """Return the bounds that a run of these sizes gets by default."""
    return tuple(registry.costs_of(config_of(case.sizes)).stage_bounds(case.num_stages, num_chunks))


def make_tensor_model(case: Case, group: Any) -> Model:
    """Return the layers of ``megatron.models`` cut over ``group`` (``megatron.mpu``'s; None for one process)."""
    place = ParallelContext(SINGLE if group is None else group)
    given = case.sizes
    sizes = ModelArgs(
        num_layers=given.num_layers,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_attention_heads,
        vocab_size=given.vocab_size,
        max_position_embeddings=given.seq_length,
        kv_hidden_size=given.hidden_size // given.num_attention_heads,
        ff_hidden_size=4 * given.hidden_size,
        activation="gelu-tanh",
        untie_embeddings=True,
    )

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), vocab_size=sizes.vocab_size, group=place.group
        )
        return each.mean()

    def finish(module: nn.Module) -> None:
        initialize(module.named_parameters(), seed=SEED, rule=gpt2_rule(STD, sizes.num_layers))

    def inputs_of(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens, torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()

    return Model(decoder_layer_specs(sizes, place), loss_fn, finish, inputs_of)


Step = Callable[[list[Batch]], float | None]


@dataclass(frozen=True)
class Seat:
    """The place of this process in the grid of a case."""

    case: Case
    rank: int
    stage: int
    pipe_group: Any = None
    tensor_group: Any = None


def make_seat(case: Case, contender: Contender, rank: int) -> Seat:
    """Return the place of ``rank``; stages lie ``case.tensor`` ranks apart. Collective over the contender's ranks."""
    if contender.num_ranks(case) == 1 or contender.kind == "side by side" or case.tensor == 1:
        return Seat(case, rank, rank)
    grid = build_grid(Topology(tensor=case.tensor, pipe=case.num_stages, data=1), rank)
    if dist.get_world_size() != case.num_stages * case.tensor:
        raise ValueError(f"{contender.name} needs {case.num_stages * case.tensor} ranks, got {dist.get_world_size()}")
    return Seat(case, rank, rank // case.tensor, grid.pipe.handle, grid.tensor)


@dataclass
class Built:
    """A contender that is ready.

    Args:
        part: the layers that this rank holds.
        engine: of DeepSpeed or ours, where there is one.
        model: as this rank built it.
    """

    step: Step
    part: nn.Module
    model: Model
    engine: Any = None


def build(contender: Contender, seat: Seat) -> Built:
    """Return the contender on this rank. Collective over its ranks."""
    if contender.keeps_freed:
        keep_freed()
    model = make_model(seat.case, contender.layers, seat.tensor_group)
    makers = {"alone": _plain, "side by side": _plain, "stock": _deepspeed, "dualpipev": _deepspeed, "torch": _torch}
    return makers.get(contender.kind, _ours)(contender, model, seat)


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all contenders use."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def _plain(contender: Contender, model: Model, seat: Seat) -> Built:
    chain = model.whole()
    model.finish(chain)
    optimizer = make_optimizer(chain)

    def step(batches: list[Batch]) -> float:
        total = torch.zeros(())
        for inputs, labels in batches:
            logits = chain(*inputs) if isinstance(inputs, tuple) else chain(inputs)
            loss = model.loss_fn(logits, labels) / len(batches)
            del logits
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return Built(step, chain, model)


def _torch(contender: Contender, model: Model, seat: Seat) -> Built:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    num_stages, num_micro_batches = seat.case.num_stages, seat.case.num_micro_batches
    start, stop = contender.partition[seat.stage : seat.stage + 2]
    chain = Chain(model.specs[start:stop], first=start)
    model.finish(chain)
    optimizer = make_optimizer(chain)
    stage = PipelineStage(chain, seat.stage, num_stages, torch.device("cpu"), group=seat.pipe_group)
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=model.loss_fn)

    def step(batches: list[Batch]) -> float | None:
        losses: list[torch.Tensor] | None = None
        if stage.is_first:
            schedule.step(*_joined([inputs for inputs, _ in batches]), return_outputs=False)
        elif stage.is_last:
            losses = []
            (target,) = _joined([labels for _, labels in batches])
            schedule.step(target=target, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return Built(step, chain, model)


def _joined(parts: list[Any]) -> list[torch.Tensor]:
    """Return the tensors of all micro-batches as those of one batch: torch cuts them up itself."""
    if isinstance(parts[0], tuple):
        return [torch.cat(each) for each in zip(*parts, strict=True)]
    return [torch.cat(parts)]


def _deepspeed(contender: Contender, model: Model, seat: Seat) -> Built:
    import deepspeed

    kind = deepspeed.DualPipeVModule if contender.kind == "dualpipev" else deepspeed.PipelineModule
    module = kind(model.specs, **_layout(contender, model, seat))
    return _engine(module, deepspeed.initialize, {}, model, seat)


def _ours(contender: Contender, model: Model, seat: Seat) -> Built:
    import tds

    options: dict[str, Any] = _layout(contender, model, seat)
    pipeline: dict[str, Any] = {"schedule": contender.schedule}
    if contender.chunks > 1:
        options["chunks"] = pipeline["chunks"] = contender.chunks
        options["placement"] = contender.placement
    if contender.partition == "profile":
        options["profile_batch"] = model.batches(seat.case, 0)[0]
    return _engine(model.staged(options), tds.initialize, pipeline, model, seat)


def _layout(contender: Contender, model: Model, seat: Seat) -> dict[str, Any]:
    """Return the arguments of a PipelineModule that every engine's takes."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    partition = contender.partition
    return {
        "loss_fn": model.loss_fn,
        "topology": PipeModelDataParallelTopology(num_pp=seat.case.num_stages, num_mp=seat.case.tensor, num_dp=1),
        "partition_method": partition if isinstance(partition, str) else list(partition),
    }


def _engine(module: Any, initialize: Any, pipeline: dict[str, Any], model: Model, seat: Seat) -> Built:
    model.finish(module)
    config = {
        "train_micro_batch_size_per_gpu": seat.case.micro_batch_size,
        "gradient_accumulation_steps": seat.case.num_micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pipeline": pipeline,
    }
    engine = initialize(model=module, optimizer=make_optimizer(module), config=config)[0]

    def step(batches: list[Batch]) -> float:
        return float(engine.train_batch(iter(batches)))

    return Built(step, module, model, engine)
