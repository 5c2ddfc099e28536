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
from tests.helpers.layouts import VOCAB, batches
from tests.parity.modern_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_schedules import INTERLEAVED, ZERO_BUBBLE
from tests.parity.test_zero_parts import assert_same_bits

RECOMPUTE, SEQUENCE = "--checkpoint-activations", "--sequence-parallel"
OF_LAYOUT = {
    (2, 1, 1): ("", RECOMPUTE, SEQUENCE, f"{SEQUENCE} {RECOMPUTE}"),
    (1, 2, 1): ("", RECOMPUTE, ZERO_BUBBLE, INTERLEAVED, f"{INTERLEAVED} {RECOMPUTE}"),
    (2, 2, 1): ("", f"{SEQUENCE} {ZERO_BUBBLE} {RECOMPUTE}", f"{SEQUENCE} {INTERLEAVED}", ZERO_BUBBLE),
    (1, 1, 2): ("", "--zero-stage 1", "--zero-stage 2", f"--zero-stage 3 {RECOMPUTE}"),
    (2, 1, 2): ("", f"--zero-stage 2 {SEQUENCE}", f"--zero-stage 3 {SEQUENCE} {RECOMPUTE}"),
    (1, 2, 2): ("", "--zero-stage 1"),
    (4, 1, 1): ("", SEQUENCE),
    (1, 4, 1): ("", ZERO_BUBBLE),
}
"""(tensor, pipe, data) -> what acts beside."""
CASES = [(variant, layout, side) for variant in VARIANTS for layout, sides in OF_LAYOUT.items() for side in sides]
SHORT = [
    ("qwen3", (2, 2, 1), f"{SEQUENCE} {ZERO_BUBBLE} {RECOMPUTE}"),
    ("gemma", (2, 1, 2), f"--zero-stage 2 {SEQUENCE}"),
]


def check(found: Difference) -> None:
    assert found.loss <= 1e-12
    assert found.gradient <= 1e-11, found.worst
    assert found.norm <= 1e-12


@pytest.mark.parametrize(
    ("variant", "layout", "side"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow) for case in CASES],
)
def test_every_layout_equals_one_process(variant: str, layout: tuple[int, int, int], side: str) -> None:
    check(RUNS[variant].difference(*layout, EXTRA, 3, side))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["--zero-stage 1", "--zero-stage 2", "--zero-stage 3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_has_the_bits_of_stage_0(variant: str, side: str) -> None:
    plain, cut = (RUNS[variant].traces(2, 1, 2, f"--fp32 {zero}", 4, 1, 2) for zero in ("", side))
    assert_same_bits(plain, cut)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", INTERLEAVED, ZERO_BUBBLE])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_is_that_of_one_process(variant: str, schedule: str) -> None:
    drops = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check(RUNS[variant].difference(2, 2, 1, f"{EXTRA} {drops}", 3, f"{schedule} {RECOMPUTE}"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_trains_close_to_fp32(variant: str) -> None:
    wide, narrow = RUNS[variant].traces(1, 1, 1, "--fp32", 6)[0], RUNS[variant].traces(2, 2, 1, "--bf16", 6)
    assert abs(narrow[0].losses[-1] - wide.losses[-1]) < 0.05
    assert len({tuple(trace.losses) for trace in narrow}) == 1


def compiled_rank(rank: int, cache: str, variant: str, argv: list[str], size: int) -> Trace:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    built = compile_layers
    setup.compile_layers = lambda *args, **how: built(*args, **how, backend="aot_eager")  # type: ignore[assignment]
    return RUNS[variant].trace_rank(rank, argv, size, 3, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tensor", "pipe"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_layers_give_what_plain_ones_give(
    variant: str, tensor: int, pipe: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage waits for the other while that compiles."""
    monkeypatch.setattr(harness, "GROUP_TIMEOUT_S", 600)
    runs = RUNS[variant]
    micro, gas = batches(1, 2)
    argv = runs.flags(tensor, pipe, micro=micro, gas=gas, extra=f"{EXTRA} --compile")
    found = run_ranks(tensor * pipe, compiled_rank, str(tmp_path), variant, argv, tensor * pipe, deadline_s=500.0)
    check(compare(runs.traces(1, 1, 1, EXTRA, 3)[0], found))


PROMPTS = [[5, 17, 3], [42], [9, 8, 7, 6, 5, 4, 3, 2], [100, 1]]
NEW = 8
LOUD = "--fp64 --init-method-std 0.5 --untie-embeddings-and-output-weights"
"""So that the likeliest token is far ahead, and not the last one once more."""


def engine_of(rank: int, variant: str, tensor: int, pipe: int) -> Any:
    """Return the engine of this rank."""
    runs, size = RUNS[variant], tensor * pipe
    argv = runs.flags(tensor, pipe, micro=2, gas=2, extra=LOUD)
    config = parse(argv, world_size=size, family="llama").with_vocab(VOCAB)
    here = initialize.start(config)
    streams = DropoutStreams(config.run.seed, here.grid.data, here.grid.tensor)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    return build_engine(config, here, streams, runs.script.model_provider, runs.script.forward_step)


def decoded(rank: int, variant: str, tensor: int, pipe: int) -> list[list[int]]:
    """Return what this rank says, with a cache."""
    return generate_gpt2(engine_of(rank, variant, tensor, pipe), PROMPTS, max_new_tokens=NEW)


def plain_loop(rank: int, variant: str) -> list[list[int]]:
    """Return what the model of one process says to one prompt at a time, by all tokens at once each time."""
    model = engine_of(rank, variant, 1, 1).module.eval()
    rows = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(NEW):
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
def test_generation_with_its_cache_says_what_a_loop_without_one_says(variant: str, tensor: int, pipe: int) -> None:
    wanted = run_ranks(1, plain_loop, variant)[0]
    assert len({token for row in wanted for token in row}) > 8
    assert run_ranks(tensor * pipe, decoded, variant, tensor, pipe) == [wanted] * (tensor * pipe)


ACTING = {
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
@pytest.mark.parametrize(("variant", "flag"), [(variant, flag) for variant, flags in ACTING.items() for flag in flags])
def test_each_flag_makes_another_model(variant: str, flag: str) -> None:
    """Its smaller sibling is the comparison with Hugging Face's models, which have them."""
    RUNS[variant].check_acts(flag)
