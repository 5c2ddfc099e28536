"""--sequence-parallel: where it acts, what it cannot go with, and models that were not built for it."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import parse
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.training.layout_checks import check_sequence_parallel
from tests.helpers.model_samples import small_model_args

TP2_FLAGS = "--sequence-parallel --model-parallel-size 2 --num-attention-heads 4 --hidden-size 16"


def parse_line(line: str, family: str = "gpt2"):
    return parse(line.split(), world_size=2, family=family, env={})


def test_sequence_parallel_is_off_by_default():
    assert parse_line(TP2_FLAGS).parallel.sequence_parallel
    assert not parse_line(TP2_FLAGS.removeprefix("--sequence-parallel ")).parallel.sequence_parallel


@pytest.mark.parametrize(
    ("line", "family", "fragments"),
    [
        (
            f"{TP2_FLAGS} --seq-length 63",
            "gpt2",
            ["--seq-length must be", "got 63 and 2 (63 / 2 = 31.5)", "--seq-length 64"],
        ),
        (
            f"{TP2_FLAGS} --enc-seq-length 63 --dec-seq-length 64",
            "t5",
            ["--enc-seq-length must be", "--enc-seq-length 64"],
        ),
        (
            f"{TP2_FLAGS} --enc-seq-length 64 --dec-seq-length 63",
            "t5",
            ["--dec-seq-length must be", "--dec-seq-length 64"],
        ),
        (
            f"{TP2_FLAGS} --checkpoint-activations --partition-activations",
            "gpt2",
            ["already shards the inputs of layers", "Remove --partition-activations"],
        ),
    ],
    ids=["odd", "odd encoder", "odd decoder", "partitioned twice"],
)
def test_unsupported_combinations_raise(line, family, fragments):
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line, family)
    assert all(fragment in str(exc_info.value) for fragment in fragments), exc_info.value


def test_single_tensor_rank_disables_sequence_parallel():
    config = parse_line("--sequence-parallel --num-attention-heads 4")
    assert not config.parallel.sequence_parallel and list(config.ignored) == ["--sequence-parallel"]


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError, match="2 problems"):
        parse_line(f"{TP2_FLAGS} --seq-length 63 --checkpoint-activations --partition-activations")


def test_model_without_sequence_parallel_raises():
    unsharded, sharded = (
        DecoderModel(small_model_args(), ParallelContext(Group((0, 1), 0), sequence_parallel=is_sharded))
        for is_sharded in (False, True)
    )
    check_sequence_parallel(sharded, True)
    check_sequence_parallel(unsharded, False)
    with pytest.raises(ConfigError, match="got none in Linear. Build them with megatron.models.ParallelContext"):
        check_sequence_parallel(torch.nn.Linear(2, 2), True)
    with pytest.raises(
        ConfigError, match="layers of DecoderModel are built with sequence_parallel=True, got no --sequ"
    ):
        check_sequence_parallel(sharded, False)
