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


def test_what_deepspeed_and_programs_save_is_read(tmp_path: Path) -> None:
    torch.save(PLAIN, tmp_path / "file")
    read = load_safely(str(tmp_path / "file"), TorchCheckpointEngine().load)
    assert (read["args"], read["seen"], read["shape"]) == (PLAIN["args"], {1, 2}, torch.Size([2, 3]))
    assert read["generator"][2] == PLAIN["generator"][2]  # type: ignore[index]
    assert np.array_equal(read["generator"][1], PLAIN["generator"][1])  # type: ignore[index]
    assert (read["best"], type(read["best"]), read["scaler"].cur_scale) == (2.5, np.float32, 256.0)


@pytest.mark.parametrize("is_zip", [True, False])
def test_an_object_off_the_list_is_named_and_nothing_of_it_is_run(tmp_path: Path, is_zip: bool) -> None:
    """Row K23."""
    path, mark = str(tmp_path / "file"), tmp_path / "mark"
    torch.save({"a": torch.ones(2), "b": Bomb(mark)}, path, _use_new_zipfile_serialization=is_zip)
    engine = TorchCheckpointEngine()
    load = make_safe(engine)
    assert make_safe(engine) is load is engine.load and isinstance(load, SafeLoad)
    with pytest.raises(
        UnsafeFileError, match=r"got tests\.tds\.deepspeed\.test_safe_loading\.explode, and .*is_trusted=True"
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


def _bombed(rank: int, place: Path) -> tuple[str, str, bool, Any]:
    engine = _engine("ours", 2)
    engine.save_checkpoint(str(place), "good", client_state={"half": Fraction(1, 2)})
    engine.save_checkpoint(str(place), "bad")
    messages = []
    if rank == 0:
        layer = place / "bad" / "layer_04-model_states.pt"
        torch.save({**torch.load(layer), "more": Bomb(place / "mark")}, layer)
    torch.distributed.barrier()
    before = _weights(engine)
    for tag in ("bad", "good"):
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(str(place), tag)
        messages.append(str(raised.value))
    same = all(torch.equal(weight, before[name]) for name, weight in _weights(engine).items())
    _, state = engine.load_checkpoint(str(place), "good", is_trusted=True)
    assert not engine.checkpoint_engine.load.is_trusted
    return messages[0], messages[1], same, state["half"]


def test_the_engine_refuses_such_a_file_on_every_rank_and_reads_a_trusted_one(tmp_path: Path) -> None:
    first, second = run_ranks(2, _bombed, tmp_path)
    assert first == second
    assert all(part in first[0] for part in ("layer_04-model_states.pt", "safe_loading.explode", "is_trusted=True"))
    assert "fractions.Fraction" in first[1] and "mp_rank_00" in first[1]
    assert first[2:] == (True, Fraction(1, 2)) and not (tmp_path / "mark").exists()


UNSAFE = re.compile(
    r"weights_only=False|allow_pickle=True|\bpickle\.loads?\(|\bUnpickler\b|\btorch\.load\((?!.*weights_only=True)"
    r"|\b(dill|cloudpickle|joblib|shelve)\b|read_pickle|\bmarshal\.loads?\("
)


def test_nothing_in_the_repository_unpickles_a_file_that_it_reads() -> None:
    found = []
    for folder in ("megatron", "tds", "tools", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in lines if UNSAFE.search(line)]
    assert not found, "\n".join(found)
    assert UNSAFE.search("torch.load(path)") and not UNSAFE.search('torch.load(path, weights_only=True)["a"]')
