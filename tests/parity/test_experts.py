"""Models with experts in every layout: the losses, those of the balance too, and every gradient of one process.

The router's bias, its shares of the batch before and its weights move in each step, so that a choice that differs in
one layout shows in the losses of the next.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.models.common.router import Router
from megatron.mpu.shard import set_uninitialized
from megatron.optim.gradients import buffer as grad_buffer
from megatron.optim.zero import param_gather
from megatron.training import initialize
from megatron.training.loss_forms import as_weighted
from megatron.training.parity import Trace, compare, trace_steps
from tests.helpers.harness import RankFailure, run_ranks
from tests.helpers.layouts import (
    GLOBAL_BATCH,
    SEQ,
    VOCAB,
    check_fp64,
    compare_layout,
    make_flags,
    split_global_batch,
    trace_one_process,
    trace_rank,
)

SIZES = "--fp64 --disable-bias-linear --clip-grad 0.5 --num-experts 4 --moe-ffn-hidden-size 24"
BALANCED = f"{SIZES} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --eod-mask-loss"
DEEPSEEK = (
    f"{SIZES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-layer-freq [0,1,1,1] "
    "--moe-aux-loss-coeff 0.05"
)
RESIDUAL = (
    f"{SIZES} --topk 1 --mlp-type residual --expert-interval 2 --moe-loss-coeff 0.1 --moe-train-capacity-factor 1.2 "
    "--moe-min-capacity 2"
)
CAPACITY = f"{BALANCED} --moe-expert-capacity-factor 0.8"
POSITION = f"{CAPACITY} --moe-token-drop-policy position"
RANDOM = f"{CAPACITY} --moe-token-drop-policy random --moe-eval-capacity-factor 1.2 --moe-min-capacity 2"
SLOW = pytest.mark.slow
SEQUENCE_PARALLEL, RECOMPUTED, ZERO = "--sequence-parallel", "--checkpoint-activations", "--zero-stage"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
UNSHARDED_EXPERTS = f"{SEQUENCE_PARALLEL} {ETP} 1"
BIASES = f"{BALANCED} --hidden-bias"
LAYOUTS = [
    (DEEPSEEK, (1, 2, 2), RECOMPUTED, 1),
    (BALANCED, (2, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL} {ZERO} 1", 1),
    (CAPACITY, (1, 1, 1), "", 2),
    (BALANCED, (1, 1, 4), f"{EP} 2 {ZERO} 1 --optimizer muon", 1),
    (BALANCED, (2, 1, 1), f"{EP} 2 {UNSHARDED_EXPERTS}", 1),
    (BIASES, (4, 1, 1), f"{SEQUENCE_PARALLEL} {ETP} 2", 1),
    (RESIDUAL, (2, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL} {ZERO} 1 {RECOMPUTED}", 1),
    *(
        pytest.param(*case, marks=SLOW)
        for case in (
            (CAPACITY, (2, 1, 1), SEQUENCE_PARALLEL, 2),
            (BALANCED, (2, 1, 2), SEQUENCE_PARALLEL, 1),
            (BALANCED, (2, 1, 1), "", 1),
            (BALANCED, (1, 1, 2), "", 1),
            (BALANCED, (1, 4, 1), "", 1),
            (BALANCED, (1, 2, 1), "--pipeline-schedule gpipe", 1),
            (BALANCED, (1, 2, 1), "--pipeline-schedule zb-h1", 1),
            (BALANCED, (1, 2, 2), "--pipeline-chunks 2", 1),
            (BALANCED, (2, 2, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTED}", 1),
            (BALANCED, (1, 1, 4), f"{ZERO} 1", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 2", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 3", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 3 {RECOMPUTED}", 1),
            (DEEPSEEK, (2, 2, 1), SEQUENCE_PARALLEL, 1),
            (DEEPSEEK, (2, 1, 2), f"{SEQUENCE_PARALLEL} {ZERO} 1", 1),
            (DEEPSEEK, (1, 1, 1), "--cp-comm-type a2a", 2),
            (DEEPSEEK, (1, 2, 1), "", 2),
            (CAPACITY, (1, 2, 2), "", 1),
            (POSITION, (2, 1, 1), SEQUENCE_PARALLEL, 2),
            (RANDOM, (2, 1, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTED}", 2),
            (RANDOM, (1, 2, 2), f"{EP} 2", 1),
            (POSITION, (1, 1, 2), "", 1),
            (RESIDUAL, (2, 1, 1), "", 1),
            (RESIDUAL, (2, 1, 1), SEQUENCE_PARALLEL, 2),
            (RESIDUAL, (1, 2, 2), f"{EP} 2", 1),
            (RESIDUAL, (2, 2, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTED}", 1),
            (RESIDUAL, (1, 2, 1), "--pipeline-schedule zb-h1", 1),
            (RESIDUAL, (1, 1, 2), f"{EP} 4 {ZERO} 1", 2),
            (RESIDUAL, (1, 1, 4), f"{EP} 2 {ZERO} 2", 1),
            (RESIDUAL, (2, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL} {ZERO} 3", 1),
            (RESIDUAL, (1, 1, 2), f"{ZERO} 3 {RECOMPUTED}", 1),
            (RESIDUAL, (2, 1, 2), f"{EP} 2 {UNSHARDED_EXPERTS} {ZERO} 2", 1),
            (RESIDUAL, (2, 1, 2), f"{SEQUENCE_PARALLEL} --optimizer muon", 1),
            (BALANCED, (2, 1, 2), "--optimizer muon", 1),
            (DEEPSEEK, (2, 1, 1), UNSHARDED_EXPERTS, 1),
            (BALANCED, (1, 1, 2), f"{EP} 2", 1),
            (BALANCED, (1, 2, 2), f"{EP} 2 {RECOMPUTED}", 1),
            (BALANCED, (1, 2, 2), f"{EP} 2 --pipeline-schedule zb-h1", 1),
            (BALANCED, (1, 2, 2), f"{EP} 2 --pipeline-chunks 2 {ZERO} 1", 1),
            (BALANCED, (1, 1, 4), f"{EP} 2 {ZERO} 1", 1),
            (BALANCED, (1, 1, 4), f"{EP} 4 --no-overlap-grad-reduce", 1),
            (DEEPSEEK, (1, 1, 4), f"{EP} 4 {ZERO} 1", 1),
            (DEEPSEEK, (2, 2, 2), f"{EP} 2 {SEQUENCE_PARALLEL}", 1),
            (BALANCED, (2, 1, 4), f"{EP} 4 {SEQUENCE_PARALLEL} {ZERO} 1", 1),
            (DEEPSEEK, (1, 2, 4), f"{EP} 4", 1),
            (DEEPSEEK, (2, 1, 2), f"{EP} 2 {UNSHARDED_EXPERTS}", 1),
            *(
                (model, layout, f"{SEQUENCE_PARALLEL} {ETP} 2 {extra}".strip(), context)
                for model, layout, extra, context in (
                    (BIASES, (4, 1, 1), f"{EP} 2", 1),
                    (DEEPSEEK, (4, 1, 2), f"{EP} 2 {ZERO} 1", 1),
                    (BALANCED, (4, 1, 2), f"{EP} 4 {ZERO} 2", 1),
                    (BALANCED, (4, 1, 2), f"{EP} 2 {ZERO} 3", 1),
                    (DEEPSEEK, (4, 1, 1), f"{EP} 4 --cp-comm-type all_gather", 2),
                    (CAPACITY, (4, 1, 1), f"{EP} 2 {RECOMPUTED}", 2),
                    (DEEPSEEK, (4, 2, 1), f"{EP} 2", 1),
                    (BALANCED, (4, 2, 1), "--pipeline-schedule zb-h1", 1),
                    (BALANCED, (4, 1, 2), f"{EP} 2 {ZERO} 1 --optimizer muon", 1),
                    (BALANCED, (4, 1, 1), "--optimizer muon", 1),
                )
            ),
            (BIASES, (2, 1, 2), f"{EP} 4 {UNSHARDED_EXPERTS} {ZERO} 1", 1),
            (BALANCED, (2, 2, 1), f"{UNSHARDED_EXPERTS} {ZERO} 2 --optimizer muon", 1),
            (DEEPSEEK, (2, 2, 2), f"{EP} 2 {UNSHARDED_EXPERTS} {ZERO} 3", 1),
            (BALANCED, (2, 1, 1), f"{EP} 4 {UNSHARDED_EXPERTS}", 2),
            (BALANCED, (1, 1, 1), f"{EP} 2", 2),
            (CAPACITY, (1, 1, 2), f"{EP} 4 {ZERO} 1", 2),
            (POSITION, (2, 1, 1), f"{EP} 2 {SEQUENCE_PARALLEL}", 2),
            (BALANCED, (2, 1, 2), f"{EP} 2 --optimizer muon", 1),
            (BALANCED, (2, 1, 2), f"{EP} 2 {ZERO} 1 {SEQUENCE_PARALLEL} --optimizer muon", 1),
            (BALANCED, (1, 2, 4), f"{EP} 2 {ZERO} 1 --optimizer muon", 1),
            (BALANCED, (1, 1, 4), f"{EP} 2 {ZERO} 3 --optimizer muon", 1),
            (BALANCED, (1, 2, 4), f"{EP} 2 {ZERO} 2 --optimizer muon", 1),
            (BALANCED, (1, 1, 2), f"{EP} 2 {ZERO} 1 --optimizer muon", 2),
            (DEEPSEEK, (2, 1, 2), f"{EP} 2 {ZERO} 1 {UNSHARDED_EXPERTS} --optimizer muon", 1),
        )
    ),
]  # fmt: skip


MODEL_NAMES = {
    BALANCED: "balanced",
    BIASES: "biases",
    DEEPSEEK: "deepseek",
    CAPACITY: "capacity",
    POSITION: "position",
    RANDOM: "random",
    RESIDUAL: "residual",
}


def case_id(case: Any) -> str:
    """Return a short name of a case, such as ``balanced-2-1-2-cut-1``."""
    model, layout, extra, context = getattr(case, "values", case)
    words = (
        extra.replace(SEQUENCE_PARALLEL, "cut")
        .replace(ETP, "etp")
        .replace(RECOMPUTED, "recomputed")
        .replace(EP, "ep")
        .replace("--", "")
        .split()
    )
    return "-".join([MODEL_NAMES[model], *map(str, layout), *words, str(context)])


@pytest.mark.parametrize(("model", "layout", "extra", "context"), LAYOUTS, ids=map(case_id, LAYOUTS))
def test_every_layout_equals_single_process(model: str, layout: tuple[int, int, int], extra: str, context: int) -> None:
    tensor, pipe, data = layout
    if "muon" in extra:
        model, extra = f"{model} --optimizer muon", extra.replace("--optimizer muon", "")
    check_fp64(compare_layout(tensor, pipe, data, 2, model, extra, context=context))


@pytest.mark.slow
def test_reduce_scatter_and_deferred_gather_equal_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL does with ZeRO 1: gradients of the rest are reduce-scattered, those of experts are not."""
    reference = trace_one_process(*split_global_batch(1, 2), BALANCED)
    monkeypatch.setattr(grad_buffer, "USE_REDUCE_SCATTER", True)
    monkeypatch.setattr(param_gather, "DEFER_GATHER", True)
    for tensor, pipe, data, extra in (
        (1, 1, 4, f"{EP} 2"),
        (2, 1, 2, f"{EP} 2 {SEQUENCE_PARALLEL}"),
        (1, 2, 2, f"{EP} 2"),
    ):
        micro, gas = split_global_batch(data, 2)
        argv = make_flags(tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"{BALANCED} {extra} {ZERO} 1")
        size = tensor * pipe * data
        check_fp64(compare(reference, run_ranks(size, trace_rank, argv, size, 3, 0)))


