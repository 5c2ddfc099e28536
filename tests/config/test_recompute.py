"""What is recomputed and where its inputs wait: flags, keys of DeepSpeed's JSON, and what cannot act."""

from __future__ import annotations

import json

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

RECOMPUTE = "--checkpoint-activations"
SIZES = "--num-attention-heads 4 --hidden-size 16"


def read(line: str, folder=None, section: object = None, world_size: int = 2) -> Config:
    words = f"{line} {SIZES}".split()
    if section is not None:
        (folder / "ds.json").write_text(json.dumps({"activation_checkpointing": section}))
        words += ["--deepspeed_config", str(folder / "ds.json")]
    return parse(words, world_size=world_size, env={})


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            f"{RECOMPUTE} --recompute-activations",
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
def test_what_cannot_act_is_refused(line, parts):
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--partition-activations", "--partition-activations"),
        ("--checkpoint-in-cpu --contigious-checkpointing", "--checkpoint-in-cpu, --contigious-checkpointing"),
        (f"{RECOMPUTE} --distribute-checkpointed-activations", "--distribute-checkpointed-activations"),
        ("--recompute-granularity selective --checkpoint-in-cpu", "--checkpoint-in-cpu"),
        ("--recompute-activations --checkpoint-num-layers 2", "--checkpoint-num-layers 2"),
    ],
)
def test_what_acts_on_inputs_that_nobody_keeps_is_neutral(line, named):
    config, without = read(line), read(" ".join(line.split()[: 2 if "--recompute-granularity" in line else 1]))
    assert ", ".join(config.ignored) == named
    if named not in line.split()[0]:
        assert config.parallel == without.parallel


def test_megatrons_granularity_is_cpms_flag_or_the_attention_alone():
    full, selective = read("--recompute-granularity full").parallel, read("--recompute-activations").parallel
    assert full.checkpoint_activations and full == read(f"{RECOMPUTE} --recompute-granularity full").parallel
    assert selective.recompute_granularity == "selective" and not selective.checkpoint_activations
    assert read("--recompute-granularity full --recompute-num-layers 2").parallel.checkpoint_num_layers == 2


def test_the_section_of_the_json_says_where_inputs_wait(tmp_path):
    section = {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }
    said = f"{RECOMPUTE} --model-parallel-size 2"
    parallel = read(said, tmp_path, section).parallel
    flags = "--partition-activations --checkpoint-in-cpu --contigious-checkpointing"
    assert parallel == read(f"{said} {flags}").parallel
    with pytest.raises(ConfigError, match=r"got --checkpoint-in-cpu and activation_checkpointing\.cpu_checkpointing"):
        read(f"{said} --checkpoint-in-cpu", tmp_path, {"cpu_checkpointing": False})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--partition-activations in the JSON or the defaults has no effect without --checkpoint-activations"),
        (RECOMPUTE, "--partition-activations in the JSON or the defaults has no effect with one tensor rank"),
        (f"{RECOMPUTE} --model-parallel-size 2", ""),
    ],
)
def test_a_section_that_serves_several_layouts_is_noted_where_it_cannot_act(tmp_path, line, message):
    notes = [note for note in read(line, tmp_path, {"partition_activations": True}).notes if "no effect" in note]
    assert notes == [message] * bool(message)
