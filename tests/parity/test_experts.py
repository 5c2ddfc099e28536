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
from tests.helpers.layouts import GLOBAL_BATCH, SEQ, VOCAB, batches, check_fp64, difference, flags, serial, trace_rank

SIZES = "--fp64 --disable-bias-linear --clip-grad 0.5 --num-experts 4 --moe-ffn-hidden-size 24"
BALANCED = f"{SIZES} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --eod-mask-loss"
DEEPSEEK = (
    f"{SIZES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-layer-freq [0,1,1,1] "
    "--moe-aux-loss-coeff 0.05"
)
CAPACITY = f"{BALANCED} --moe-expert-capacity-factor 0.8"
POSITION = f"{CAPACITY} --moe-token-drop-policy position"
SLOW = pytest.mark.slow
CUT, RECOMPUTED, ZERO = "--sequence-parallel", "--checkpoint-activations", "--zero-stage"
EP, WHOLE_EXPERTS = "--expert-model-parallel-size", "--expert-tensor-parallel-size 1"
LAYOUTS = [
    (DEEPSEEK, (1, 2, 2), RECOMPUTED, 1),
    (BALANCED, (2, 1, 2), f"{EP} 2 {CUT} {ZERO} 1", 1),
    (CAPACITY, (1, 1, 1), "", 2),
    *(
        pytest.param(*each, marks=SLOW)
        for each in (
            (CAPACITY, (2, 1, 1), CUT, 2),
            (BALANCED, (2, 1, 2), CUT, 1),
            (BALANCED, (2, 1, 1), "", 1),
            (BALANCED, (1, 1, 2), "", 1),
            (BALANCED, (1, 4, 1), "", 1),
            (BALANCED, (1, 2, 1), "--pipeline-schedule gpipe", 1),
            (BALANCED, (1, 2, 1), "--pipeline-schedule zb-h1", 1),
            (BALANCED, (1, 2, 2), "--pipeline-chunks 2", 1),
            (BALANCED, (2, 2, 1), f"{CUT} {RECOMPUTED}", 1),
            (BALANCED, (1, 1, 4), f"{ZERO} 1", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 2", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 3", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 3 {RECOMPUTED}", 1),
            (DEEPSEEK, (2, 2, 1), CUT, 1),
            (DEEPSEEK, (2, 1, 2), f"{CUT} {ZERO} 1", 1),
            (DEEPSEEK, (1, 1, 1), "--cp-comm-type a2a", 2),
            (DEEPSEEK, (1, 2, 1), "", 2),
            (CAPACITY, (1, 2, 2), "", 1),
            (POSITION, (2, 1, 1), CUT, 2),
            (POSITION, (1, 1, 2), "", 1),
            (BALANCED, (2, 1, 2), "--optimizer muon", 1),
            (DEEPSEEK, (2, 1, 1), f"{CUT} {WHOLE_EXPERTS}", 1),
            (BALANCED, (1, 1, 2), f"{EP} 2", 1),
            (BALANCED, (1, 2, 2), f"{EP} 2 {RECOMPUTED}", 1),
            (BALANCED, (1, 2, 2), f"{EP} 2 --pipeline-schedule zb-h1", 1),
            (BALANCED, (1, 2, 2), f"{EP} 2 --pipeline-chunks 2 {ZERO} 1", 1),
            (BALANCED, (1, 1, 4), f"{EP} 2 {ZERO} 1", 1),
            (BALANCED, (1, 1, 4), f"{EP} 4 --no-overlap-grad-reduce", 1),
            (DEEPSEEK, (1, 1, 4), f"{EP} 4 {ZERO} 1", 1),
            (DEEPSEEK, (2, 2, 2), f"{EP} 2 {CUT}", 1),
            (BALANCED, (2, 1, 4), f"{EP} 4 {CUT} {ZERO} 1", 1),
            (DEEPSEEK, (1, 2, 4), f"{EP} 4", 1),
            (DEEPSEEK, (2, 1, 2), f"{EP} 2 {CUT} {WHOLE_EXPERTS}", 1),
            (BALANCED, (1, 1, 1), f"{EP} 2", 2),
            (CAPACITY, (1, 1, 2), f"{EP} 4 {ZERO} 1", 2),
            (POSITION, (2, 1, 1), f"{EP} 2 {CUT}", 2),
            (BALANCED, (2, 1, 2), f"{EP} 2 --optimizer muon", 1),
        )
    ),
]  # fmt: skip


NAMES = {BALANCED: "balanced", DEEPSEEK: "deepseek", CAPACITY: "capacity", POSITION: "position"}


def name_of(case: Any) -> str:
    """Return a short name of a case, such as ``balanced-2-1-2-cut-1``."""
    model, layout, extra, context = getattr(case, "values", case)
    words = extra.replace(CUT, "cut").replace(RECOMPUTED, "recomputed").replace(EP, "ep").replace("--", "").split()
    return "-".join([NAMES[model], *map(str, layout), *words, str(context)])


@pytest.mark.parametrize(("model", "layout", "extra", "context"), LAYOUTS, ids=map(name_of, LAYOUTS))
def test_every_layout_is_one_process(model: str, layout: tuple[int, int, int], extra: str, context: int) -> None:
    tensor, pipe, data = layout
    if "muon" in extra:
        model, extra = f"{model} --optimizer muon", extra.replace("--optimizer muon", "")
    check_fp64(difference(tensor, pipe, data, 2, model, extra, context=context))


@pytest.mark.slow
def test_sums_that_leave_parts_and_weights_that_come_late_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL does with ZeRO 1: gradients of the rest are reduce-scattered, those of experts are not."""
    reference = serial(*batches(1, 2), BALANCED)
    monkeypatch.setattr(grad_buffer, "SCATTERS", True)
    monkeypatch.setattr(param_gather, "GATHERS_LATER", True)
    for tensor, pipe, data, extra in ((1, 1, 4, f"{EP} 2"), (2, 1, 2, f"{EP} 2 {CUT}"), (1, 2, 2, f"{EP} 2")):
        micro, gas = batches(data, 2)
        argv = flags(tensor, pipe, micro=micro, gas=gas, extra=f"{BALANCED} {extra} {ZERO} 1")
        size = tensor * pipe * data
        check_fp64(compare(reference, run_ranks(size, trace_rank, argv, size, 3, 0)))


@pytest.mark.parametrize("gas", [4, pytest.param(16, marks=SLOW)])
def test_the_number_of_micro_batches_changes_nothing(gas: int) -> None:
    """The balance loss is that of the global batch, and capacity that of a sample."""
    for model in (CAPACITY, DEEPSEEK):
        whole = serial(GLOBAL_BATCH, 1, model)
        check_fp64(compare(whole, [serial(*batches(1, gas), model)]))
        *chosen, dropped = whole.choices[0].T
        assert all(sum(chosen) == GLOBAL_BATCH * SEQ * 2)
        assert all(dropped > 0) == (model == CAPACITY) and len(dropped) == (4 if model == CAPACITY else 3)


# Experts that get all tokens or none, and scores that are equal.

FORCED = (
    f"{SIZES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
    "--moe-aux-loss-coeff 0.1"
)
BIASES = {"ties": [0.0, 0.0, 0.0, 0.0], "first and last": [5.0, 0.0, 0.0, 9.0], "the last two": [0.0, 0.0, 5.0, 5.0]}


def provider(kind: str) -> torch.nn.Module:
    """Return this rank's model, whose routers choose by ``kind``."""
    model = pretrain_gpt2.model_provider()
    for router in model.modules():
        if isinstance(router, Router):
            assert router.expert_bias is not None
            router.expert_bias.data.copy_(torch.tensor(BIASES[kind]))
            if kind == "ties":
                router.weight.data.zero_()
                set_uninitialized(router.weight, False)
    return model


def forced(rank: int, argv: list[str], size: int, kind: str) -> Trace:
    """Train two steps; the first moves routers away from ties."""
    config = parse(argv, world_size=size).with_vocab(VOCAB)
    here = initialize.start(config)
    data = MockTokens(VOCAB, SEQ, seed=7)
    return trace_steps(config, here, data, partial(provider, kind), pretrain_gpt2.forward_step, steps=2)


@pytest.mark.parametrize("kind", ["ties", *(pytest.param(kind, marks=SLOW) for kind in list(BIASES)[1:])])
@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1, 2), f"{EP} 2"),
        pytest.param((1, 1, 4), f"{EP} 4 {ZERO} 1", marks=SLOW),
        pytest.param((2, 1, 2), f"{EP} 2 {CUT}", marks=SLOW),
        pytest.param((1, 2, 2), f"{EP} 2 {RECOMPUTED}", marks=SLOW),
    ],
    ids=["2", "4", "2-cut", "2-stages"],
)
def test_experts_may_have_all_tokens_or_none(layout: tuple[int, int, int], extra: str, kind: str) -> None:
    tensor, pipe, data = layout
    one = flags(1, 1, micro=GLOBAL_BATCH // 2, gas=2, extra=FORCED)
    micro, gas = batches(data, 2)
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=f"{FORCED} {extra}")
    (reference,) = run_ranks(1, forced, one, 1, kind)
    size = tensor * pipe * data
    check_fp64(compare(reference, run_ranks(size, forced, argv, size, kind)))


