"""Runs with a layout check: a failed one ends the run, a correct one changes no loss; proof.json is repeated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse
from megatron.mpu import mappings
from megatron.training.programs import decoder
from megatron.training.proof import prove_only, repeat
from megatron.training.proof.check_result import OK
from tests.helpers.runs import ROOT, launch_script, make_flags
from tools import verify

RUN = "--model-parallel-size 2 --train-iters 3 --log-interval 1 --eval-iters 0 --attention-dropout 0.1"


def break_gradients(rank: int) -> None:
    """Leave out the all-reduce of the gradient of each column-parallel layer's input."""
    mappings._Copy.backward = staticmethod(lambda ctx, *grads: (grads[0], None))  # type: ignore[assignment]


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def proven_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a run of 2 ranks with a check, and its output."""
    folder = tmp_path_factory.mktemp("proven")
    log = folder / "log"
    assert launch_script(2, make_flags(corpus, folder / "run", f"{RUN} --prove"), log) == [0, 0]
    return folder / "run", log.read_text("utf-8")


def test_failed_check_ends_the_run_on_all_ranks_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    argv = make_flags(corpus, tmp_path / "run", f"{RUN} --prove")
    assert launch_script(2, argv, tmp_path / "log", break_gradients) == [5, 5]
    output = (tmp_path / "log").read_text("utf-8")
    assert output.count("FAILED: gradient of") == 1 and "Traceback" not in output
    assert "step 1/3" not in output and not (tmp_path / "run" / "proof.json").exists()


def test_failed_check_beside_the_steps_ends_the_run_without_a_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_PROVE")
    assert launch_script(2, make_flags(corpus, tmp_path / "run", RUN), tmp_path / "log", break_gradients) == [5, 5]
    output = (tmp_path / "log").read_text("utf-8")
    assert output.count("FAILED: gradient of") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_check_is_reported_once_and_changes_no_loss(proven_run: tuple[Path, str], corpus: Path, tmp_path: Path) -> None:
    run_dir, output = proven_run
    assert output.count("layout check: worst gradient") == 1
    assert output.index("layout check: worst gradient") < output.index("step 1/3")
    assert launch_script(2, make_flags(corpus, tmp_path / "run", f"{RUN} --no-prove"), tmp_path / "log") == [0, 0]
    assert "layout check" not in (tmp_path / "log").read_text("utf-8")
    assert losses(run_dir) == losses(tmp_path / "run") and len(losses(run_dir)) == 3
    skipped = json.loads((tmp_path / "run" / "proof.json").read_text("utf-8"))["layout_check"]
    assert (skipped["state"], skipped["reason"]) == ("not checked", "--no-prove")


def states_by_name(run_dir: Path, **kwargs: Any) -> dict[str, str]:
    return {item.name: item.state for item in repeat.repeat_proof(run_dir, **kwargs)}


def test_proof_is_repeated_and_each_change_is_found(proven_run: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = proven_run
    proof = json.loads((run_dir / "proof.json").read_text("utf-8"))
    assert proof["layout_check"]["state"] == OK and proof["layout_check"]["gradient"] < 1e-13
    assert proof["run"]["samples"] == 12 and proof["run"]["ranks"] == 2
    assert set(states_by_name(run_dir, has_layout_check=False).values()) == {"equal"}

    changes = {
        "version of torch": ("versions", "torch", "1.0"),
        "code: checksum": ("code", "checksum", "0"),
        "tokenizer": ("tokenizer", "probe_sha256", "0"),
        "data order": ("data", "samples_sha256", "0"),
    }
    for name, (section, key, value) in changes.items():
        copy = tmp_path / key
        shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("checkpoints"))
        changed = {**proof, section: {**proof[section], key: value}}
        (copy / "proof.json").write_text(json.dumps(changed), encoding="utf-8")
        states = states_by_name(copy, has_layout_check=False)
        assert [item for item, state in states.items() if state != "equal"] == [name]


def test_another_seed_has_another_data_order(proven_run: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = proven_run
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("checkpoints"))
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["run"]["seed"] += 1
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    states = states_by_name(copy, has_layout_check=False)
    assert [name for name, state in states.items() if state != "equal"] == ["data order"]


def test_moved_data_are_not_repeated(proven_run: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = proven_run
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("checkpoints"))
    config = json.loads((copy / "config.json").read_text("utf-8"))
    config["data"]["data_path"] = str(tmp_path / "moved")
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert verify.main([str(copy), "--no-layout-check"]) == 2  # the settings are not valid on this machine


def test_folder_without_proof_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(tmp_path)]) == 2
    assert "proof.json" in capsys.readouterr().err


PROOF = {
    "format": 1, "layout_check": {"state": "not checked"}, "data": {"problem": "x"}, "tokenizer": {"problem": "x"},
    "versions": {}, "code": {}, "run": {"family": "gpt2", "script": "pretrain_gpt2.py", "ranks": 1, "samples": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must contain an object, got list"),
        ({}, "format must be 1, got None"),
        ({**PROOF, "format": 2}, "format must be 1, got 2"),
        ({**PROOF, "data": None}, "data must be an object, got None"),
        ({name: value for name, value in PROOF.items() if name != "run"}, "run must be an object"),
        ({**PROOF, "layout_check": {}}, "layout_check.state must be of type str"),
        ({**PROOF, "layout_check": {"state": "ok", "gradient": "small"}}, "layout_check.gradient must be a number"),
        ({**PROOF, "run": {**PROOF["run"], "ranks": "two"}}, "run.ranks must be of type int, got two"),  # type: ignore[dict-item]
        ({**PROOF, "run": {**PROOF["run"], "ranks": 0}}, "run.ranks must be at least 1"),  # type: ignore[dict-item]
        ({**PROOF, "run": {**PROOF["run"], "family": "x"}}, "run.family must be one of gpt2"),  # type: ignore[dict-item]
    ],
)
def test_damaged_proof_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, message: str
) -> None:
    (tmp_path / "proof.json").write_text(json.dumps(content))
    assert verify.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_item_without_a_hash_is_not_equal(proven_run: tuple[Path, str], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(proven_run[0], copy, ignore=shutil.ignore_patterns("checkpoints"))
    proof = json.loads((copy / "proof.json").read_text("utf-8"))
    del proof["data"]["samples_sha256"]
    (copy / "proof.json").write_text(json.dumps(proof), encoding="utf-8")
    assert states_by_name(copy, has_layout_check=False)["data order"] == "not repeated"


@pytest.mark.slow
def test_verify_repeats_the_layout_check(proven_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(proven_run[0])]) == 0
    output = capsys.readouterr().out
    assert "layout check: equal (ok, worst gradient" in output and "verdict: equal" in output


def fail() -> Any:
    raise KeyError("no such size")


def test_prove_only_returns_0_for_one_process_and_1_if_nothing_can_be_checked() -> None:
    flags = "--prove-only --device cpu --num-layers 2 --vocab-size 100 --data-path none --eval-iters 0".split()
    for world_size, model_provider, code in ((1, decoder.model_provider, 0), (2, fail, 1)):
        config = parse(flags, world_size=world_size, env={})
        providers = (decoder.train_valid_test_datasets_provider, model_provider, decoder.forward_step)
        assert prove_only.prove_only(config, world_size, *providers) == code


def run_program(command: str, world_size: int) -> tuple[int, str]:
    """Return the exit code and the messages of a program that checks the layout only."""
    env = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    words = [sys.executable, *f"{command} --prove-only --device cpu --num-layers 4 --gas 4".split()]
    result = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    return result.returncode, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "pretrain_gpt2.py --model llama --sequence-parallel --hidden-size 64 --num-attention-heads 4",
        "pretrain_t5.py --hidden-size 64 --num-attention-heads 4 --enc-seq-length 64",
        "examples/own_model.py --hidden-size 64 --num-attention-heads 4",
    ],
)
def test_prove_only_needs_no_data_and_no_launcher(command: str) -> None:
    code, messages = run_program(f"{command} --model-parallel-size 2 --pipe-parallel-size 2", 8)
    assert code == 0 and "ok (8 ranks, tensor 2 x pipe 2 x data 2, 2 layers of width 32" in messages, messages
