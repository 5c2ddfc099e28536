"""--loss-average micro-batch: the mean of the micro-batches' means, as Megatron-LM's without per-token loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt2
from megatron.checkpoint import named_parameters
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.models.bert.model import BertModelArgs, bert_loss
from megatron.models.common.parallel_context import ParallelContext
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.loss_forms import mean_of_micro_batch, token_weight
from megatron.training.mock_data import mock_tokenizer
from megatron.training.parity import compare
from megatron.training.setup import build_engine, make_streams
from tds.loss import Weighted
from tests.helpers import t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import SEQ, VOCAB, check_fp64, make_flags, trace_layout, trace_one_process
from tests.helpers.whole import group_of_all_ranks
from tests.parity import bert_runs

MASKED = "--fp64 --eod-mask-loss --loss-average micro-batch"
BY_TOKEN = "--fp64 --eod-mask-loss --loss-average token"


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_only_trained_loss_becomes_mean() -> None:
    pair = Weighted(scalar(6.0), scalar(3.0))
    assert mean_of_micro_batch(pair).item() == 2.0
    assert mean_of_micro_batch(Weighted(scalar(6.0), 4)).item() == 1.5
    assert mean_of_micro_batch(scalar(5.0)).item() == 5.0
    losses = mean_of_micro_batch({"z": pair, "loss": pair})
    assert list(losses) == ["loss", "z"] and losses["loss"].item() == 2.0 and losses["z"] is pair
    assert mean_of_micro_batch(Weighted(scalar(0.0), scalar(0.0))).item() == 0.0, (
        "as Megatron's clamp(num_tokens, min=1)"
    )


def test_router_divisor_is_all_tokens_of_mean_micro_batch_count() -> None:
    grid: Any = SimpleNamespace(data_context=SimpleNamespace(size=4))
    assert token_weight(64 * 2.5, grid, is_mean=True) == 40.0
    assert token_weight(64 * 3.0, grid, is_mean=False) == token_weight(64 * 2.9, grid, is_mean=False) == 256.0


HandComputed = tuple[list[tuple[float, float]], float, float, dict[str, torch.Tensor]]


def compute_gradients_by_hand(rank: int, argv: list[str]) -> HandComputed:
    """Return (sum, count) of each micro-batch of the first step, both averages, and the gradient of the means' mean.

    Plain autograd on the single-stage model, without an engine's step.
    """
    config = parse(argv, world_size=1).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    batches = RunData({"train": MockTokens(VOCAB, SEQ, seed=7)}, None).batches("train", config, world)
    parameters = dict(named_parameters(engine.module))
    pairs, mean_gradients = [], {name: torch.zeros_like(weight) for name, weight in parameters.items()}
    for _ in range(config.batch.gas):
        total, count = engine.module(**pretrain_gpt2.get_batch(next(batches)))
        pairs.append((total.item(), float(count)))
        for name, gradient in zip(
            parameters, torch.autograd.grad(total / count, list(parameters.values())), strict=True
        ):
            mean_gradients[name] += gradient / config.batch.gas
    by_token = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    by_micro_batch = sum(total / count for total, count in pairs) / len(pairs)
    return pairs, by_token, by_micro_batch, {name: gradient.detach() for name, gradient in mean_gradients.items()}


def test_single_process_trains_on_mean_of_micro_batch_means() -> None:
    argv = make_flags(1, 1, micro_batch_size=2, gas=3, extra=MASKED)
    ((pairs, by_token, by_micro_batch, gradients),) = run_ranks(1, compute_gradients_by_hand, argv)
    assert len({count for _, count in pairs}) > 1 and abs(by_token - by_micro_batch) > 1e-6
    trace = trace_one_process(2, 3, MASKED, steps=1, eval_every=1)
    assert trace.losses[0] == pytest.approx(by_micro_batch, rel=1e-14)
    assert trace_one_process(2, 3, BY_TOKEN, steps=1, eval_every=1).losses[0] == pytest.approx(by_token, rel=1e-14)
    for name, (shard, gradient) in trace.gradients.items():
        torch.testing.assert_close(gradient, shard.unpadded(gradients[name]), rtol=1e-11, atol=1e-14, msg=name)


def check_against_single_process(
    tensor: int, pipe: int, data: int, context: int, gas: int, extra: str, layout_flags: str
) -> None:
    """Compare a layout with one process that has the same micro-batches."""
    reference = trace_one_process(2, gas * data, extra, steps=2, eval_every=2)
    ranks = trace_layout(tensor, pipe, data, 2, gas, f"{extra} {layout_flags}", steps=2, eval_every=2, context=context)
    check_fp64(compare(reference, ranks))
    for trace in ranks:
        assert trace.eval_losses == pytest.approx(reference.eval_losses, rel=1e-12)


CHUNKED = f"{MASKED} --z-loss 1e-2 --loss-chunk-tokens 5"
EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "gas", "extra", "layout_flags"),
    [
        (1, 1, 2, 2, MASKED, "--zero-stage 1"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, 2, 1, 3, CHUNKED, ""),
                (2, 1, 1, 3, CHUNKED, "--sequence-parallel"),
                (2, 2, 1, 3, MASKED, ""),
                (1, 2, 2, 2, MASKED, "--zero-stage 1"),
                (1, 1, 2, 2, MASKED, "--zero-stage 3"),
                (1, 2, 1, 4, MASKED, "--pipeline-schedule gpipe"),
                (1, 2, 1, 4, CHUNKED, "--pipeline-schedule zb-h1"),
                (1, 2, 1, 4, MASKED, "--pipeline-schedule interleaved --pipeline-chunks 2"),
                (1, 2, 1, 4, MASKED, "--pipeline-schedule zb-v"),
                (1, 2, 1, 4, MASKED, "--pipeline-schedule dualpipev"),
                (1, 1, 2, 2, f"{MASKED} {EXPERTS}", "--expert-model-parallel-size 2"),
                (1, 2, 2, 2, f"{MASKED} {EXPERTS}", ""),
            )
        ),
    ],
)
def test_layouts_with_same_micro_batches_are_equal(
    tensor: int, pipe: int, data: int, gas: int, extra: str, layout_flags: str
) -> None:
    check_against_single_process(tensor, pipe, data, 1, gas, extra, layout_flags)


@pytest.mark.parametrize(
    "layout_flags",
    ["", *(pytest.param(flags, marks=pytest.mark.slow) for flags in ("--cp-comm-type a2a", "--pipe-parallel-size 2"))],
)
def test_context_ranks_share_count_of_micro_batch(layout_flags: str) -> None:
    """Ranks that divide by their own tokens train on another loss where masks differ (Megatron-LM #7452, finding 9)."""
    pipe = 2 if "pipe" in layout_flags else 1
    check_against_single_process(1, pipe, 1, 2, 3, MASKED, layout_flags)


def mean_of_bert_heads(rank: int, context: int) -> tuple[float, float]:
    """Return this context rank's loss of a micro-batch, and the loss that the average over the ranks must have."""
    torch.manual_seed(0)
    s, b, v = 6, 3, 11
    words, scores = torch.randn(s, b, v, dtype=torch.float64), torch.randn(b, 2, dtype=torch.float64)
    labels, is_random, mask = torch.randint(v, (b, s)), torch.randint(2, (b,)), (torch.rand(b, s) < 0.5).double()
    args = BertModelArgs(
        num_layers=1, hidden_size=4, num_attention_heads=1, vocab_size=v, max_position_embeddings=s,
        kv_hidden_size=4, ff_hidden_size=4, loss_average="micro-batch",
    )  # fmt: skip
    losses = F.cross_entropy(words.permute(1, 2, 0), labels, reduction="none") * mask
    expected = losses.sum() / mask.sum() + F.cross_entropy(scores, is_random)
    group = group_of_all_ranks(rank, context)
    tokens = slice(rank * s // context, (rank + 1) * s // context)
    assert context == 1 or mask[:, tokens].sum() != mask.sum() / context
    shard = (words[tokens], scores), labels[:, tokens], mask[:, tokens], is_random, torch.tensor([900, 7])
    pairs = bert_loss(*shard, args=args, parallel=ParallelContext(context=group))
    loss = mean_of_micro_batch({name: Weighted(*pair) for name, pair in pairs.items()}, group)["loss"]
    return loss.item(), expected.item()


@pytest.mark.parametrize("context", [1, 2])
def test_bert_heads_add_their_means(context: int) -> None:
    """Megatron's loss of a micro-batch is the mean over masked tokens plus the mean over samples.

    With context parallelism the second head is on the first rank.
    """
    means, expected = zip(*run_ranks(context, mean_of_bert_heads, context), strict=True)
    assert sum(means) / context == pytest.approx(expected[0], rel=1e-14)


@pytest.mark.slow
def test_bert_and_t5_layouts_with_same_micro_batches_are_equal() -> None:
    common_flags = "--loss-average micro-batch --fp64 --hidden-dropout 0 --attention-dropout 0"
    for runs, argv in ((t5_runs.RUNS, t5_runs.VARIANTS["ul2"]), (bert_runs.RUNS, "")):
        serial_flags = runs.make_flags(1, 1, micro_batch_size=2, gas=4, extra=f"{argv} {common_flags}")
        (reference,) = run_ranks(1, runs.trace_rank, serial_flags, 1, 2, 2)
        (by_token,) = run_ranks(1, runs.trace_rank, [*serial_flags, "--loss-average", "token"], 1, 2, 2)
        assert abs(by_token.losses[0] - reference.losses[0]) > 1e-6
        assert by_token.eval_losses != reference.eval_losses, "of other weights"
        for pipe, data in ((2, 1), (1, 2)):
            layout_argv = runs.make_flags(1, pipe, micro_batch_size=2, gas=4 // data, extra=f"{argv} {common_flags}")
            ranks = run_ranks(2, runs.trace_rank, layout_argv, 2, 2, 2)
            check_fp64(compare(reference, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_both_averages_are_equal_without_masks(layout: tuple[int, int, int]) -> None:
    """The losses of routers among them: they are means over all tokens of a micro-batch."""
    by_token, by_micro_batch = (
        trace_layout(*layout, 2, 3, f"--fp64 {EXPERTS} --loss-average {average}", steps=2)
        for average in ("token", "micro-batch")
    )
    for token_trace, micro_batch_trace in zip(by_token, by_micro_batch, strict=True):
        check_fp64(compare(token_trace, [micro_batch_trace]))
        assert (
            token_trace.other_losses == pytest.approx(micro_batch_trace.other_losses, rel=1e-12)
            and min(token_trace.other_losses) > 0
        )