# A loss that a script returns as a mean over the tokens of its micro-batch.


def mean_of(loss: Any) -> torch.Tensor:
    """Return a loss (sum, count) as the mean over the tokens of this rank's micro-batch."""
    pair = as_weighted(loss)
    return pair.total / pair.count


def mean_forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    loss, _ = pretrain_gpt2.forward_step(data_iterator, model)
    return mean_of(loss), {}


def provider_of_means(weighting: str = "micro-batches") -> torch.nn.Module:
    """Return this rank's model; the loss function of a pipeline returns means, as its model declares."""
    model: Any = pretrain_gpt2.model_provider()
    if hasattr(model, "loss_fn"):
        loss_fn, model.loss_weighting = model.loss_fn, weighting
        model.loss_fn = lambda output, labels: mean_of(loss_fn(output, labels))
    return model


def trained_on_means(rank: int, argv: list[str], size: int, weighting: str = "micro-batches") -> Trace:
    config = parse(argv, world_size=size).with_vocab(VOCAB)
    here = initialize.start(config)
    data, provider = MockTokens(VOCAB, config.batch.seq_length, seed=7), partial(provider_of_means, weighting)
    return trace_steps(config, here, data, provider, mean_forward_step, steps=1)


MEANS = f"{SIZES} --num-layers 2 --seq-length 12 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"


