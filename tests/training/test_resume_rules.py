"""What a resumed run must share with its checkpoint, and where a start or a restart goes on."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments import parse
from megatron.arguments.flag_values import all_sections, config_from_values
from megatron.checkpoint import TensorRecord, save
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import CheckpointConfig, Config, DataConfig, RunConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.models.registry import FAMILIES
from megatron.mpu.groups import SINGLE
from megatron.mpu.initialize import initialize_model_parallel
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology
from megatron.training import checkpoint_source, compatibility, run_folder
from megatron.training.checkpoint_checks import check_tokenizer
from megatron.training.compatibility import RULES, layout_text, machine, settings_changed
from megatron.training.restore_options import EVERYTHING, RestoreOptions
from megatron.training.run_folder import RunPaths, _chosen
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.rows import check_rows


def config(**flags: Any) -> Config:
    return Config(checkpoint=CheckpointConfig(**flags))


def test_every_field_of_the_table_is_there_and_stands_once() -> None:
    named = [name for rule in RULES for name in rule.fields]
    real = {f"{section}.{field.name}" for section, kind in all_sections().items() for field in dataclasses.fields(kind)}
    assert len(named) == len(set(named)) and set(named) <= real


def test_each_warned_setting_is_told_with_both_values() -> None:
    """Row K19."""

    def check(name: str) -> None:
        section, field = name.split(".")
        now = config_from_values({}, family=section if section in FAMILIES else "gpt2")
        saved = now.to_dict()
        assert list(settings_changed(saved, now)) == []
        saved[section][field] = "another"
        assert list(settings_changed(saved, now)) == [f"{field}: saved another, now {now.to_dict()[section][field]}"]

    check_rows([name for rule in RULES for name in rule.fields], check)


def test_a_warm_up_in_steps_of_a_run_in_samples_is_warned_of_if_the_batch_changes() -> None:
    """The steps are converted with the batch given now; Megatron-LM rejects the two flags together."""
    line = "--train-samples 160 --lr-warmup-iters 5 --gas 1 --num-layers 1 --hidden-size 8 --num-attention-heads 2"
    saved, now = (parse(f"{line} --batch-size {size}".split(), world_size=1, env={}) for size in (4, 8))
    assert (saved.optimizer.lr_warmup_samples, now.optimizer.lr_warmup_samples) == (20, 40)
    changed = list(settings_changed(json.loads(json.dumps(saved.to_dict())), now))
    assert changed == ["batch_size: saved 4, now 8", "lr_warmup_samples: saved 20, now 40"]


def test_what_an_older_checkpoint_does_not_say_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(compatibility.log, "warning", warned.append)
    compatibility.warn_of_changes({"torch": torch.__version__, "config": {"optimizer": {}}}, Config(), "cpu")
    assert warned == []


@pytest.mark.parametrize("changed", ["torch", "threads", "cpu"])
def test_another_machine_is_warned_of(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row N10."""
    warned: list[str] = []
    monkeypatch.setattr(compatibility.log, "warning", warned.append)
    here = machine("cpu")
    saved = {**here, changed: "another"}
    compatibility.warn_of_changes({"torch": saved["torch"], "machine": saved}, Config(), "cpu")
    assert len(warned) == 1 and "bitwise identity" in warned[0]
    assert f"{changed}: saved another, now {here[changed]}" in warned[0]


def test_another_layout_is_told_in_one_line() -> None:
    """Row K15."""
    saved = asdict(Topology(pipe=2, data=1, tensor=2))
    assert layout_text(saved, Topology(pipe=4, data=1, tensor=1)) == "saved tp2 pp2 dp1, now tp1 pp4 dp1"
    assert layout_text(saved, Topology(pipe=2, data=1, tensor=2)) is None


