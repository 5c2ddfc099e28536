"""CPU runs computed beforehand are used for the same command line and sources only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import references, train, train_run
from tests.benchmarks.gpu.made import make_dry_machine, make_run

LOSSES = [7.0, 6.5000000001, 0.1 + 0.2]


def forbid_runs(*args: Any, **options: Any) -> None:
    raise AssertionError("the CPU must not be run")


def test_reference_is_used_with_all_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_dry_machine(tmp_path)
    machine.references = tmp_path / "references"
    words = train.reference_words(machine, "gpt2", train_run.DROPOUT)
    references.save_reference(machine.references, "gpt2", words, make_run(LOSSES, norm=math.pi), "2.13.0")
    monkeypatch.setattr(train, "cached_run", forbid_runs)
    run = train.reference(machine, "gpt2", train_run.DROPOUT)
    assert run.bits == make_run(LOSSES, norm=math.pi).bits and run.folder.suffix == ".json"
    for family, extra in (("gpt2", ""), ("llama", train_run.DROPOUT)):
        with pytest.raises(AssertionError, match="must not be run"):
            train.reference(machine, family, extra)


def test_reference_of_other_sources_or_sizes_is_not_used(tmp_path: Path) -> None:
    machine = make_dry_machine(tmp_path)
    words = train.reference_words(machine, "gpt2")
    references.save_reference(tmp_path, "gpt2", words, make_run(LOSSES), "2.13.0")
    assert references.load_reference(tmp_path, "gpt2", words, references.sources_checksum()) is not None
    assert references.load_reference(tmp_path, "gpt2", words, "other") is None
    assert references.load_reference(None, "gpt2", words, references.sources_checksum()) is None
    machine.is_dry = False
    device_words = train.reference_words(machine, "gpt2")
    assert device_words != words
    assert references.load_reference(tmp_path, "gpt2", device_words, references.sources_checksum()) is None


def test_words_of_reference_contain_no_path_of_this_machine(tmp_path: Path) -> None:
    words = train.reference_words(make_dry_machine(tmp_path), "llama", train.EXPERTS)
    assert not [word for word in words if word.startswith("/")] and "--num-experts" in words


def test_checksum_depends_on_sources_only(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    source = tmp_path / "megatron" / "a.py"
    source.write_text("x = 1\n")
    before = references.sources_checksum(tmp_path)
    (tmp_path / "README.md").write_text("text")
    assert references.sources_checksum(tmp_path) == before
    source.write_text("x = 2\n")
    assert references.sources_checksum(tmp_path) != before


def test_commit_is_carried_and_marked_if_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert references.carried_commit(tmp_path) == ""
    monkeypatch.setattr("megatron.training.run_record.git_commit", lambda: "0123abc")
    references.write_about(tmp_path)
    assert references.carried_commit(tmp_path) == "0123abc"
    about = json.loads((tmp_path / references.ABOUT).read_text())
    (tmp_path / references.ABOUT).write_text(json.dumps(about | {"sources": "other"}))
    assert references.carried_commit(tmp_path) == "0123abc+changes"


def test_every_reference_of_a_case_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is not listed would be computed on the GPU machine."""
    used: set[tuple[str, str]] = set()

    def record(machine: Any, family: str, extra: str = "") -> train_run.Run:
        used.add((family, extra))
        return make_run([7.0, 6.0])

    monkeypatch.setattr(train, "reference", record)
    monkeypatch.setattr(train, "train", lambda *_, **__: make_run([7.0, 6.0]))
    monkeypatch.setattr(train, "on_device", lambda *_: make_run([7.0, 6.0]))
    machine = make_dry_machine(tmp_path)
    for case in train.cases(machine):
        if not any(word in case.name for word in ("twice", "resume", "async", "compile", "offload")):
            case.run(machine, tmp_path)
    assert used == set(train.REFERENCES) and len(train.REFERENCES) == len(used)
