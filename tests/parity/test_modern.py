"""Qwen 3's, Gemma's and OLMo 2's decoder in every layout: losses, gradients and norms of one process.

Each layout is combined with every option that it supports. The short run has one layout each of Qwen 3 and Gemma, with
recompute, sequence parallelism, a schedule that defers weight gradients, and ZeRO.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.generate import generate_gpt2
from megatron.mpu.random import DropoutStreams
from megatron.training import global_vars, initialize, setup
from megatron.training.compile import compile_layers
from megatron.training.mock_data import mock_tokenizer
from megatron.training.parity import Difference, Trace, compare
from megatron.training.setup import build_engine
from tests.helpers import harness
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import VOCAB, split_global_batch
from tests.parity.modern_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_schedules import INTERLEAVED, ZERO_BUBBLE
from tests.parity.test_zero_parts import assert_same_bits

RECOMPUTE, SEQUENCE_PARALLEL = "--checkpoint-activations", "--sequence-parallel"
LAYOUT_OPTIONS = {
    (2, 1, 1): ("", RECOMPUTE, SEQUENCE_PARALLEL, f"{SEQUENCE_PARALLEL} {RECOMPUTE}"),
    (1, 2, 1): ("", RECOMPUTE, ZERO_BUBBLE, INTERLEAVED, f"{INTERLEAVED} {RECOMPUTE}"),
    (2, 2, 1): (
        "",
        f"{SEQUENCE_PARALLEL} {ZERO_BUBBLE} {RECOMPUTE}",
        f"{SEQUENCE_PARALLEL} {INTERLEAVED}",
        ZERO_BUBBLE,
    ),
    (1, 1, 2): ("", "--zero-stage 1", "--zero-stage 2", f"--zero-stage 3 {RECOMPUTE}"),
    (2, 1, 2): ("", f"--zero-stage 2 {SEQUENCE_PARALLEL}", f"--zero-stage 3 {SEQUENCE_PARALLEL} {RECOMPUTE}"),
    (1, 2, 2): ("", "--zero-stage 1"),
    (4, 1, 1): ("", SEQUENCE_PARALLEL),
    (1, 4, 1): ("", ZERO_BUBBLE),
}
"""(tensor, pipe, data) -> what acts beside."""
CASES = [
    (variant, layout, options)
    for variant in VARIANTS
    for layout, option_sets in LAYOUT_OPTIONS.items()
    for options in option_sets
]
QUICK_CASES = [
    ("qwen3", (2, 2, 1), f"{SEQUENCE_PARALLEL} {ZERO_BUBBLE} {RECOMPUTE}"),
    ("gemma", (2, 1, 2), f"--zero-stage 2 {SEQUENCE_PARALLEL}"),
]


def check_difference(diff: Difference) -> None:
    assert diff.loss <= 1e-12
    assert diff.gradient <= 1e-11, diff.worst_gradient
    assert diff.norm <= 1e-12


@pytest.mark.parametrize(
    ("variant", "layout", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow) for case in CASES],
)
def test_every_layout_equals_single_process(variant: str, layout: tuple[int, int, int], options: str) -> None:
    check_difference(RUNS[variant].compare_layout(*layout, EXTRA, 3, options))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--zero-stage 1", "--zero-stage 2", "--zero-stage 3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_is_bitwise_stage_0(variant: str, options: str) -> None:
    plain, sharded = (
        RUNS[variant].trace_layout(2, 1, 2, f"--fp32 {zero_flags}", 4, 1, 2) for zero_flags in ("", options)
    )
    assert_same_bits(plain, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", INTERLEAVED, ZERO_BUBBLE])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_equals_single_process(variant: str, schedule: str) -> None:
    dropout_flags = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_difference(RUNS[variant].compare_layout(2, 2, 1, f"{EXTRA} {dropout_flags}", 3, f"{schedule} {RECOMPUTE}"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_stays_close_to_fp32(variant: str) -> None:
    fp32_trace, bf16_traces = (
        RUNS[variant].trace_layout(1, 1, 1, "--fp32", 6)[0],
        RUNS[variant].trace_layout(2, 2, 1, "--bf16", 6),
    )
    assert abs(bf16_traces[0].losses[-1] - fp32_trace.losses[-1]) < 0.05
    assert len({tuple(trace.losses) for trace in bf16_traces}) == 1


def compiled_rank(rank: int, cache: str, variant: str, argv: list[str], size: int) -> Trace:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    original = compile_layers
    setup.compile_layers = lambda *args, **kwargs: original(*args, **kwargs, backend="aot_eager")  # type: ignore[assignment]
    return RUNS[variant].trace_rank(rank, argv, size, 3, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tensor", "pipe"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_layers_match_plain_layers(
    variant: str, tensor: int, pipe: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage waits for the other while that compiles."""
    monkeypatch.setattr(harness, "GROUP_TIMEOUT_S", 600)
    runs = RUNS[variant]
    micro, gas = split_global_batch(1, 2)
    argv = runs.make_flags(tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"{EXTRA} --compile")
    ranks = run_ranks(tensor * pipe, compiled_rank, str(tmp_path), variant, argv, tensor * pipe, deadline_s=500.0)
    check_difference(compare(runs.trace_layout(1, 1, 1, EXTRA, 3)[0], ranks))