def test_another_tokenizer_is_refused_unless_asked_for() -> None:
    """Row K17."""
    saved = {"tokenizer": "a" * 64}
    for state, now in ((saved, "a" * 64), (saved, None), ({}, "b" * 64), ({"tokenizer": None}, "b" * 64)):
        check_tokenizer(state, now, allow_change=False)
    with pytest.raises(
        CheckpointError, match="its files have changed.*Use the previous tokenizer.*--allow-vocab-change"
    ):
        check_tokenizer(saved, "b" * 64, allow_change=False)
    check_tokenizer(saved, "b" * 64, allow_change=True)


def test_the_tokenizer_setting_that_has_changed_is_named_and_hashes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    details: list[str] = []
    monkeypatch.setattr(compatibility.log, "debug", details.append)
    old, new = (Config(data=DataConfig(tokenizer_path=path)) for path in ("data/mine.json", "data/sample.json"))
    state = {"tokenizer": "a" * 64, "config": old.to_dict()}
    with pytest.raises(CheckpointError) as caught:
        check_tokenizer(state, "b" * 64, allow_change=False, config=new)
    text = str(caught.value)
    assert "--tokenizer-path was data/mine.json, now data/sample.json" in text
    assert text.index("the previous tokenizer") < text.index("--allow-vocab-change")
    assert "aaa" not in text and "a" * 64 in details[0] and "b" * 64 in details[0]


