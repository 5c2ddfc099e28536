"""Mutants of QK-clip: logits that miss some samples, and weights that are scaled by other factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.mutants.mutant import call_after_init, mutant

ONE_PROCESS = "tests/models/common/test_qk_clip.py"
MAXIMA = f"{ONE_PROCESS}::test_maxima_match_matrices_of_logits[groups]"
THRESHOLD = f"{ONE_PROCESS}::test_clipped_logits_equal_the_threshold[{{}}]"
GRIDS = "tests/parity/test_qk_clip.py::test_every_grid_equals_single_process[{}]"
LOGITS = "megatron.models.common.qk_clip:AttentionLogits"
METER = "megatron.models.common.logit_meter:LogitMeter"


@mutant(f"{LOGITS}.__init__", GRIDS.format("llama-1-1-1-2-plain"))
def maximum_is_not_reduced_over_context_ranks(original: Any) -> Any:
    def reduce_over_data(logits: Any) -> None:
        logits._grid = replace(logits._grid, data_context=logits._grid.data)

    return call_after_init(original, reduce_over_data)


@mutant(f"{LOGITS}.__init__", GRIDS.format("latents-dense-1-1-2-1-zero-stage-1"))
def maximum_is_not_reduced_over_replicas(original: Any) -> Any:
    """Each replica scales its shards by the maximum over its own samples."""

    def reduce_over_context(logits: Any) -> None:
        logits._grid = replace(logits._grid, data_context=logits._grid.context)

    return call_after_init(original, reduce_over_context)


@mutant(f"{METER}._measure", MAXIMA)
def maximum_is_that_of_the_last_micro_batch(original: Any) -> Any:
    def measure(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.maxima is not None:
            self.maxima.fill_(-torch.inf)
        original(self, *args, **kwargs)

    return measure


@mutant(f"{METER}.__init__", GRIDS.format("llama-1-1-1-2-cp-comm-type-a2a-recompute-granularity-selective"))
def exchanged_heads_are_taken_for_the_first_heads(original: Any) -> Any:
    def ignore_heads(meter: Any) -> None:
        meter._parallel = replace(meter._parallel, cp_comm_type="all_gather")

    return call_after_init(original, ignore_heads)


@mutant(
    "megatron.optim.optimizer:MixedPrecisionOptimizer.step",
    f"{ONE_PROCESS}::test_skipped_step_does_not_clip[False]",
    f"{ONE_PROCESS}::test_skipped_step_does_not_clip[True]",
)
def skipped_steps_clip(original: Any) -> Any:
    def step(self: Any, closure: None = None) -> None:
        original(self, closure)
        if (self.overflow or self.was_rejected) and self.after_update is not None:
            self.after_update()

    return step


@mutant(
    "megatron.optim.optimizer:MixedPrecisionOptimizer.step",
    f"{ONE_PROCESS}::test_16_bit_weights_are_the_rounded_main_params",
)
def weights_are_rounded_before_they_are_clipped(original: Any) -> Any:
    def step(self: Any, closure: None = None) -> None:
        clip, self.after_update = self.after_update, None
        original(self, closure)
        self.after_update = clip
        if clip is not None and not (self.overflow or self.was_rejected):
            clip()

    return step


@mutant(
    "megatron.models.common.attention:SelfAttention.query_key_factors",
    THRESHOLD.format("grouped, with biases"),
    f"{ONE_PROCESS}::test_factors_of_query_groups",
)
def key_of_a_group_is_clipped_twice(original: Any) -> Any:
    """The key is scaled once for each of two query heads."""

    def factors(self: Any, eta: torch.Tensor, alpha: float) -> Iterator[Any]:
        for parameter, rows in original(self, eta, alpha):
            by_group = rows.clone().view(self.num_groups, -1)
            by_group[:, -self.value_size - self.head_size : -self.value_size].square_()
            yield parameter, by_group.flatten()

    return factors


@mutant(
    "megatron.models.common.attention:SelfAttention.query_key_factors",
    THRESHOLD.format("grouped, with biases"),
)
def biases_are_not_clipped(original: Any) -> Any:
    return lambda self, eta, alpha: list(original(self, eta, alpha))[:1]


@mutant("megatron.models.common.latent_attention:LatentAttention.query_key_factors", THRESHOLD.format("latents"))
def rotated_queries_are_scaled_as_the_other_part(original: Any) -> Any:
    """The shared rotated key is not scaled, so that part of the logit would exceed the threshold."""

    def factors(self: Any, eta: torch.Tensor, alpha: float) -> Iterator[Any]:
        (query, rows), *others = original(self, eta, alpha)
        by_head = rows.clone().view(len(eta), -1)
        by_head[:, self.part_sizes[0] :] = by_head[:, :1]
        yield query, by_head.flatten()
        yield from others

    return factors


@mutant("megatron.optim.param_store:ParamStore.scale_rows", "tests/optim/test_scaled_rows.py")
def shards_are_scaled_by_the_factors_of_the_first_rows(original: Any) -> Any:
    def scale(self: Any, parameter: Any, factors: torch.Tensor) -> None:
        main_param = self.main_params[parameter]
        main_param.data.mul_(factors[: len(main_param)].view(-1, *[1] * (main_param.dim() - 1)))

    return scale
