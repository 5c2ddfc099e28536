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
from tests.helpers.huggingface_models import make_family_config, random_values, save_model
from tools import inspect_checkpoint

InspectCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InspectCommand:
    """Run the tool in this process; returns its exit code and its two outputs."""

    def run(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, args)])
        code = inspect_checkpoint.main()
        return code, *capsys.readouterr()

    return run


def save_tensors(folder: Path, step: int = 1, **tensors: torch.Tensor) -> Path:
    records = [TensorRecord(name.replace("__", "/"), t, Shard(tuple(t.shape))) for name, t in tensors.items()]
    return save(folder, step, records, {"progress": {"step": step, "updates": step, "samples_consumed": 0}}, SINGLE)


def test_sharded_checkpoint_is_reported_with_full_tensors(inspect_run: InspectCommand, tmp_path: Path) -> None:
    path = save_model(tmp_path / "run", make_family_config("gpt2"), num_ranks=2, has_moments=True)
    code, out, _ = inspect_run(tmp_path / "run", "--json")
    report = json.loads(out)
    assert code == 0 and report["verified"] and report["path"] == str(path)
    assert (report["step"], report["updates"], report["samples_consumed"], report["optimizer_steps"]) == (7, 6, 14, 6)
    assert report["layout"] == {
        "pipe": 1, "data": 1, "context": 1, "tensor": 2, "expert": 1, "context_inner": 1, "expert_tensor": 0
    }  # fmt: skip
    assert report["model"]["vocab_size"] == 29
    assert report["data_order"] == {"cursors": {"a": 5, "b": 9}}
    assert (
        report["files"] == {name: (path / name).stat().st_size for name in report["files"]}
        and len(report["files"]) == 2
    )
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    word = tensors["weights/embedding.word.weight"]
    expected = random_values("embedding.word.weight", (29, 16)).double()
    assert (word["shape"], word["dtype"], word["num_files"], word["num_not_finite"]) == ([29, 16], "F32", 2, 0)
    assert (
        math.isclose(word["norm"], expected.norm().item(), rel_tol=1e-12)
        and word["largest"] == expected.abs().max().item()
    )
    assert (
        report["elements"]["weights"]
        == report["elements"]["optimizer"]
        == sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name.startswith("weights/"))
    )


def test_table_lists_tensors_and_non_finite_values(inspect_run: InspectCommand, tmp_path: Path) -> None:
    values = torch.tensor([3.0, 4.0, torch.nan, -torch.inf])
    save_tensors(tmp_path, weights__a=values, rng__cpu=torch.zeros(5, dtype=torch.uint8))
    code, out, _ = inspect_run(tmp_path)
    rows = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in out.splitlines()
            if line.startswith("│")}  # fmt: skip
    assert code == 0 and rows["weights/a"] == ["F32", "4", "5", "4", "2", "1"]
    assert rows["rng/cpu"] == ["U8", "5", "-", "-", "", "1"]
    assert rows["step"] == ["1"]


def test_compare_ignores_training_state(inspect_run: InspectCommand, tmp_path: Path) -> None:
    values = torch.tensor([torch.nan, 0.0, 1.0])
    paths = [save_tensors(tmp_path / name, step, weights__a=values) for step, name in ((1, "x"), (2, "y"))]
    code, out, _ = inspect_run(paths[0], "--compare", paths[1])
    assert code == 0 and "all tensors are bitwise identical" in out and "progress" in out
    report = json.loads(inspect_run(paths[0], "--compare", paths[1], "--json")[1])
    assert report["equal"] and report["tensors"] == [] and report["state"]["progress"][1]["step"] == 2


def test_compare_reports_each_type_of_difference(inspect_run: InspectCommand, tmp_path: Path) -> None:
    first = save_tensors(
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
    second = save_tensors(
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
    code, out, _ = inspect_run(first, "--compare", second, "--json")
    report = json.loads(out)
    differences = {
        difference["name"]: (difference["kind"], difference["largest"], difference["relative"])
        for difference in report["tensors"]
    }
    assert code == 1 and not report["equal"] and differences == {
        "weights/values": ("values", 0.5, 0.1),
        "weights/sign": ("values", 0.0, 0.0),
        "weights/type": ("values", 0.0, 0.0),
        "weights/shape": ("shape", None, None),
        "weights/first": ("in one only", None, None),
        "weights/second": ("in one only", None, None),
        "optimizer/m": ("values", 1.0, math.sqrt(0.2)),
        "weights/nan": ("values", "nan", "nan"),
    }  # fmt: skip
    code, out, _ = inspect_run(first, "--compare", second, "--weights-only")
    assert code == 1 and "verdict: 7 weights differ" in out and "optimizer/m" not in out


def test_damaged_or_missing_checkpoint_exits_with_code_3(inspect_run: InspectCommand, tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "x", weights__a=torch.ones(4))
    raw = bytearray((path / "rank-00000.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(raw)
    code, out, err = inspect_run(path)
    assert code == 3 and out == "" and "was altered" in err and "Traceback" not in err
    for args in (["nowhere"], [tmp_path], [path / "manifest.json"]):
        assert inspect_run(*args)[0] == 3
    with pytest.raises(SystemExit, match="2"):
        inspect_run(path, "--weights-only")