@functools.cache
def one_process_on_means() -> Trace:
    return run_ranks(1, trained_on_means, flags(1, 1, micro=GLOBAL_BATCH // 2, gas=2, extra=MEANS), 1)[0]


@pytest.mark.parametrize(
    ("pipe", "data", "context"),
    [(1, 1, 2), (2, 1, 1), pytest.param(1, 2, 1, marks=SLOW), pytest.param(2, 2, 2, marks=SLOW)],
    ids=["context", "stages", "replicas", "stages, replicas and context"],
)
def test_router_losses_next_to_a_mean_have_the_weight_of_one_process(pipe: int, data: int, context: int) -> None:
    """A mean over tokens gives each token the weight 1 / tokens of this rank, and so must the losses of routers."""
    micro, gas = batches(data, 2)
    argv = flags(1, pipe, micro=micro, gas=gas, extra=f"{MEANS} --context-parallel-size {context}")
    size = pipe * data * context
    check_fp64(compare(one_process_on_means(), run_ranks(size, trained_on_means, argv, size)))


@pytest.mark.slow
def test_a_pipeline_with_experts_rejects_a_loss_of_another_form_than_declared() -> None:
    argv = flags(1, 2, micro=4, gas=4, extra=MEANS)
    with pytest.raises(RankFailure, match='Set loss_weighting = "micro-batches" on the model'):
        run_ranks(2, trained_on_means, argv, 2, "tokens")
