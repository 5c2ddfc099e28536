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
from megatron.training.compatibility import RULES, changed_settings, layout_text, machine_properties
from megatron.training.restore_options import EVERYTHING, RestoreOptions
from megatron.training.run_folder import RunPaths, _choose_paths
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.rows import check_rows


def make_config(**flags: Any) -> Config:
    return Config(checkpoint=CheckpointConfig(**flags))


def test_rule_fields_exist_and_are_unique() -> None:
    rule_fields = [name for rule in RULES for name in rule.fields]
    config_fields = {
        f"{section}.{field.name}"
        for section, section_type in all_sections().items()
        for field in dataclasses.fields(section_type)
    }
    assert len(rule_fields) == len(set(rule_fields)) and set(rule_fields) <= config_fields


def test_changed_setting_is_reported_with_both_values() -> None:
    """Row K19."""

    def check(name: str) -> None:
        section, field = name.split(".")
        current = config_from_values({}, family=section if section in FAMILIES else "gpt2")
        saved = current.to_dict()
        assert list(changed_settings(saved, current)) == []
        saved[section][field] = "another"
        assert list(changed_settings(saved, current)) == [
            f"{field}: saved another, now {current.to_dict()[section][field]}"
        ]

    check_rows([name for rule in RULES for name in rule.fields], check)


def test_changed_batch_size_reports_converted_warmup_samples() -> None:
    """The steps are converted with the batch given now; Megatron-LM rejects the two flags together."""
    base_args = "--train-samples 160 --lr-warmup-iters 5 --gas 1 --num-layers 1 --hidden-size 8 --num-attention-heads 2"
    saved, current = (
        parse(f"{base_args} --batch-size {batch_size}".split(), world_size=1, env={}) for batch_size in (4, 8)
    )
    assert (saved.optimizer.lr_warmup_samples, current.optimizer.lr_warmup_samples) == (20, 40)
    changed = list(changed_settings(json.loads(json.dumps(saved.to_dict())), current))
    assert changed == ["batch_size: saved 4, now 8", "lr_warmup_samples: saved 20, now 40"]


def test_settings_missing_from_old_checkpoint_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(compatibility.log, "warning", warnings.append)
    compatibility.warn_of_changes({"torch": torch.__version__, "config": {"optimizer": {}}}, Config(), "cpu")
    assert warnings == []