@pytest.mark.parametrize("gas", [4, pytest.param(16, marks=SLOW)])
def test_number_of_micro_batches_does_not_change_training(gas: int) -> None:
    """The balance loss is that of the global batch, and capacity that of a sample."""
    for model in (CAPACITY, DEEPSEEK):
        reference = trace_one_process(GLOBAL_BATCH, 1, model)
        check_fp64(compare(reference, [trace_one_process(*split_global_batch(1, gas), model)]))
        *num_chosen, num_dropped = reference.expert_tokens[0].T
        assert all(sum(num_chosen) == GLOBAL_BATCH * SEQ * 2)
        assert all(num_dropped > 0) == (model == CAPACITY) and len(num_dropped) == (4 if model == CAPACITY else 3)


# Experts that get all tokens or none, and scores that are equal.

FORCED = (
    f"{SIZES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
    "--moe-aux-loss-coeff 0.1"
)
BIASES = {"ties": [0.0, 0.0, 0.0, 0.0], "first and last": [5.0, 0.0, 0.0, 9.0], "the last two": [0.0, 0.0, 5.0, 5.0]}


def forced_provider(bias: str) -> torch.nn.Module:
    """Return this rank's model, whose routers choose by ``bias``."""
    model = pretrain_gpt2.model_provider()
    for router in model.modules():
        if isinstance(router, Router):
            assert router.expert_bias is not None
            router.expert_bias.data.copy_(torch.tensor(BIASES[bias]))
            if bias == "ties":
                router.weight.data.zero_()
                set_uninitialized(router.weight, False)
    return model


