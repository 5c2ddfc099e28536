"""--sequence-parallel: where it acts, what it cannot go with, and models that were not built for it."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import parse
from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.training.layout_checks import check_sequence_is_cut
from tests.helpers.model_samples import small_sizes

TWO = "--sequence-parallel --model-parallel-size 2 --num-attention-heads 4 --hidden-size 16"


def read(line: str, family: str = "gpt2"):
    return parse(line.split(), world_size=2, family=family, env={})


def test_it_is_off_until_asked_for():
    assert read(TWO).parallel.sequence_parallel
    assert not read(TWO.removeprefix("--sequence-parallel ")).parallel.sequence_parallel


@pytest.mark.parametrize(
    ("line", "family", "parts"),
    [
        (f"{TWO} --seq-length 63", "gpt2", ["--seq-length must be", "got 63 and 2 (63 / 2 = 31.5)", "--seq-length 64"]),
        (f"{TWO} --enc-seq-length 63 --dec-seq-length 64", "t5", ["--enc-seq-length must be", "--enc-seq-length 64"]),
        (f"{TWO} --enc-seq-length 64 --dec-seq-length 63", "t5", ["--dec-seq-length must be", "--dec-seq-length 64"]),
        (
            f"{TWO} --checkpoint-activations --partition-activations",
            "gpt2",
            ["already shards the inputs of layers", "Remove --partition-activations"],
        ),
    ],
    ids=["odd", "odd encoder", "odd decoder", "partitioned twice"],
)
def test_what_it_cannot_go_with_is_refused(line, family, parts):
    with pytest.raises(ConfigError) as caught:
        read(line, family)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_one_tensor_rank_switches_it_off():
    config = read("--sequence-parallel --num-attention-heads 4")
    assert not config.parallel.sequence_parallel and list(config.ignored) == ["--sequence-parallel"]


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError, match="2 problems"):
        read(f"{TWO} --seq-length 63 --checkpoint-activations --partition-activations")


def test_a_model_that_was_not_built_for_it_is_refused():
    whole, cut = (
        DecoderModel(small_sizes(), ParallelContext(Group((0, 1), 0), sequence_parallel=cuts)) for cuts in (False, True)
    )
    check_sequence_is_cut(cut, True)
    check_sequence_is_cut(whole, False)
    with pytest.raises(ConfigError, match="got none in Linear. Build them with megatron.models.ParallelContext"):
        check_sequence_is_cut(torch.nn.Linear(2, 2), True)
    with pytest.raises(
        ConfigError, match="layers of DecoderModel are built with sequence_parallel=True, got no --sequ"
    ):
        check_sequence_is_cut(cut, False)
