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
from tests.helpers.model_samples import get_sharded_grads, join_shards, make_parallel_context, worst_relative_error
from tests.helpers.whole import fill_shard, group_of_all_ranks
from tests.models.gpt2.test_against_huggingface import ALLOWED, BATCH, DTYPES, LR, SEQ, STEPS, VOCAB, random_batch

TRAINED_CASE = "fp64"
"""The case whose weights are also compared after training steps."""


def huggingface_loss(model: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Hugging Face's logits and the loss of a step."""
    tokens, labels = random_batch(step)
    logits = model(tokens, use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def our_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return our loss of a step."""
    tokens, labels = random_batch(step)
    total, count = model(tokens, labels=labels, loss_mask=torch.ones(BATCH, SEQ))
    return total / count


@dataclass(frozen=True, eq=False)
class HuggingFaceComparison:
    """Comparison of one family with Hugging Face's model, in several cases.

    Args:
        hf_format: conversion of the weights in both directions, and construction of our model.
        dtypes: number format of each case.
        make_reference: returns Hugging Face's model of a case, and our configuration for it.
        disable_upcasts: context in which Hugging Face's model keeps fp64 where it usually casts to fp32.
        tolerances: number format -> bounds for the differences in logits, loss, gradients and trained weights.
    """

    hf_format: HFFormat
    dtypes: Mapping[str, str]
    make_reference: Callable[[str], tuple[Any, Config]]
    disable_upcasts: Callable[[], AbstractContextManager[None]]
    tolerances: Mapping[str, tuple[float | None, ...]] = field(default_factory=lambda: ALLOWED)

    @functools.cache  # noqa: B019 - for a session, and a family has one
    def run_huggingface(self, case: str) -> tuple[Any, ...]:
        """Return Hugging Face's results: config, initial weights, logits, loss, gradients and trained weights.

        Weights and gradients have Hugging Face's names.
        """
        model, config = self.make_reference(case)
        initial_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with self.disable_upcasts() if self.dtypes[case] == "fp64" else nullcontext():
            logits, loss = huggingface_loss(model, 0)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            if case == TRAINED_CASE:
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                for step in range(STEPS):
                    optimizer.zero_grad()
                    huggingface_loss(model, step)[1].backward()
                    optimizer.step()
        trained_weights = {name: p.detach() for name, p in model.named_parameters()}
        return config, initial_weights, logits.detach(), loss.item(), gradients, trained_weights

    def run_rank(self, rank: int, size: int) -> dict[str, Any]:
        """Return case -> (logits, loss, gradients, trained weights) of our model on this rank."""
        return {case: self._run_case(group_of_all_ranks(rank, size), case) for case in self.dtypes}

    def _run_case(self, group: Any, case: str) -> Any:
        config, initial_weights, *_ = self.run_huggingface(case)
        dtype = DTYPES[self.dtypes[case]]
        model = build_model(config, make_parallel_context(group)).to(dtype)
        weights = self.hf_format.to_ours(initial_weights, config)
        assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
        for name, parameter in model.named_parameters():
            set_shard(parameter, shard_of(parameter))
            fill_shard(parameter, weights[name])
        with torch.no_grad():
            logits = model(random_batch(0)[0])
        optimizer = build_optimizer(model.parameters(), name="sgd", lr=LR, dtype=dtype, tensor=group)
        loss = our_loss(model, 0)
        loss.backward()
        optimizer.reducer.sum_over_groups()
        gradients = get_sharded_grads(model)
        if case == TRAINED_CASE:
            optimizer.zero_grad()
            for step in range(STEPS):
                our_loss(model, step).backward()
                optimizer.step()
        trained_weights = {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
        return logits, loss.item(), gradients, trained_weights

    @functools.cache  # noqa: B019
    def run_all_ranks(self, size: int) -> dict[str, list[Any]]:
        """Run ``run_rank`` on ``size`` tensor ranks; return case -> results of all ranks."""
        for case in self.dtypes:
            self.run_huggingface(case)  # computed before the fork, so that all ranks share it
        ranks = run_ranks(size, self.run_rank, size) if size > 1 else [self.run_rank(0, 1)]
        return {case: [results[case] for results in ranks] for case in self.dtypes}

    def to_huggingface(self, rank_shards: list[Any], config: Config, names: Any) -> dict[str, torch.Tensor]:
        """Join the shards of all ranks and convert the global tensors to Hugging Face's names."""
        converted = self.hf_format.from_ours(join_shards(rank_shards), config)
        return {name: converted[name] for name in names}

    def check(self, case: str, size: int) -> None:
        """Check logits, loss, gradients and trained weights with ``size`` tensor ranks."""
        config, initial_weights, logits, loss, gradients, trained_weights = self.run_huggingface(case)
        ranks = self.run_all_ranks(size)[case]
        all_logits = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB].transpose(0, 1)
        observed = [(all_logits - logits).abs().max().item() / logits.abs().max().item()]
        observed.append(max(abs(rank[1] - loss) / loss for rank in ranks))
        worst_error, worst_name = worst_relative_error(
            self.to_huggingface([rank[2] for rank in ranks], config, gradients), gradients
        )
        observed.append(worst_error)
        if case == TRAINED_CASE:
            worst_weight_error, _ = worst_relative_error(
                self.to_huggingface([rank[3] for rank in ranks], config, trained_weights), trained_weights
            )
            observed.append(worst_weight_error)
            changed = {
                name: torch.linalg.vector_norm(trained_weights[name] - initial_weights[name])
                for name in trained_weights
            }
            assert all(change > 1e-3 * initial_weights[name].norm() for name, change in changed.items()), "it trains"
        tolerances = self.tolerances[self.dtypes[case]]
        print(f"t={size} {case}: observed", [f"{value:.1e}" for value in observed], "allowed", tolerances, worst_name)
        for quantity, value, limit in zip(
            ("logits", "loss", worst_name, "weights"), observed, tolerances, strict=False
        ):
            assert limit is None or value <= limit, quantity

    def check_round_trip(self, case: str, tensor_sizes: tuple[int, ...]) -> None:
        """Check that converting Hugging Face's weights to ours and back is exact on any number of tensor ranks."""
        config, initial_weights, *_ = self.run_huggingface(case)
        for size in tensor_sizes:
            tensors = self.hf_format.from_ours(
                join_shards([self.make_shards(case, rank, size) for rank in range(size)]), config
            )
            for name, tensor in tensors.items():
                assert tensor.equal(initial_weights[name]), name
            assert {"lm_head.weight", *tensors} == set(initial_weights)

    def make_shards(self, case: str, rank: int, size: int) -> Any:
        """Return the weight shards of a tensor rank, without communication."""
        config, initial_weights, *_ = self.run_huggingface(case)
        parallel = make_parallel_context(Group(tuple(range(size)), rank))
        model = build_model(config, parallel).to(DTYPES[self.dtypes[case]])
        parameters = dict(model.named_parameters())
        for name, weight in self.hf_format.to_ours(initial_weights, config).items():
            shard = shard_of(parameters[name])
            shard.unpadded(parameters[name].data).copy_(shard.narrow(weight))
        return {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
