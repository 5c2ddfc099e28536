"""--pipeline-model-parallel-layout is read as Megatron reads it, and refused with what must hold."""

from __future__ import annotations

import pytest

from megatron.arguments.parser import parse
from megatron.config.config import Config
from megatron.config.pipeline_layout import layout_bounds, num_layers, parse_layout
from megatron.errors import ConfigError
from megatron.models import registry

SMALL = "--num-layers 7 --hidden-size 16 --num-attention-heads 4 --vocab-size 64 --dry-run"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Et|tL", ["Et", "tL"]),
        ("E,t,t|t*2,L", ["Ett", "ttL"]),
        ("Et*3|(tt|)*2t|L", ["Ettt", "tt", "tt", "t", "L"]),
        ("E|(t|)*3L", ["E", "t", "t", "t", "L"]),
        ("E t | (t(t|)*2)*2 tL |", ["Et", "tt", "t", "tt", "t", "tL"]),
    ],
)
def test_letters_brackets_and_repetition(text: str, pieces: list[str]) -> None:
    assert parse_layout(text) == pieces
    assert num_layers(pieces) == sum(piece.count("t") for piece in pieces)


def test_the_head_is_norm_and_head() -> None:
    assert layout_bounds(parse_layout("Et*3|(tt|)*2t|L")) == [0, 4, 6, 8, 9, 11]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tt|L", "must be E, layers t and L"),
        ("Et|tt", "must be E, layers t and L"),
        ("Et|tEL", "must be E, layers t and L"),
        ("Et*3|(tt|)*29m|L", r"m \(multi-token prediction\) is not supported"),
        ("Et||tL", r"must have a layer, E or L, got none in chunk 1 of 'Et\|\|tL'"),
        ("E(t|tL", "must be E"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_layout(text)


def read(words: str, world_size: int = 2, family: str = "gpt2") -> Config:
    return parse([*SMALL.split(), *words.split()], world_size=world_size, env={}, family=family)


def test_a_layout_says_chunks_and_bounds() -> None:
    config = read("--pipe-parallel-size 2 --pipeline-model-parallel-layout Ett|t|ttt|tL")
    assert (config.parallel.chunks, config.parallel.schedule) == (2, "interleaved")
    assert registry.bounds_of(config, 2) == [0, 3, 4, 7, 10]
    config = read("--pipe-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Ett|t|ttt|tL")
    assert (config.parallel.chunks, config.parallel.placement) == (2, "v")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline-model-parallel-layout Ett|t|tttt|L|", "must contain all layers, got 7 t and --num-layers 6"),
        ("--pipeline-model-parallel-layout Et*3|t*3|L", "a multiple of --pipe-parallel-size chunks, got 3 and 2"),
        (
            "--pipeline-model-parallel-layout Et*3|t*3L --pipeline-chunks 2",
            "determines the chunks, got --pipeline-chunks too",
        ),
        ("--pipeline-model-parallel-layout Et*3|t*3", "must be E, layers t and L"),
    ],
)
def test_a_layout_that_does_not_go_with_the_rest_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(f"--pipe-parallel-size 2 --num-layers 6 {words}")


def test_a_model_of_two_sides_has_none() -> None:
    sides = "--enc-seq-length 8 --pipe-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*4L"
    with pytest.raises(ConfigError, match="does not support encoder-decoder models"):
        read(sides, family="t5")


def test_the_group_of_micro_batches_is_that_of_chunks() -> None:
    flag = "--pipe-parallel-size 2 --gas 12 --microbatch-group-size-per-virtual-pipeline-stage"
    assert read(f"{flag} 4 --pipeline-chunks 2").parallel.group_size == 4
    plain = read(f"{flag} 4")
    assert plain.parallel.group_size == 0 and any(
        "has no effect without several chunks" in note for note in plain.notes
    )
    with pytest.raises(ConfigError, match="must be at least --pipe-parallel-size, got 1 and 2"):
        read(f"{flag} 1 --pipeline-chunks 2")


def test_a_v_has_its_chunks_and_its_schedules() -> None:
    for words in (
        "--pipeline-schedule zb-v",
        "--pipeline-placement v",
        "--pipeline-schedule auto --pipeline-placement v",
    ):
        parallel = read(f"--pipe-parallel-size 2 {words}").parallel
        assert (parallel.chunks, parallel.placement, parallel.loss_stage) == (2, "v", 0)
    assert read("--pipe-parallel-size 2 --pipeline-placement v").parallel.schedule == "zb-v"
    for words, message in (
        ("--pipeline-schedule zb-v --pipeline-chunks 3", "--pipeline-placement v needs 2 chunks per stage"),
        ("--pipeline-schedule zb-v --pipeline-placement loop", "--pipeline-schedule zb-v needs --pipeline-placement v"),
        (
            "--pipeline-schedule zb-h1 --pipeline-placement v",
            "--pipeline-schedule zb-h1 needs --pipeline-placement loop",
        ),
        ("--pipeline-schedule zb-v --compile", "needs a schedule with unsplit backward passes"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(f"--pipe-parallel-size 2 {words}")


def test_a_schedule_in_a_file_goes_with_the_rest_or_is_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/order.csv"
    with open(path, "w") as file:
        file.write("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    flag = f"--pipe-parallel-size 2 --pipeline-schedule-file {path}"
    parallel = read(f"{flag} --gas 1").parallel
    assert (parallel.chunks, parallel.placement, parallel.schedule) == (2, "v", f"file:{path}")
    for words, message in (
        (f"{flag} --gas 4", "is for steps of 1 micro-batches, got --gas 4"),
        (f"{flag} --gas 1 --pipeline-chunks 2", "order of the chunks, got --pipeline-chunks too"),
        (f"{flag} --gas 1 --pipeline-auto-schedules zb-v", "order of the chunks, got --pipeline-auto-schedules"),
        (
            f"--pipe-parallel-size 2 --pipeline-schedule-file {path}.none",
            "must contain a valid schedule: .*No such file",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read(words)
    with pytest.raises(ConfigError, match="must match --pipe-parallel-size 3, got .* with 2 stages"):
        read(f"--pipe-parallel-size 3 --pipeline-schedule-file {path} --gas 1", 3)
