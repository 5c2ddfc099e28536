"""tools/inspect_checkpoint.py: what it says of one checkpoint, and of two."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import TensorRecord, save
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from tests.helpers.huggingface_models import config_of, save_model, values_of
from tools import inspect_checkpoint

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the tool in this process; returns its exit code and its two outputs."""

    def run(*words: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, words)])
        code = inspect_checkpoint.main()
        return code, *capsys.readouterr()

    return run


def save_tensors(folder: Path, step: int = 1, **tensors: torch.Tensor) -> Path:
    records = [TensorRecord(name.replace("__", "/"), t, Shard(tuple(t.shape))) for name, t in tensors.items()]
    return save(folder, step, records, {"progress": {"step": step, "updates": step, "samples_consumed": 0}}, SINGLE)


def test_a_checkpoint_of_two_ranks_is_told_whole(inspect: Run, tmp_path: Path) -> None:
    path = save_model(tmp_path / "run", config_of("gpt2"), ranks=2, moments=True)
    code, out, _ = inspect(tmp_path / "run", "--json")
    report = json.loads(out)
    assert code == 0 and report["verified"] and report["path"] == str(path)
    assert (report["step"], report["updates"], report["samples_consumed"], report["optimizer_steps"]) == (7, 6, 14, 6)
    assert report["layout"] == {"pipe": 1, "data": 1, "context": 1, "tensor": 2, "expert": 1}
    assert report["model"]["vocab_size"] == 29
    assert report["data_order"] == {"cursors": {"a": 5, "b": 9}}
    assert (
        report["files"] == {name: (path / name).stat().st_size for name in report["files"]}
        and len(report["files"]) == 2
    )
    tensors = {one["name"]: one for one in report["tensors"]}
    word = tensors["weights/embedding.word.weight"]
    whole = values_of("embedding.word.weight", (29, 16)).double()
    assert (word["shape"], word["dtype"], word["num_files"], word["num_not_finite"]) == ([29, 16], "F32", 2, 0)
    assert (
        math.isclose(word["norm"], whole.norm().item(), rel_tol=1e-12) and word["largest"] == whole.abs().max().item()
    )
    assert (
        report["elements"]["weights"]
        == report["elements"]["optimizer"]
        == sum(math.prod(one["shape"]) for name, one in tensors.items() if name.startswith("weights/"))
    )


def test_the_table_names_each_tensor_and_what_is_not_finite(inspect: Run, tmp_path: Path) -> None:
    values = torch.tensor([3.0, 4.0, torch.nan, -torch.inf])
    save_tensors(tmp_path, weights__a=values, rng__cpu=torch.zeros(5, dtype=torch.uint8))
    code, out, _ = inspect(tmp_path)
    rows = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in out.splitlines()
            if line.startswith("│")}  # fmt: skip
    assert code == 0 and rows["weights/a"] == ["F32", "4", "5", "4", "2", "1"]
    assert rows["rng/cpu"] == ["U8", "5", "-", "-", "", "1"]
    assert rows["step"] == ["1"]


def test_the_same_bits_are_equal_and_state_does_not_count(inspect: Run, tmp_path: Path) -> None:
    values = torch.tensor([torch.nan, 0.0, 1.0])
    paths = [save_tensors(tmp_path / name, step, weights__a=values) for step, name in ((1, "x"), (2, "y"))]
    code, out, _ = inspect(paths[0], "--compare", paths[1])
    assert code == 0 and "all tensors are bitwise identical" in out and "progress" in out
    report = json.loads(inspect(paths[0], "--compare", paths[1], "--json")[1])
    assert report["equal"] and report["tensors"] == [] and report["state"]["progress"][1]["step"] == 2


def test_each_kind_of_difference_is_told(inspect: Run, tmp_path: Path) -> None:
    one = save_tensors(
        tmp_path / "x",
        weights__same=torch.ones(2),
        weights__values=torch.tensor([3.0, 4.0]),
        weights__sign=torch.tensor([0.0]),
        weights__type=torch.ones(2),
        weights__shape=torch.ones(2, 3),
        weights__first=torch.ones(1),
        optimizer__m=torch.tensor([1.0, 2.0]),
        weights__nan=torch.tensor([1.0, 1.0]),
    )
    other = save_tensors(
        tmp_path / "y",
        weights__same=torch.ones(2),
        weights__values=torch.tensor([3.0, 4.5]),
        weights__sign=torch.tensor([-0.0]),
        weights__type=torch.ones(2, dtype=torch.float64),
        weights__shape=torch.ones(3, 2),
        optimizer__m=torch.tensor([1.0, 3.0]),
        weights__nan=torch.tensor([1.0, torch.nan]),
        weights__second=torch.ones(1),
    )
    code, out, _ = inspect(one, "--compare", other, "--json")
    report = json.loads(out)
    found = {d["name"]: (d["kind"], d["largest"], d["relative"]) for d in report["tensors"]}
    assert code == 1 and not report["equal"] and found == {
        "weights/values": ("values", 0.5, 0.1),
        "weights/sign": ("values", 0.0, 0.0),
        "weights/type": ("values", 0.0, 0.0),
        "weights/shape": ("shape", None, None),
        "weights/first": ("in one only", None, None),
        "weights/second": ("in one only", None, None),
        "optimizer/m": ("values", 1.0, math.sqrt(0.2)),
        "weights/nan": ("values", "nan", "nan"),
    }  # fmt: skip
    code, out, _ = inspect(one, "--compare", other, "--weights-only")
    assert code == 1 and "verdict: 7 weights differ" in out and "optimizer/m" not in out


def test_a_damaged_checkpoint_and_none_at_all_end_with_code_3(inspect: Run, tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "x", weights__a=torch.ones(4))
    raw = bytearray((path / "rank-00000.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(raw)
    code, out, err = inspect(path)
    assert code == 3 and out == "" and "was altered" in err and "Traceback" not in err
    for words in (["nowhere"], [tmp_path], [path / "manifest.json"]):
        assert inspect(*words)[0] == 3
    with pytest.raises(SystemExit, match="2"):
        inspect(path, "--weights-only")
