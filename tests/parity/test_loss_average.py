"""--loss-average micro-batch: the mean of the micro-batches' means, as Megatron-LM's without per-token loss."""

from __future__ import annotations

import functools
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
from megatron.mpu import get_batch_on_this_cp_rank
from megatron.mpu.groups import Group
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.loss_forms import mean_of_micro_batch, token_weight
from megatron.training.mock_data import mock_tokenizer
from megatron.training.parity import compare
from megatron.training.setup import build_engine, make_streams
from tds.loss import Weighted
from tests.helpers import t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import SEQ, VOCAB, check_fp64, flags, serial, traces
from tests.parity import bert_runs

MASKED = "--fp64 --eod-mask-loss --loss-average micro-batch"
BY_TOKEN = "--fp64 --eod-mask-loss --loss-average token"


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_only_the_loss_to_train_on_becomes_a_mean() -> None:
    pair = Weighted(scalar(6.0), scalar(3.0))
    assert mean_of_micro_batch(pair).item() == 2.0
    assert mean_of_micro_batch(Weighted(scalar(6.0), 4)).item() == 1.5
    assert mean_of_micro_batch(scalar(5.0)).item() == 5.0
    named = mean_of_micro_batch({"z": pair, "loss": pair})
    assert list(named) == ["loss", "z"] and named["loss"].item() == 2.0 and named["z"] is pair
    assert mean_of_micro_batch(Weighted(scalar(0.0), scalar(0.0))).item() == 0.0, (
        "as Megatron's clamp(num_tokens, min=1)"
    )


def test_the_routers_divisor_is_all_tokens_of_the_mean_number_of_micro_batches() -> None:
    grid: Any = SimpleNamespace(data_context=SimpleNamespace(size=4))
    assert token_weight(64 * 2.5, grid, is_mean=True) == 40.0
    assert token_weight(64 * 3.0, grid, is_mean=False) == token_weight(64 * 2.9, grid, is_mean=False) == 256.0


ByHand = tuple[list[tuple[float, float]], float, float, dict[str, torch.Tensor]]


def gradients_by_hand(rank: int, argv: list[str], context: int = 1) -> ByHand:
    """Return (sum, count) of each micro-batch of the first step, both averages, and the gradient of the means' mean.

    Plain autograd on the single-stage model, without an engine's step.

    Args:
        context: context ranks; the part of each one counts as a micro-batch.
    """
    config = parse(argv, world_size=1).with_vocab(VOCAB)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    batches = RunData({"train": MockTokens(VOCAB, SEQ, seed=7)}, None).batches("train", config, here)
    named = dict(named_parameters(engine.module))
    pairs, summed = [], {name: torch.zeros_like(weight) for name, weight in named.items()}
    parts = [Group(tuple(range(context)), number) for number in range(context)]
    kept = [get_batch_on_this_cp_rank({"at": torch.arange(SEQ).unsqueeze(0)}, part)["at"] for part in parts]
    for _ in range(config.batch.gas):
        fields = pretrain_gpt2.get_batch(next(batches))
        for positions in kept:
            assert positions is not None
            mask = torch.zeros_like(fields["loss_mask"])
            mask[:, positions[0]] = fields["loss_mask"][:, positions[0]]
            total, count = engine.module(**{**fields, "loss_mask": mask})
            pairs.append((total.item(), float(count)))
            for name, gradient in zip(named, torch.autograd.grad(total / count, list(named.values())), strict=True):
                summed[name] += gradient / (config.batch.gas * context)
    by_token = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    by_micro_batch = sum(total / count for total, count in pairs) / len(pairs)
    return pairs, by_token, by_micro_batch, {name: gradient.detach() for name, gradient in summed.items()}


def test_one_process_trains_on_the_mean_of_the_means() -> None:
    argv = flags(1, 1, micro=2, gas=3, extra=MASKED)
    ((pairs, by_token, by_micro_batch, gradients),) = run_ranks(1, gradients_by_hand, argv)
    assert len({count for _, count in pairs}) > 1 and abs(by_token - by_micro_batch) > 1e-6
    found = serial(2, 3, MASKED, steps=1, eval_every=1)
    assert found.losses[0] == pytest.approx(by_micro_batch, rel=1e-14)
    assert serial(2, 3, BY_TOKEN, steps=1, eval_every=1).losses[0] == pytest.approx(by_token, rel=1e-14)
    for name, (shard, gradient) in found.gradients.items():
        torch.testing.assert_close(gradient, shard.unpadded(gradients[name]), rtol=1e-11, atol=1e-14, msg=name)


def check_against_one_process(tensor: int, pipe: int, data: int, context: int, gas: int, extra: str, more: str) -> None:
    """Compare a layout with one process that has the same micro-batches."""
    reference = serial(2, gas * data, extra, steps=2, eval_every=2)
    ranks = traces(tensor, pipe, data, 2, gas, f"{extra} {more}", steps=2, eval_every=2, context=context)
    check_fp64(compare(reference, ranks))
    for trace in ranks:
        assert trace.eval_losses == pytest.approx(reference.eval_losses, rel=1e-12)


