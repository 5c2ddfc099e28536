"""--context-parallel-size: where it acts, what it cannot go with, and models that were not built for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.arguments import parse
from megatron.arguments.deepspeed_json import engine_dict
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.training.layout_checks import check_context_parallel
from tests.helpers.model_samples import small_model_args

CP2_FLAGS = "--context-parallel-size 2 --num-attention-heads 4 --hidden-size 16 --seq-length 64"


def parse_line(line: str, family: str = "gpt2", world_size: int = 4) -> Any:
    return parse(line.split(), world_size=world_size, family=family, env={})


def test_data_parallel_size_excludes_context_axis() -> None:
    config = parse_line(f"{CP2_FLAGS} --global-batch-size 12 --batch-size 3")
    assert config.parallel.data_parallel_size(4) == 2 and config.batch.gas == 2
    engine = engine_dict(config, 4)
    assert engine["train_batch_size"] == 24, "to DeepSpeed, which divides by micro-batches, there are 4 replicas"
    assert parse_line(CP2_FLAGS.replace("size 2", "size 1")).parallel.data_parallel_size(4) == 4


@pytest.mark.parametrize(
    ("line", "family", "fragments"),
    [
        (
            f"{CP2_FLAGS}1",
            "gpt2",
            ["--seq-length must be a multiple of 2 x", "got 641 and 2 x 2 = 4", "--seq-length 644"],
        ),
        (
            f"{CP2_FLAGS} --sequence-parallel --model-parallel-size 2 --seq-length 68",
            "gpt2",
            ["2 x --context-parallel-size x --model-parallel-size 2", "got 68 and 2 x 2 x 2 = 8", "--seq-length 72"],
        ),
        (
            f"{CP2_FLAGS} --cp-comm-type a2a --model-parallel-size 2 --num-query-groups 2",
            "llama",
            ["--num-query-groups must be a multiple of 2 x 2 = 4, got 2", "--cp-comm-type all_gather"],
        ),
        (
            f"{CP2_FLAGS} --cp-comm-type a2a+p2p",
            "gpt2",
            ["needs two --hierarchical-context-parallel-sizes whose product is --context-parallel-size 2, got none"],
        ),
        (
            f"{CP2_FLAGS} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            "gpt2",
            ["whose product is --context-parallel-size 2, got 2 2"],
        ),
        (
            f"{CP2_FLAGS} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 0 2",
            "gpt2",
            ["whose product is --context-parallel-size 2, got 0 2"],
        ),
        (
            f"{CP2_FLAGS} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1 --num-attention-heads 1",
            "gpt2",
            ["--cp-comm-type a2a+p2p distributes", "--num-attention-heads must be a multiple of 1 x 2 = 2, got 1"],
        ),
        (f"{CP2_FLAGS} --cp-comm-type a2a p2p", "gpt2", ["one for each of the", "got 2: a2a p2p"]),
        (f"{CP2_FLAGS} --cp-comm-type a2a ring", "gpt2", ["--cp-comm-type must be one of", "got 'ring'"]),
        (f"{CP2_FLAGS} --cp-comm-type a2a --num-attention-heads 1", "gpt2", ["--num-attention-heads must be", "got 1"]),
        (
            f"{CP2_FLAGS} --context-parallel-size 3",
            "gpt2",
            ["a multiple of tensor x pipe x context", "(1 x 1 x 3 = 3)"],
        ),
        (f"{CP2_FLAGS} --compile", "gpt2", ["--compile", "got --context-parallel-size 2"]),
        (f"{CP2_FLAGS} --debug-dump dump", "gpt2", ["--debug-dump", "--debug-nan works with context parallelism"]),
        (f"{CP2_FLAGS} --sample-prompts prompts", "gpt2", ["--sample-prompts", "tools/generate.py"]),
        (
            "--context-parallel-size 2 --enc-seq-length 64",
            "t5",
            ["--context-parallel-size does not support T5", "Use --sequence-parallel"],
        ),
    ],
)
def test_unsupported_combinations_raise(line: str, family: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line, family)
    assert all(fragment in str(exc_info.value) for fragment in fragments), exc_info.value


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="3 problems"):
        parse_line(f"{CP2_FLAGS} --seq-length 63 --compile --cp-comm-type a2a --num-attention-heads 1")


def test_long_window_raises_or_is_noted_with_loaded_weights() -> None:
    with pytest.raises(ConfigError, match="--window-size must not exceed --seq-length, got 65 and 64"):
        parse_line(f"{CP2_FLAGS} --window-size 65")
    for line in ("--window-size 64", "--window-size 63", "--window-size 65 --load runs/longer"):
        assert (
            sum(
                "covers all tokens of a sample of 64 tokens" in note for note in parse_line(f"{CP2_FLAGS} {line}").notes
            )
            == 1
        )
    assert not any("--window-size" in note for note in parse_line(f"{CP2_FLAGS} --window-size 62").notes)


def test_p2p_comm_type_is_noted_once() -> None:
    p2p_notes = [note for note in parse_line(f"{CP2_FLAGS} --cp-comm-type p2p").notes if "cp-comm-type" in note]
    assert p2p_notes == [
        "--cp-comm-type p2p: keys and values are gathered, as with all_gather; the results are the same"
    ]
    single_rank = parse_line("--num-attention-heads 4 --context-parallel-size 1 --cp-comm-type p2p")
    assert any("--cp-comm-type p2p has no effect" in note for note in single_rank.notes)
    assert not any("cp-comm" in note for note in parse_line(CP2_FLAGS).notes)


def test_model_without_context_group_raises() -> None:
    unsharded, sharded = (
        DecoderModel(small_model_args(), ParallelContext(context=Group(ranks, 0))) for ranks in ((0,), (0, 1))
    )
    check_context_parallel(sharded, 2)
    check_context_parallel(unsharded, 1)
    check_context_parallel(torch.nn.Linear(2, 2), 1)
    with pytest.raises(
        ConfigError, match=r"got 1 in DecoderModel. Build them with megatron.models.ParallelContext\(..., "
    ):
        check_context_parallel(unsharded, 2)
    with pytest.raises(ConfigError, match="got none in Linear"):
        check_context_parallel(torch.nn.Linear(2, 2), 2)
