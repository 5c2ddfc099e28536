"""The contenders of ``pipeline.py``: each a function that returns ``step(batches) -> loss`` from the same weights.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.pipe.cases import Case, Contender
from benchmarks.pipe.model import Batch, Chain, Model, make_model
from tds.device import keep_freed

Step = Callable[[list[Batch]], float | None]


@dataclass(frozen=True)
class Seat:
    """The place of this process in the grid of a case."""

    case: Case
    rank: int
    stage: int
    pipe_group: Any = None
    tensor_group: Any = None


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
