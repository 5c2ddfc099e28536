"""The model of ``pipeline.py --model t5``: ``megatron``'s own T5, whole in one process or cut into stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.flags import config_of
from benchmarks.pipe.case import Bounds, Case
from benchmarks.pipe.model import SEED, Batch, Model
from benchmarks.sizes import START_ID
from megatron.models import registry
from megatron.models.common.language_model import model_loss
from megatron.models.common.model_args import ParallelContext
from megatron.models.common.parameters import initialize, named_parameters
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model, t5_model_args_from, t5_rule
from megatron.models.t5.pipeline import T5ModelPipe, layer_specs
from megatron.mpu.topology import Topology


@dataclass(frozen=True)
class T5Stages(Model):
    """The T5 of a case; its units are those that ``megatron.models.common.cost`` counts.

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
