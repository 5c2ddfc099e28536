"""Compare Hugging Face's decoder and ours with the same weights: logits, loss, gradients, weights after 20 steps.

The reference has a random configuration; nothing is downloaded. Its loss is computed here from its logits, because
``labels=`` would cast them to fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from megatron.config import Config
from megatron.models.common.huggingface import HFFormat
from megatron.models.registry import build_model
from megatron.mpu.groups import Group
from megatron.mpu.shard import set_shard, shard_of
from megatron.optim import build_optimizer
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import gradients_of, joined, place_of, worst_relative
from tests.helpers.whole import fill, whole_world
from tests.models.gpt2.test_against_huggingface import ALLOWED, BATCH, DTYPES, LR, SEQ, STEPS, VOCAB, text

TRAINED = "fp64"
"""The case whose weights are also compared after training steps."""


def reference_loss(model: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Hugging Face's logits and the loss of a step."""
    tokens, labels = text(step)
    logits = model(tokens, use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def our_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return our loss of a step."""
    tokens, labels = text(step)
    total, count = model(tokens, labels=labels, loss_mask=torch.ones(BATCH, SEQ))
    return total / count


@dataclass(frozen=True, eq=False)
class Against:
    """Comparison of one family with Hugging Face's model, in several cases.

    Args:
        form: conversion of the weights in both directions, and construction of our model.
        dtypes: number format of each case.
        make_reference: returns Hugging Face's model of a case, and our configuration for it.
        in_its_own_dtype: context in which Hugging Face's model keeps fp64 where it usually casts to fp32.
        allowed: number format -> bounds for the differences in logits, loss, gradients and trained weights.
    """

    form: HFFormat
    dtypes: Mapping[str, str]
    make_reference: Callable[[str], tuple[Any, Config]]
    in_its_own_dtype: Callable[[], AbstractContextManager[None]]
    allowed: Mapping[str, tuple[float | None, ...]] = field(default_factory=lambda: ALLOWED)

    @functools.cache  # noqa: B019 - for a session, and a family has one
    def reference(self, kind: str) -> tuple[Any, ...]:
        """Return Hugging Face's results: config, initial weights, logits, loss, gradients and trained weights.

        Weights and gradients have Hugging Face's names.
        """
        model, config = self.make_reference(kind)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with self.in_its_own_dtype() if self.dtypes[kind] == "fp64" else nullcontext():
            logits, loss = reference_loss(model, 0)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            if kind == TRAINED:
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                for step in range(STEPS):
                    optimizer.zero_grad()
                    reference_loss(model, step)[1].backward()
                    optimizer.step()
        after = {name: p.detach() for name, p in model.named_parameters()}
        return config, before, logits.detach(), loss.item(), gradients, after

    def ours(self, rank: int, size: int) -> dict[str, Any]:
        """Return case -> (logits, loss, gradients, trained weights) of our model on this rank."""
        return {kind: self._one(whole_world(rank, size), kind) for kind in self.dtypes}

    def _one(self, group: Any, kind: str) -> Any:
        config, before, *_ = self.reference(kind)
        dtype = DTYPES[self.dtypes[kind]]
        model = build_model(config, place_of(group)).to(dtype)
        weights = self.form.to_ours(before, config)
        assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
        for name, parameter in model.named_parameters():
            set_shard(parameter, shard_of(parameter))
            fill(parameter, weights[name])
        with torch.no_grad():
            logits = model(text(0)[0])
        optimizer = build_optimizer(model.parameters(), name="sgd", lr=LR, dtype=dtype, tensor=group)
        loss = our_loss(model, 0)
        loss.backward()
        optimizer.reducer.sum_over_groups()
        gradients = gradients_of(model)
        if kind == TRAINED:
            optimizer.zero_grad()
            for step in range(STEPS):
                our_loss(model, step).backward()
                optimizer.step()
        after = {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
        return logits, loss.item(), gradients, after

    @functools.cache  # noqa: B019
    def seen(self, size: int) -> dict[str, list[Any]]:
        """Run ``ours`` on ``size`` tensor ranks; return case -> results of all ranks."""
        for kind in self.dtypes:
            self.reference(kind)  # computed before the fork, so that all ranks share it
        ranks = run_ranks(size, self.ours, size) if size > 1 else [self.ours(0, 1)]
        return {kind: [results[kind] for results in ranks] for kind in self.dtypes}

    def theirs(self, parts: list[Any], config: Config, names: Any) -> dict[str, torch.Tensor]:
        """Join the shards of all ranks and convert the global tensors to Hugging Face's names."""
        converted = self.form.from_ours(joined(parts), config)
        return {name: converted[name] for name in names}

    def check(self, kind: str, size: int) -> None:
        """Check logits, loss, gradients and trained weights with ``size`` tensor ranks."""
        config, before, logits, loss, gradients, after = self.reference(kind)
        ranks = self.seen(size)[kind]
        all_logits = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB].transpose(0, 1)
        observed = [(all_logits - logits).abs().max().item() / logits.abs().max().item()]
        observed.append(max(abs(rank[1] - loss) / loss for rank in ranks))
        worst, worst_name = worst_relative(self.theirs([rank[2] for rank in ranks], config, gradients), gradients)
        observed.append(worst)
        if kind == TRAINED:
            worst_weight, _ = worst_relative(self.theirs([rank[3] for rank in ranks], config, after), after)
            observed.append(worst_weight)
            changed = {name: torch.linalg.vector_norm(after[name] - before[name]) for name in after}
            assert all(change > 1e-3 * before[name].norm() for name, change in changed.items()), "it trains"
        allowed = self.allowed[self.dtypes[kind]]
        print(f"t={size} {kind}: observed", [f"{value:.1e}" for value in observed], "allowed", allowed, worst_name)
        for quantity, value, limit in zip(("logits", "loss", worst_name, "weights"), observed, allowed, strict=False):
            assert limit is None or value <= limit, quantity

    def check_there_and_back(self, kind: str, sizes: tuple[int, ...]) -> None:
        """Check that converting Hugging Face's weights to ours and back is exact on any number of tensor ranks."""
        config, before, *_ = self.reference(kind)
        for size in sizes:
            tensors = self.form.from_ours(joined([self.shards(kind, rank, size) for rank in range(size)]), config)
            for name, tensor in tensors.items():
                assert tensor.equal(before[name]), name
            assert {"lm_head.weight", *tensors} == set(before)

    def shards(self, kind: str, rank: int, size: int) -> Any:
        """Return the weight shards of a tensor rank, without communication."""
        config, before, *_ = self.reference(kind)
        parallel = place_of(Group(tuple(range(size)), rank))
        model = build_model(config, parallel).to(DTYPES[self.dtypes[kind]])
        parameters = dict(model.named_parameters())
        for name, weight in self.form.to_ours(before, config).items():
            shard = shard_of(parameters[name])
            shard.unpadded(parameters[name].data).copy_(shard.cut(weight))
        return {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
