"""No file runs code: what the tds engine reads, and what the rest of the repository reads."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from tds.deepspeed.checkpointing import CheckpointError
from tds.deepspeed.safe_load import SafeLoad, UnsafeFileError, load_safely, make_safe, weights_only
from tests.helpers.harness import run_ranks
from tests.tds.deepspeed.test_saving import _engine, _weights

ROOT = Path(__file__).resolve().parents[3]


def explode(path: Path) -> None:
    path.touch()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return explode, (self.path,)


PLAIN = {
    "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
    "generator": np.random.RandomState(3).get_state(),
    "best": np.float32(2.5),
    "seen": {1, 2},
    "scaler": DynamicLossScaler(256.0, 2.0, 10, 1.0, 2, False, True),
    "shape": torch.Size([2, 3]),
}


def test_safe_load_reads_common_checkpoint_types(tmp_path: Path) -> None:
    torch.save(PLAIN, tmp_path / "file")
    read = load_safely(str(tmp_path / "file"), TorchCheckpointEngine().load)
    assert (read["args"], read["seen"], read["shape"]) == (PLAIN["args"], {1, 2}, torch.Size([2, 3]))
    assert read["generator"][2] == PLAIN["generator"][2]  # type: ignore[index]
    assert np.array_equal(read["generator"][1], PLAIN["generator"][1])  # type: ignore[index]
    assert (read["best"], type(read["best"]), read["scaler"].cur_scale) == (2.5, np.float32, 256.0)


@pytest.mark.parametrize("is_zip", [True, False])
def test_unsafe_object_is_rejected_and_not_executed(tmp_path: Path, is_zip: bool) -> None:
    """Row K23."""
    path, mark = str(tmp_path / "file"), tmp_path / "mark"
    torch.save({"a": torch.ones(2), "b": Bomb(mark)}, path, _use_new_zipfile_serialization=is_zip)
    engine = TorchCheckpointEngine()
    load = make_safe(engine)
    assert make_safe(engine) is load is engine.load and isinstance(load, SafeLoad)
    with pytest.raises(
        UnsafeFileError, match=r"got tests\.tds\.deepspeed\.test_safe_loading\.explode\. .*is_trusted=True"
    ):
        engine.load(path)
    with weights_only(), pytest.raises(Exception, match="Weights only"):
        torch.load(path, weights_only=False)
    assert not mark.exists()
    load.is_trusted = True
    assert torch.equal(engine.load(path)["a"], torch.ones(2)) and mark.exists()
    (tmp_path / "text").write_text("what is this?")
    with pytest.raises(UnsafeFileError, match="the file is damaged, or not from torch"):
        load_safely(str(tmp_path / "text"))


def _load_unsafe_checkpoint(rank: int, folder: Path) -> tuple[str, str, bool, Any]:
    engine = _engine("ours", 2)
    engine.save_checkpoint(str(folder), "good", client_state={"half": Fraction(1, 2)})
    engine.save_checkpoint(str(folder), "bad")
    messages = []
    if rank == 0:
        layer = folder / "bad" / "layer_04-model_states.pt"
        torch.save({**torch.load(layer), "more": Bomb(folder / "mark")}, layer)
    torch.distributed.barrier()
    before = _weights(engine)
    for tag in ("bad", "good"):
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(str(folder), tag)
        messages.append(str(raised.value))
    is_unchanged = all(torch.equal(weight, before[name]) for name, weight in _weights(engine).items())
    _, state = engine.load_checkpoint(str(folder), "good", is_trusted=True)
    assert not engine.checkpoint_engine.load.is_trusted
    return messages[0], messages[1], is_unchanged, state["half"]


def test_engine_rejects_unsafe_file_on_all_ranks_unless_trusted(tmp_path: Path) -> None:
    first, second = run_ranks(2, _load_unsafe_checkpoint, tmp_path)
    assert first == second
    assert all(
        fragment in first[0] for fragment in ("layer_04-model_states.pt", "safe_loading.explode", "is_trusted=True")
    )
    assert "fractions.Fraction" in first[1] and "mp_rank_00" in first[1]
    assert first[2:] == (True, Fraction(1, 2)) and not (tmp_path / "mark").exists()


UNSAFE = re.compile(
    r"weights_only=False|allow_pickle=True|\bpickle\.loads?\(|\bUnpickler\b|\btorch\.load\((?!.*weights_only=True)"
    r"|\b(dill|cloudpickle|joblib|shelve)\b|read_pickle|\bmarshal\.loads?\("
)


SAFE_FILES = {"megatron/checkpoint/torch_dist/inert_pickle.py": "its unpickler imports and calls nothing"}


def test_repository_contains_no_unsafe_loading() -> None:
    violations = []
    for folder in ("megatron", "tds", "tools", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).as_posix() in SAFE_FILES:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            violations += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in lines if UNSAFE.search(line)]
    assert not violations, "\n".join(violations)
    assert UNSAFE.search("torch.load(path)") and not UNSAFE.search('torch.load(path, weights_only=True)["a"]')
