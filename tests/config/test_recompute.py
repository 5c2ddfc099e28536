"""What is recomputed and where its inputs wait: flags, keys of DeepSpeed's JSON, and what cannot act."""

from __future__ import annotations

import json

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

CHECKPOINT_FLAG = "--checkpoint-activations"
SIZE_FLAGS = "--num-attention-heads 4 --hidden-size 16"


def parse_line(line: str, folder=None, section: object = None, world_size: int = 2) -> Config:
    words = f"{line} {SIZE_FLAGS}".split()
    if section is not None:
        (folder / "ds.json").write_text(json.dumps({"activation_checkpointing": section}))
        words += ["--deepspeed_config", str(folder / "ds.json")]
    return parse(words, world_size=world_size, env={})


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        (
            f"{CHECKPOINT_FLAG} --recompute-activations",
            ["--checkpoint-activations recomputes full layers", "--recompute-granularity selective"],
        ),
        ("--recompute-granularity half", ["--recompute-granularity must be one of full, selective, got 'half'"]),
        (
            "--pipe-parallel-size 2 --compile --pipeline-schedule zb-h1",
            ["--compile needs a schedule with unsplit", "zb-h1"],
        ),
        (
            "--pipe-parallel-size 2 --compile --pipeline-schedule auto --pipeline-chunks 2 --num-layers 4",
            ["--compile needs a schedule with unsplit", "Use --pipeline-schedule interleaved,"],
        ),
        (
            "--pipe-parallel-size 2 --compile --pipeline-schedule auto",
            ["--compile needs a schedule with unsplit", "auto"],
        ),
        ("--compile --hidden-dropout 0.1 --layout-independent-dropout", ["--compile", "--layout-independent-dropout"]),
    ],
)
def test_unsupported_combinations_raise(line, fragments):
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line)
    assert all(fragment in str(exc_info.value) for fragment in fragments), exc_info.value


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--partition-activations", "--partition-activations"),
        ("--checkpoint-in-cpu --contigious-checkpointing", "--checkpoint-in-cpu, --contigious-checkpointing"),
        (f"{CHECKPOINT_FLAG} --distribute-checkpointed-activations", "--distribute-checkpointed-activations"),
        ("--recompute-granularity selective --checkpoint-in-cpu", "--checkpoint-in-cpu"),
        ("--recompute-activations --checkpoint-num-layers 2", "--checkpoint-num-layers 2"),
    ],
)
def test_storage_flags_without_stored_inputs_are_ignored(line, expected):
    config, baseline = (
        parse_line(line),
        parse_line(" ".join(line.split()[: 2 if "--recompute-granularity" in line else 1])),
    )
    assert ", ".join(config.ignored) == expected
    if expected not in line.split()[0]:
        assert config.parallel == baseline.parallel


def test_recompute_granularity_maps_to_full_or_selective():
    full, selective = (
        parse_line("--recompute-granularity full").parallel,
        parse_line("--recompute-activations").parallel,
    )
    assert (
        full.checkpoint_activations and full == parse_line(f"{CHECKPOINT_FLAG} --recompute-granularity full").parallel
    )
    assert selective.recompute_granularity == "selective" and not selective.checkpoint_activations
    assert parse_line("--recompute-granularity full --recompute-num-layers 2").parallel.checkpoint_num_layers == 2


def test_json_section_sets_activation_storage(tmp_path):
    section = {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }
    line = f"{CHECKPOINT_FLAG} --model-parallel-size 2"
    parallel = parse_line(line, tmp_path, section).parallel
    flags = "--partition-activations --checkpoint-in-cpu --contigious-checkpointing"
    assert parallel == parse_line(f"{line} {flags}").parallel
    with pytest.raises(ConfigError, match=r"got --checkpoint-in-cpu and activation_checkpointing\.cpu_checkpointing"):
        parse_line(f"{line} --checkpoint-in-cpu", tmp_path, {"cpu_checkpointing": False})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--partition-activations in the JSON or the defaults has no effect without --checkpoint-activations"),
        (CHECKPOINT_FLAG, "--partition-activations in the JSON or the defaults has no effect with one tensor rank"),
        (f"{CHECKPOINT_FLAG} --model-parallel-size 2", ""),
    ],
)
def test_ineffective_json_section_is_noted(tmp_path, line, message):
    notes = [note for note in parse_line(line, tmp_path, {"partition_activations": True}).notes if "no effect" in note]
    assert notes == [message] * bool(message)
