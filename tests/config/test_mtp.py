"""--mtp-num-layers: what fits, and one error that lists all problems."""

from __future__ import annotations

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError
from megatron.models import registry

FLAGS = (
    "--num-layers 6 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 101 --train-iters 2 --gas 4"
)


def parse_line(words: str, world_size: int = 2, family: str = "llama") -> Config:
    return parse([*FLAGS.split(), *words.split()], world_size=world_size, env={}, family=family)


def test_last_stage_gets_mtp_layers_and_fewer_others() -> None:
    """Units: embedding, 6 layers, norm, embedding of future tokens, 2 MTP layers, head."""
    plain = registry.bounds_of(parse_line("--pipe-parallel-size 2"), 2)
    bounds = registry.bounds_of(parse_line("--pipe-parallel-size 2 --mtp-num-layers 2"), 2)
    assert plain[-1] == 9 and bounds[-1] == 12
    assert plain[1] < bounds[1] <= 7
    for chunks in ("", "--pipeline-chunks 2", "--pipeline-schedule zb-v"):
        assert registry.bounds_of(parse_line(f"--pipe-parallel-size 2 --mtp-num-layers 2 {chunks}"), 2)[-2] <= 7


def test_layout_with_mtp_layers_sets_bounds() -> None:
    config = parse_line("--pipe-parallel-size 2 --pipeline-model-parallel-layout Et*4|ttmmL --mtp-num-layers 2")
    assert registry.bounds_of(config, 2) == [0, 5, 12]
    config = parse_line("--pipe-parallel-size 2 --pipeline-model-parallel-layout Et*4|t|t|mL --mtp-num-layers 1")
    assert registry.bounds_of(config, 2) == [0, 5, 6, 7, 11]


def test_one_layer_per_stage_is_enough() -> None:
    config = parse_line("--pipe-parallel-size 6 --mtp-num-layers 1", world_size=6)
    assert registry.bounds_of(config, 6) == [0, 2, 3, 4, 5, 6, 11]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--mtp-num-layers 8", ["must be below the sequence length", "got 8 and 8"]),
        (
            "--mtp-num-layers 4 --seq-length-schedule 0:4;32:8",
            ["must be below the sequence length", "got 4 and 4"],
        ),
        (
            "--mtp-num-layers 9 --embed-layernorm --pipe-parallel-size 2 --partition-method uniform",
            [
                "must be below the sequence length",
                "does not support --embed-layernorm",
                "--partition-method uniform does not ensure",
            ],
        ),
        (
            "--mtp-num-layers 2 --pipe-parallel-size 2 --pipeline-model-parallel-layout Et*4|ttmL",
            ["one m for each multi-token prediction layer, got 1 m and --mtp-num-layers 2"],
        ),
        (
            "--pipe-parallel-size 2 --pipeline-model-parallel-layout Et*4|ttmL",
            ["got 1 m and --mtp-num-layers 0"],
        ),
        (
            "--mtp-num-layers 1 --embed-layernorm --pipe-parallel-size 2 --pipeline-model-parallel-layout Et*6m|L",
            ["must have every m in the last chunk", "does not support --embed-layernorm"],
        ),
        (
            "--mtp-num-layers 1 --pipe-parallel-size 2 --partition-method profile",
            ["--partition-method profile does not ensure", "Use --partition-method balanced"],
        ),
        ("--mtp-num-layers -1", ["--mtp-num-layers must be an integer of at least 0, got -1"]),
        ("--mtp-num-layers 1 --mtp-loss-scaling-factor -0.1", ["--mtp-loss-scaling-factor must be"]),
        ("--mtp-use-repeated-layer", ["each multi-token prediction layer has its own weights"]),
    ],
)
def test_problems_are_listed_together(words: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_line(words)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_other_families_reject_the_flags(family: str) -> None:
    with pytest.raises(ConfigError, match="multi-token prediction is supported in decoders only"):
        parse(["--mtp-num-layers", "1"], world_size=1, env={}, family=family)


def test_weights_of_a_run_depend_on_the_number_of_layers_only() -> None:
    plain, factor, layers = (
        parse_line(words, 1).with_vocab(101).identity()
        for words in ("", "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5", "--mtp-num-layers 1")
    )
    assert factor == layers and {key for key in plain if plain[key] != layers[key]} == {"mtp_num_layers"}