PROMPTS = [[5, 17, 3], [42], [9, 8, 7, 6, 5, 4, 3, 2], [100, 1]]
NUM_NEW_TOKENS = 8
DECISIVE_WEIGHTS = "--fp64 --init-method-std 0.5 --untie-embeddings-and-output-weights"
"""So that the likeliest token is far ahead, and not the last one once more."""


def make_engine(rank: int, variant: str, tensor: int, pipe: int) -> Any:
    """Return the engine of this rank."""
    runs, size = RUNS[variant], tensor * pipe
    argv = runs.make_flags(tensor, pipe, micro_batch_size=2, gas=2, extra=DECISIVE_WEIGHTS)
    config = parse(argv, world_size=size, family="llama").with_vocab(VOCAB)
    world = initialize.start(config)
    streams = DropoutStreams(config.run.seed, world.grid.data, world.grid.tensor)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    return build_engine(config, world, streams, runs.script.model_provider, runs.script.forward_step)


def generate_with_cache(rank: int, variant: str, tensor: int, pipe: int) -> list[list[int]]:
    """Return what this rank says, with a cache."""
    return generate_gpt2(make_engine(rank, variant, tensor, pipe), PROMPTS, max_new_tokens=NUM_NEW_TOKENS)


def generate_without_cache(rank: int, variant: str) -> list[list[int]]:
    """Return what the model of one process says to one prompt at a time, by all tokens at once each time."""
    model = make_engine(rank, variant, 1, 1).module.eval()
    rows = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            with torch.no_grad():
                row.append(int(model(torch.tensor([row]))[-1, 0, :VOCAB].argmax()))
        rows.append(row[len(prompt) :])
    return rows


@pytest.mark.parametrize(
    ("variant", "tensor", "pipe"),
    [
        pytest.param(variant, *grid, marks=() if (variant, grid) == ("gemma", (2, 2)) else pytest.mark.slow)
        for variant in VARIANTS
        for grid in ((1, 1), (2, 1), (1, 2), (2, 2))
    ],
)
def test_cached_generation_matches_uncached_loop(variant: str, tensor: int, pipe: int) -> None:
    expected = run_ranks(1, generate_without_cache, variant)[0]
    assert len({token for row in expected for token in row}) > 8
    assert run_ranks(tensor * pipe, generate_with_cache, variant, tensor, pipe) == [expected] * (tensor * pipe)


EFFECTIVE_FLAGS = {
    "qwen3": (
        "--qk-norm none",
        "--rotary-original-positions 32",
        "--window-attn-skip-freq [1,1,1,0]",
    ),
    "gemma": (
        "--window-size 5",
        "--attn-logit-softcapping 1",
        "--final-logit-softcapping 2",
        "--softmax-scale 0.3",
        "--rotary-local-base 40",
        "--norm-placement before",
    ),
    "olmo2": ("--qk-norm head", "--rotary-percent 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "flag"), [(variant, flag) for variant, flags in EFFECTIVE_FLAGS.items() for flag in flags]
)
def test_each_flag_changes_model(variant: str, flag: str) -> None:
    """Its smaller sibling is the comparison with Hugging Face's models, which have them."""
    RUNS[variant].check_flag_changes_loss(flag)