def test_data_settings_that_have_changed_are_named_by_their_flags() -> None:
    old = Config(data=DataConfig(split="900,50,50", packing="best-fit", data_path="a"), run=RunConfig(seed=7))
    new = Config(data=DataConfig(split="949,50,1", packing="best-fit", data_path="b", num_workers=2))
    said = compatibility.data_settings_changed(json.loads(json.dumps(old.to_dict())), new)
    assert said["samples"] == ["--split was 900,50,50, now 949,50,1", f"--seed was 7, now {RunConfig().seed}"]
    assert (said["tokenizer"], said["content"]) == ([], ["--data-path was a, now b"])
    assert compatibility.data_settings_changed({}, new) == {"samples": [], "tokenizer": [], "content": []}


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        ({}, EVERYTHING),
        ({"no_load_optim": True}, replace(EVERYTHING, optimizer=False)),
        ({"no_load_rng": True}, replace(EVERYTHING, generators=False)),
        ({"load_weights_only": True}, RestoreOptions(counters=True, data=True, optimizer=False, generators=False)),
        ({"finetune": True}, RestoreOptions(counters=False, data=False, optimizer=False, generators=False)),
        ({"eval_only": True}, RestoreOptions(counters=True, data=False, optimizer=False, generators=False)),
    ],
)
def test_what_each_flag_takes_up(flags: dict[str, bool], taken: RestoreOptions) -> None:
    assert RestoreOptions.of(CheckpointConfig(**flags)) == taken


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("MEGATRON_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def save_as(job: str | None, folder: Path, step: int = 1) -> None:
    state = {"job": job}
    save(folder / CHECKPOINTS, step, [TensorRecord("weights/a", torch.ones(1), Shard((1,)))], state, SINGLE)


@pytest.mark.parametrize("source", ["missing", "empty", "file"])
def test_a_start_without_its_checkpoint_ends_before_it_makes_a_folder(source: str, place: Path) -> None:
    """Row K09."""
    (place / "empty" / CHECKPOINTS).mkdir(parents=True)
    (place / "empty" / CHECKPOINTS / ".tmp-step-00000002-7").mkdir()
    (place / "file").touch()
    with pytest.raises(CheckpointError, match=source):
        _chosen(config(load=source), "gpt2")
    assert not (place / "runs").exists()
    made = _chosen(config(load=source, load_if_exists=True, save="new"), "gpt2")
    assert made == RunPaths(Path("new"), begins_again=True)
    with pytest.raises(CheckpointError, match="--resume needs a run.* Name another folder with --save, or"):
        _chosen(config(resume=True), "gpt2")
    for name, family in (("mine", "gpt2"), ("newer", "t5")):
        save_as(None, place / "runs" / name)
        (place / "runs" / name / "config.json").write_text(json.dumps({"family": family}))
    with pytest.raises(CheckpointError, match="found none. To resume runs/mine, add --save runs/mine, or"):
        _chosen(config(resume=True), "gpt2")
    assert _chosen(config(resume=True, save="runs/mine"), "gpt2").source == Path("runs/mine")
    assert _chosen(config(resume=True, load_if_exists=True), "gpt2").source is None


def test_load_if_exists_takes_what_is_there_damaged_or_not(place: Path) -> None:
    save_as(None, place / "run")
    assert _chosen(config(load="run", load_if_exists=True), "gpt2") == RunPaths(Path("run"), Path("run"))
    (place / "bad" / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    assert _chosen(config(load="bad", load_if_exists=True), "gpt2").source == Path("bad")


def test_a_restart_goes_on_with_everything_from_what_its_own_job_has_saved(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = config(load="old", finetune=True, save="run")
    save_as("job-0", place / "old")
    save_as("job-0", place / "run")  # of an earlier job
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    assert _chosen(start, "gpt2") == RunPaths(Path("run"), Path("old"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _chosen(start, "gpt2") == RunPaths(Path("run"), Path("old")), "nothing is saved yet"
    save_as("job-1", place / "run", 2)
    assert _chosen(start, "gpt2") == RunPaths(Path("run"), Path("run"), is_restart=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert _chosen(start, "gpt2") == RunPaths(Path("run"), Path("old")), "a new start of the job follows its flags"


def test_what_may_have_run_before_its_first_checkpoint_begins_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row A01: what was recorded by a start that was killed so early must not stand there twice."""
    assert not _chosen(config(save="run"), "gpt2").begins_again, "another run's records may be there"
    assert _chosen(config(save="run", resume=True, load_if_exists=True), "gpt2").begins_again
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _chosen(config(save="run"), "gpt2").begins_again
    save_as("job-0", place / "run")
    assert not _chosen(config(save="run"), "gpt2").begins_again, "an earlier job's records are there"


def test_a_restart_finds_the_folder_that_its_first_start_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    first = _chosen(config(), "gpt2")
    save_as("job-1", first.folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert _chosen(config(), "gpt2") == RunPaths(first.folder, first.folder, is_restart=True)
    assert checkpoint_source.newest_run("gpt2") == first.folder


def test_a_restart_takes_the_run_that_its_first_start_chose(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    save_as("job-0", place / "runs" / "gpt2-a")
    first = _chosen(config(resume=True), "gpt2")
    tuned = _chosen(config(resume=True), "gpt2")
    save_as("job-2", place / "runs" / "gpt2-b")
    os.utime(place / "runs" / "gpt2-b" / CHECKPOINTS / "step-00000001", (2**33, 2**33))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first.source == Path("runs/gpt2-a") and _chosen(config(resume=True), "gpt2") == first == tuned
    save_as("job-1", first.folder, 2)
    assert _chosen(config(resume=True), "gpt2") == RunPaths(first.folder, first.folder, is_restart=True)


def _choose_as_node(rank: int, folder: Path, blind: int) -> RunPaths | str:
    """Choose as the only rank of a node of its own; ``blind`` does not see what the others write."""
    node = World("cpu", torch.device("cpu"), initialize_model_parallel(), local_rank=0)
    if rank == blind:
        monkey = Path.exists
        Path.exists = lambda path, **rest: ".probe-" not in path.name and monkey(path, **rest)  # type: ignore[method-assign]
    try:
        return run_folder.choose(config(save=str(folder)), "gpt2", node)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("blind", [-1, 1])
def test_a_folder_that_a_node_does_not_see_is_found_at_the_start(blind: int, tmp_path: Path) -> None:
    chosen = run_ranks(2, _choose_as_node, tmp_path / "run", blind)
    assert chosen[0] == chosen[1] and list((tmp_path / "run").iterdir()) == []
    if blind < 0:
        assert chosen[0] == RunPaths(tmp_path / "run")
    else:
        assert "--save must name a folder that all nodes share, but node" in str(chosen[0])