CHUNKED = f"{MASKED} --z-loss 1e-2 --loss-chunk-tokens 5"
EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "gas", "extra", "more"),
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
def test_layouts_with_the_same_micro_batches_are_equal(
    tensor: int, pipe: int, data: int, gas: int, extra: str, more: str
) -> None:
    check_against_one_process(tensor, pipe, data, 1, gas, extra, more)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--cp-comm-type a2a", "--pipe-parallel-size 2"])
def test_the_part_of_each_context_rank_counts_as_a_micro_batch(more: str) -> None:
    """Megatron divides the loss by the tokens of the context rank and averages the gradients over the ranks."""
    argv = flags(1, 1, micro=2, gas=3, extra=MASKED)
    ((pairs, _, mean, gradients),) = run_ranks(1, functools.partial(gradients_by_hand, context=2), argv)
    assert len({count for _, count in pairs}) > 1
    pipe = 2 if "pipe" in more else 1
    for trace in traces(1, pipe, 1, 2, 3, f"{MASKED} {more}", steps=1, context=2):
        assert trace.losses[0] == pytest.approx(mean, rel=1e-13)
        for name, (shard, gradient) in trace.gradients.items():
            torch.testing.assert_close(gradient, shard.cut(gradients[name]), rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("context", [1, 2])
def test_both_heads_of_bert_add_their_means(context: int) -> None:
    """Megatron's loss of a micro-batch is the mean over masked tokens plus the mean over samples.

    With context parallelism the tokens of a rank count as a micro-batch; the second head is on the first rank.
    """
    torch.manual_seed(0)
    s, b, v = 6, 3, 11
    words, scores = torch.randn(s, b, v, dtype=torch.float64), torch.randn(b, 2, dtype=torch.float64)
    labels, is_random, mask = torch.randint(v, (b, s)), torch.randint(2, (b,)), (torch.rand(b, s) < 0.5).double()
    sizes = BertModelArgs(
        num_layers=1, hidden_size=4, num_attention_heads=1, vocab_size=v, max_position_embeddings=s,
        kv_hidden_size=4, ff_hidden_size=4, loss_average="micro-batch",
    )  # fmt: skip
    losses = F.cross_entropy(words.permute(1, 2, 0), labels, reduction="none") * mask
    parts = [slice(rank * s // context, (rank + 1) * s // context) for rank in range(context)]
    wanted = sum(losses[:, part].sum() / mask[:, part].sum() for part in parts) / context
    wanted += F.cross_entropy(scores, is_random)
    found = scalar(0.0)
    for rank, part in enumerate(parts):
        place = ParallelContext(context=Group(tuple(range(context)), rank))
        given = (words[part], scores), labels[:, part], mask[:, part], is_random, torch.tensor([900, 7])
        pairs = bert_loss(*given, sizes=sizes, place=place)
        found += mean_of_micro_batch({name: Weighted(*pair) for name, pair in pairs.items()})["loss"] / context
    assert found.item() == pytest.approx(wanted.item(), rel=1e-14)


@pytest.mark.slow
def test_bert_and_t5_are_the_same_in_layouts_with_the_same_micro_batches() -> None:
    micro = "--loss-average micro-batch --fp64 --hidden-dropout 0 --attention-dropout 0"
    for runs, argv in ((t5_runs.RUNS, t5_runs.VARIANTS["ul2"]), (bert_runs.RUNS, "")):
        serial_flags = runs.flags(1, 1, micro=2, gas=4, extra=f"{argv} {micro}")
        (reference,) = run_ranks(1, runs.trace_rank, serial_flags, 1, 2, 2)
        (by_token,) = run_ranks(1, runs.trace_rank, [*serial_flags, "--loss-average", "token"], 1, 2, 2)
        assert abs(by_token.losses[0] - reference.losses[0]) > 1e-6
        assert by_token.eval_losses != reference.eval_losses, "of other weights"
        for pipe, data in ((2, 1), (1, 2)):
            split = runs.flags(1, pipe, micro=2, gas=4 // data, extra=f"{argv} {micro}")
            ranks = run_ranks(2, runs.trace_rank, split, 2, 2, 2)
            check_fp64(compare(reference, ranks))


@pytest.mark.slow
def test_context_ranks_equal_one_process_where_nothing_is_masked() -> None:
    check_against_one_process(1, 1, 1, 2, 3, "--fp64 --loss-average micro-batch", "")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_both_averages_are_the_same_without_masks(layout: tuple[int, int, int]) -> None:
    """The losses of routers among them: they are means over all tokens of a micro-batch."""
    by_token, by_micro_batch = (
        traces(*layout, 2, 3, f"--fp64 {EXPERTS} --loss-average {average}", steps=2)
        for average in ("token", "micro-batch")
    )
    for one, other in zip(by_token, by_micro_batch, strict=True):
        check_fp64(compare(one, [other]))
        assert one.others == pytest.approx(other.others, rel=1e-12) and min(one.others) > 0