@pytest.mark.parametrize("changed_property", ["torch", "threads", "cpu"])
def test_changed_machine_warns(changed_property: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row N10."""
    warnings: list[str] = []
    monkeypatch.setattr(compatibility.log, "warning", warnings.append)
    current_machine = machine_properties("cpu")
    saved_machine = {**current_machine, changed_property: "another"}
    compatibility.warn_of_changes({"torch": saved_machine["torch"], "machine": saved_machine}, Config(), "cpu")
    assert len(warnings) == 1 and "bitwise identity" in warnings[0]
    assert f"{changed_property}: saved another, now {current_machine[changed_property]}" in warnings[0]


def test_changed_layout_is_reported_in_one_line() -> None:
    """Row K15."""
    saved = asdict(Topology(pipe=2, data=1, tensor=2))
    assert layout_text(saved, Topology(pipe=4, data=1, tensor=1)) == "saved tp2 pp2 dp1, now tp1 pp4 dp1"
    assert layout_text(saved, Topology(pipe=2, data=1, tensor=2)) is None


def test_changed_tokenizer_is_rejected_unless_allowed() -> None:
    """Row K17."""
    saved = {"tokenizer": "a" * 64}
    for state, current_hash in ((saved, "a" * 64), (saved, None), ({}, "b" * 64), ({"tokenizer": None}, "b" * 64)):
        check_tokenizer(state, current_hash, allow_change=False)
    with pytest.raises(
        CheckpointError, match="its files have changed.*Use the previous tokenizer.*--allow-vocab-change"
    ):
        check_tokenizer(saved, "b" * 64, allow_change=False)
    check_tokenizer(saved, "b" * 64, allow_change=True)


def test_error_names_changed_tokenizer_setting_without_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    details: list[str] = []
    monkeypatch.setattr(compatibility.log, "debug", details.append)
    old, new = (Config(data=DataConfig(tokenizer_path=path)) for path in ("data/mine.json", "data/sample.json"))
    state = {"tokenizer": "a" * 64, "config": old.to_dict()}
    with pytest.raises(CheckpointError) as error_info:
        check_tokenizer(state, "b" * 64, allow_change=False, config=new)
    text = str(error_info.value)
    assert "--tokenizer-path was data/mine.json, now data/sample.json" in text
    assert text.index("the previous tokenizer") < text.index("--allow-vocab-change")
    assert "aaa" not in text and "a" * 64 in details[0] and "b" * 64 in details[0]


def test_changed_data_settings_are_named_by_flags() -> None:
    old = Config(data=DataConfig(split="900,50,50", packing="best-fit", data_path="a"), run=RunConfig(seed=7))
    new = Config(data=DataConfig(split="949,50,1", packing="best-fit", data_path="b", num_workers=2))
    changes = compatibility.changed_data_settings(json.loads(json.dumps(old.to_dict())), new)
    assert changes["samples"] == ["--split was 900,50,50, now 949,50,1", f"--seed was 7, now {RunConfig().seed}"]
    assert (changes["tokenizer"], changes["content"]) == ([], ["--data-path was a, now b"])
    assert compatibility.changed_data_settings({}, new) == {"samples": [], "tokenizer": [], "content": []}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, EVERYTHING),
        ({"no_load_optim": True}, replace(EVERYTHING, optimizer=False)),
        ({"no_load_rng": True}, replace(EVERYTHING, generators=False)),
        ({"load_weights_only": True}, RestoreOptions(counters=True, data=True, optimizer=False, generators=False)),
        ({"finetune": True}, RestoreOptions(counters=False, data=False, optimizer=False, generators=False)),
        ({"eval_only": True}, RestoreOptions(counters=True, data=False, optimizer=False, generators=False)),
    ],
)
def test_flags_select_restored_state(flags: dict[str, bool], expected: RestoreOptions) -> None:
    assert RestoreOptions.from_flags(CheckpointConfig(**flags)) == expected


@pytest.fixture
def run_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("MEGATRON_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def save_for_job(job: str | None, folder: Path, step: int = 1) -> None:
    state = {"job": job}
    save(folder / CHECKPOINTS, step, [TensorRecord("weights/a", torch.ones(1), Shard((1,)))], state, SINGLE)


@pytest.mark.parametrize("source", ["missing", "empty", "file"])
def test_missing_checkpoint_raises_before_run_folder_is_created(source: str, run_root: Path) -> None:
    """Row K09."""
    (run_root / "empty" / CHECKPOINTS).mkdir(parents=True)
    (run_root / "empty" / CHECKPOINTS / ".tmp-step-00000002-7").mkdir()
    (run_root / "file").touch()
    with pytest.raises(CheckpointError, match=source):
        _choose_paths(make_config(load=source), "gpt2")
    assert not (run_root / "runs").exists()
    paths = _choose_paths(make_config(load=source, load_if_exists=True, save="new"), "gpt2")
    assert paths == RunPaths(Path("new"), may_start_from_scratch=True)
    with pytest.raises(CheckpointError, match="--resume needs a run.* Name another folder with --save, or"):
        _choose_paths(make_config(resume=True), "gpt2")
    for name, family in (("mine", "gpt2"), ("newer", "t5")):
        save_for_job(None, run_root / "runs" / name)
        (run_root / "runs" / name / "config.json").write_text(json.dumps({"family": family}))
    with pytest.raises(CheckpointError, match="found none. To resume runs/mine, add --save runs/mine, or"):
        _choose_paths(make_config(resume=True), "gpt2")
    assert _choose_paths(make_config(resume=True, save="runs/mine"), "gpt2").source == Path("runs/mine")
    assert _choose_paths(make_config(resume=True, load_if_exists=True), "gpt2").source is None


def test_load_if_exists_selects_checkpoint_even_if_damaged(run_root: Path) -> None:
    save_for_job(None, run_root / "run")
    assert _choose_paths(make_config(load="run", load_if_exists=True), "gpt2") == RunPaths(Path("run"), Path("run"))
    (run_root / "bad" / CHECKPOINTS / "step-00000001").mkdir(parents=True)
    assert _choose_paths(make_config(load="bad", load_if_exists=True), "gpt2").source == Path("bad")


def test_load_if_exists_does_not_ignore_checkpoint_of_deepspeed(run_root: Path) -> None:
    (run_root / "ds" / "global_step5").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"tools/import_checkpoint\.py"):
        _choose_paths(make_config(load="ds", load_if_exists=True), "gpt2")


def test_restart_resumes_all_state_from_checkpoint_of_same_job(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_config = make_config(load="old", finetune=True, save="run")
    save_for_job("job-0", run_root / "old")
    save_for_job("job-0", run_root / "run")  # of an earlier job
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    assert _choose_paths(start_config, "gpt2") == RunPaths(Path("run"), Path("old"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _choose_paths(start_config, "gpt2") == RunPaths(Path("run"), Path("old")), "nothing is saved yet"
    save_for_job("job-1", run_root / "run", 2)
    assert _choose_paths(start_config, "gpt2") == RunPaths(Path("run"), Path("run"), is_restart=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert _choose_paths(start_config, "gpt2") == RunPaths(Path("run"), Path("old")), (
        "a new start of the job follows its flags"
    )


def test_start_before_first_checkpoint_may_start_from_scratch(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row A01: what was recorded by a start that was killed so early must not stand there twice."""
    assert not _choose_paths(make_config(save="run"), "gpt2").may_start_from_scratch, (
        "another run's records may be there"
    )
    assert _choose_paths(make_config(save="run", resume=True, load_if_exists=True), "gpt2").may_start_from_scratch
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _choose_paths(make_config(save="run"), "gpt2").may_start_from_scratch
    save_for_job("job-0", run_root / "run")
    assert not _choose_paths(make_config(save="run"), "gpt2").may_start_from_scratch, (
        "an earlier job's records are there"
    )


def test_restart_reuses_run_folder_of_first_start(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    first = _choose_paths(make_config(), "gpt2")
    save_for_job("job-1", first.folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert _choose_paths(make_config(), "gpt2") == RunPaths(first.folder, first.folder, is_restart=True)
    assert checkpoint_source.newest_run("gpt2") == first.folder


def test_restart_reuses_source_of_first_start(run_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    save_for_job("job-0", run_root / "runs" / "gpt2-a")
    first = _choose_paths(make_config(resume=True), "gpt2")
    second = _choose_paths(make_config(resume=True), "gpt2")
    save_for_job("job-2", run_root / "runs" / "gpt2-b")
    os.utime(run_root / "runs" / "gpt2-b" / CHECKPOINTS / "step-00000001", (2**33, 2**33))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first.source == Path("runs/gpt2-a") and _choose_paths(make_config(resume=True), "gpt2") == first == second
    save_for_job("job-1", first.folder, 2)
    assert _choose_paths(make_config(resume=True), "gpt2") == RunPaths(first.folder, first.folder, is_restart=True)


def _choose_on_node(rank: int, folder: Path, blind_rank: int) -> RunPaths | str:
    """Choose as the only rank of a node of its own; ``blind_rank`` does not see what the others write."""
    world = World("cpu", torch.device("cpu"), initialize_model_parallel(), local_rank=0)
    if rank == blind_rank:
        original_exists = Path.exists
        Path.exists = lambda path, **kwargs: ".probe-" not in path.name and original_exists(path, **kwargs)  # type: ignore[method-assign]
    try:
        return run_folder.choose(make_config(save=str(folder)), "gpt2", world)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("blind_rank", [-1, 1])
def test_unshared_folder_is_detected_at_start(blind_rank: int, tmp_path: Path) -> None:
    chosen = run_ranks(2, _choose_on_node, tmp_path / "run", blind_rank)
    assert chosen[0] == chosen[1] and list((tmp_path / "run").iterdir()) == []
    if blind_rank < 0:
        assert chosen[0] == RunPaths(tmp_path / "run")
    else:
        assert "--save must name a folder that all nodes share, but node" in str(chosen[0])
