"""--pipeline-model-parallel-layout is read as Megatron reads it, and refused with what must hold."""

from __future__ import annotations

import pytest

from megatron.arguments.parser import parse
from megatron.config.config import Config
from megatron.config.pipeline_layout import layout_bounds, num_layers, num_mtp_layers, parse_layout
from megatron.errors import ConfigError
from megatron.models import registry

MODEL_FLAGS = "--num-layers 7 --hidden-size 16 --num-attention-heads 4 --vocab-size 64 --dry-run"


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("Et|tL", ["Et", "tL"]),
        ("E,t,t|t*2,L", ["Ett", "ttL"]),
        ("Et*3|(tt|)*2t|L", ["Ettt", "tt", "tt", "t", "L"]),
        ("E|(t|)*3L", ["E", "t", "t", "t", "L"]),
        ("E t | (t(t|)*2)*2 tL |", ["Et", "tt", "t", "tt", "t", "tL"]),
    ],
)
def test_parse_layout_expands_brackets_and_repetition(text: str, chunks: list[str]) -> None:
    assert parse_layout(text) == chunks
    assert num_layers(chunks) == sum(chunk.count("t") for chunk in chunks)


def test_layout_head_includes_final_norm() -> None:
    assert layout_bounds(parse_layout("Et*3|(tt|)*2t|L")) == [0, 4, 6, 8, 9, 11]


def test_layout_head_includes_embedding_of_future_tokens() -> None:
    """Norm, embedding of future tokens, two multi-token prediction layers, head."""
    chunks = parse_layout("Et*3|(tt|)*2m*2L")
    assert (num_layers(chunks), num_mtp_layers(chunks)) == (7, 2)
    assert layout_bounds(chunks) == [0, 4, 6, 8, 13]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tt|L", "must be E, layers t"),
        ("Et|tt", "must be E, layers t"),
        ("Et|tEL", "must be E, layers t"),
        ("Etmt|L", "must be E, layers t, multi-token prediction layers m"),
        ("Et||tL", r"must have a layer, E or L, got none in chunk 1 of 'Et\|\|tL'"),
        ("E(t|tL", "must be E"),
    ],
)
def test_invalid_layout_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(text)


def parse_line(words: str, world_size: int = 2, family: str = "gpt2") -> Config:
    return parse([*MODEL_FLAGS.split(), *words.split()], world_size=world_size, env={}, family=family)


def test_layout_sets_chunks_and_bounds() -> None:
    config = parse_line("--pipe-parallel-size 2 --pipeline-model-parallel-layout Ett|t|ttt|tL")
    assert (config.parallel.chunks, config.parallel.schedule) == (2, "interleaved")
    assert registry.bounds_of(config, 2) == [0, 3, 4, 7, 10]
    config = parse_line("--pipe-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Ett|t|ttt|tL")
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
        ("--pipeline-model-parallel-layout Et*3|t*3", "must be E, layers t"),
    ],
)
def test_layout_conflicting_with_flags_raises(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_line(f"--pipe-parallel-size 2 --num-layers 6 {words}")


def test_layout_with_encoder_decoder_raises() -> None:
    line = "--enc-seq-length 8 --pipe-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*4L"
    with pytest.raises(ConfigError, match="does not support encoder-decoder models"):
        parse_line(line, family="t5")


def test_micro_batch_group_size_needs_chunks() -> None:
    flag = "--pipe-parallel-size 2 --gas 12 --microbatch-group-size-per-virtual-pipeline-stage"
    assert parse_line(f"{flag} 4 --pipeline-chunks 2").parallel.group_size == 4
    single_chunk = parse_line(f"{flag} 4")
    assert single_chunk.parallel.group_size == 0 and any(
        "has no effect without several chunks" in note for note in single_chunk.notes
    )
    with pytest.raises(ConfigError, match="must be at least --pipe-parallel-size, got 1 and 2"):
        parse_line(f"{flag} 1 --pipeline-chunks 2")


def test_v_placement_sets_chunks_and_schedules() -> None:
    for words in (
        "--pipeline-schedule zb-v",
        "--pipeline-placement v",
        "--pipeline-schedule auto --pipeline-placement v",
    ):
        parallel = parse_line(f"--pipe-parallel-size 2 {words}").parallel
        assert (parallel.chunks, parallel.placement, parallel.loss_stage) == (2, "v", 0)
    assert parse_line("--pipe-parallel-size 2 --pipeline-placement v").parallel.schedule == "zb-v"
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
            parse_line(f"--pipe-parallel-size 2 {words}")


def test_schedule_file_sets_layout_and_conflicts_raise(tmp_path: object) -> None:
    path = f"{tmp_path}/order.csv"
    with open(path, "w") as file:
        file.write("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    flag = f"--pipe-parallel-size 2 --pipeline-schedule-file {path}"
    parallel = parse_line(f"{flag} --gas 1").parallel
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
            parse_line(words)
    with pytest.raises(ConfigError, match="must match --pipe-parallel-size 3, got .* with 2 stages"):
        parse_line(f"--pipe-parallel-size 3 --pipeline-schedule-file {path} --gas 1", 3)