def train_forced(rank: int, argv: list[str], size: int, bias: str) -> Trace:
    """Train two steps; the first moves routers away from ties."""
    config = parse(argv, world_size=size).with_vocab(VOCAB)
    world = initialize.start(config)
    data = MockTokens(VOCAB, SEQ, seed=7)
    return trace_steps(config, world, data, partial(forced_provider, bias), pretrain_gpt2.forward_step, num_steps=2)


@pytest.mark.parametrize("bias", ["ties", *(pytest.param(bias, marks=SLOW) for bias in list(BIASES)[1:])])
@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1, 2), f"{EP} 2"),
        pytest.param((1, 1, 4), f"{EP} 4 {ZERO} 1", marks=SLOW),
        pytest.param((2, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL}", marks=SLOW),
        pytest.param((1, 2, 2), f"{EP} 2 {RECOMPUTED}", marks=SLOW),
    ],
    ids=["2", "4", "2-cut", "2-stages"],
)
def test_experts_may_get_all_tokens_or_none(layout: tuple[int, int, int], extra: str, bias: str) -> None:
    tensor, pipe, data = layout
    serial_argv = make_flags(1, 1, micro_batch_size=GLOBAL_BATCH // 2, gas=2, extra=FORCED)
    micro, gas = split_global_batch(data, 2)
    argv = make_flags(tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"{FORCED} {extra}")
    (reference,) = run_ranks(1, train_forced, serial_argv, 1, bias)
    size = tensor * pipe * data
    check_fp64(compare(reference, run_ranks(size, train_forced, argv, size, bias)))


# A loss that a script returns as a mean over the tokens of its micro-batch.


def mean_of(loss: Any) -> torch.Tensor:
    """Return a loss (sum, count) as the mean over the tokens of this rank's micro-batch."""
    pair = as_weighted(loss)
    return pair.total / pair.count


def mean_forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    loss, _ = pretrain_gpt2.forward_step(data_iterator, model)
    return mean_of(loss), {}


def mean_loss_provider(weighting: str = "micro-batches") -> torch.nn.Module:
    """Return this rank's model; the loss function of a pipeline returns means, as its model declares."""
    model: Any = pretrain_gpt2.model_provider()
    if hasattr(model, "loss_fn"):
        loss_fn, model.loss_weighting = model.loss_fn, weighting
        model.loss_fn = lambda output, labels: mean_of(loss_fn(output, labels))
    return model


def train_on_means(rank: int, argv: list[str], size: int, weighting: str = "micro-batches") -> Trace:
    config = parse(argv, world_size=size).with_vocab(VOCAB)
    world = initialize.start(config)
    data, provider = MockTokens(VOCAB, config.batch.seq_length, seed=7), partial(mean_loss_provider, weighting)
    return trace_steps(config, world, data, provider, mean_forward_step, num_steps=1)


MEAN_LOSS_FLAGS = f"{SIZES} --num-layers 2 --seq-length 12 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"


@functools.cache
def serial_mean_trace() -> Trace:
    return run_ranks(
        1, train_on_means, make_flags(1, 1, micro_batch_size=GLOBAL_BATCH // 2, gas=2, extra=MEAN_LOSS_FLAGS), 1
    )[0]


@pytest.mark.parametrize(
    ("pipe", "data", "context"),
    [(1, 1, 2), (2, 1, 1), pytest.param(1, 2, 1, marks=SLOW), pytest.param(2, 2, 2, marks=SLOW)],
    ids=["context", "stages", "replicas", "stages, replicas and context"],
)
def test_router_losses_with_mean_loss_equal_single_process(pipe: int, data: int, context: int) -> None:
    """A mean over tokens gives each token the weight 1 / tokens of this rank, and so must the losses of routers."""
    micro, gas = split_global_batch(data, 2)
    argv = make_flags(
        1, pipe, micro_batch_size=micro, gas=gas, extra=f"{MEAN_LOSS_FLAGS} --context-parallel-size {context}"
    )
    size = pipe * data * context
    check_fp64(compare(serial_mean_trace(), run_ranks(size, train_on_means, argv, size)))


@pytest.mark.slow
def test_pipeline_rejects_loss_form_that_differs_from_declaration() -> None:
    argv = make_flags(1, 2, micro_batch_size=4, gas=4, extra=MEAN_LOSS_FLAGS)
    with pytest.raises(RankFailure, match='Set loss_weighting = "micro-batches" on the model'):
        run_ranks(2, train_on_means, argv, 2, "tokens")
