"""The canary: rows can fail, and a row that ends its process does not hide the rows after it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu import canary, canary_compare
from benchmarks.gpu.canary_compare import BF16, FP32, NeedsCuda, NeedsPackage, Row, compare
from benchmarks.gpu.canary_kernels import KERNEL_ROWS
from benchmarks.gpu.canary_rows import DELTA_FACTOR, ROWS, compare_delta_rule
from megatron import triton_launch
from megatron.ops.delta_rule import gated_delta_rule
from tests.helpers.runs import ROOT
from tests.kernels.emulated import emulated

CPU = torch.device("cpu")
SAMPLES = "tests.benchmarks.gpu.canary_samples"
ON_CPU = 40
"""Minimum number of rows that exist on a CPU."""


def row_of(name: str) -> Callable[[torch.device], str]:
    (row,) = [row for row in ROWS if row.name == name]
    return row.run


def test_rows_pass_on_cpu_or_need_cuda() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    statuses = {row.name: canary.judge_row(row, CPU) for row in ROWS}
    failed = {name: text for name, (status, text) in statuses.items() if status == canary.FAILED}
    assert not failed
    on_cpu = [name for name, (status, _) in statuses.items() if status != canary.NEEDS_CUDA]
    assert len(on_cpu) >= ON_CPU and "NCCL with one rank" not in on_cpu
    assert statuses["grouped_mm with rows after the last expert"][1].startswith("grouped: out ")


@pytest.mark.parametrize("row", KERNEL_ROWS, ids=lambda row: row.name)
def test_kernel_rows_run_kernels_and_detect_wrong_values(row: Row) -> None:
    with emulated() as launches:
        text = row.run(CPU)
        assert text.startswith(f"{len(launches)} launches: ")
        launch = triton_launch.launch
        for wrong_kernel in set(launches):

            def launch_wrongly(kernel: str, *args: Any, writes: Any, updates: Any = (), **options: Any) -> None:
                launch(kernel, *args, writes=writes, updates=updates, **options)
                if kernel.endswith(f":{wrong_kernel}"):  # noqa: B023
                    for tensor in (*writes, *updates):
                        spoil(tensor)

            triton_launch.launch = launch_wrongly  # restored by ``emulated``
            with pytest.raises(AssertionError, match="allowed"):
                row.run(CPU)


def spoil(tensor: torch.Tensor) -> None:
    """Change all values by some percent; an FP8 value by half, and the bits of an fp32 value as integers."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.copy_(tensor.float() * 1.5)
    elif tensor.is_floating_point():
        tensor.mul_(1.03)
    else:
        tensor.add_(2**18)


def test_kernel_row_without_its_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.models.common.norms._has_kernel", lambda norm: False)
    with emulated(), pytest.raises(AssertionError, match=r"launched \[\], expected \['norm_backward_kernel', "):
        row_of("residual and RMSNorm")(CPU)


def test_copied_weights_fail_row_of_stacked_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.ops.stacked_weights.share_storage", lambda weights: None)
    with pytest.raises(AssertionError, match="would copy the weights"):
        row_of("grouped_mm of weights in one storage")(CPU)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[triton]'")
def test_kernel_rows_pass_in_the_interpreter() -> None:
    """In a process of its own, because Triton reads the variable when it is imported."""
    program = "import torch; from benchmarks.gpu.canary_kernels import KERNEL_ROWS\n"
    program += "for row in KERNEL_ROWS: print(row.run(torch.device('cpu')))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count(" launches: ") == len(KERNEL_ROWS)


class ScriptedWorker:
    """The second process, with made-up answers; a number ends it with this exit code, None does not answer."""

    scripts: list[list[Any]]
    first_rows: list[int]

    def __init__(self, args: argparse.Namespace, first: int) -> None:
        self.first_rows.append(first)
        self.answers, self.code = iter(self.scripts.pop(0)), 0

    def answer(self, within_s: float) -> dict[str, Any] | None:
        answer = next(self.answers)
        if answer is None:
            raise TimeoutError
        if isinstance(answer, int):
            self.code = answer
            return None
        return answer

    def close(self) -> int:
        return self.code


def end_of(idx: int, status: str = canary.PASSED) -> dict[str, Any]:
    return {"end": idx, "status": status, "text": "", "seconds": 0.0}


def test_rows_after_dead_hanging_and_failed_devices_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = {"rows": list("abcde"), "about": {}}
    ScriptedWorker.first_rows = []
    ScriptedWorker.scripts = [
        [ready, {"begin": 0}, end_of(0), {"begin": 1}, -11],
        [ready, {"begin": 2}, None],
        [ready, {"begin": 3}, end_of(3, canary.FAILED), canary.DEVICE_FAILED],
        [ready, {"begin": 4}, end_of(4), 0],
    ]
    monkeypatch.setattr(canary, "Worker", ScriptedWorker)
    answers = list(canary.answers(canary.parse_args(["--row-s", "5"])))
    assert answers[0] == ready and [answer["end"] for answer in answers[1:]] == [0, 1, 2, 3, 4]
    assert [answer["status"] for answer in answers[1:]] == ["passed", "failed", "failed", "failed", "passed"]
    assert (answers[2]["text"], answers[3]["text"]) == ("the process ended with code -11", "did not end in 5 s")
    assert ScriptedWorker.first_rows == [0, 2, 3, 4]
    ScriptedWorker.scripts = [[ready, {"begin": 4}, None], [0]]
    last_answer = list(canary.answers(canary.parse_args(["--row-s", "5", "--limit-factor", "3"])))[-1]
    assert last_answer["text"] == "did not end in 15 s"
    ScriptedWorker.scripts = [[1]]
    with pytest.raises(SystemExit, match="ended with code 1 before its first row"):
        list(canary.answers(canary.parse_args([])))


@pytest.mark.slow
def test_dead_and_hanging_rows_fail_and_later_rows_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--device", "cpu", "--rows", SAMPLES, "--row-s", "2", "--out", str(tmp_path)]
    assert canary.main(args) == 1
    content = json.loads((tmp_path / "canary.json").read_text())
    assert content["about"]["torch"] == torch.__version__
    assert {name: (row["status"], row["text"]) for name, row in content["rows"].items()} == {
        "fine": ("passed", "on cpu"),
        "lacking": ("needs CUDA", ""),
        "dies": ("failed", "the process ended with code 9"),
        "hangs": ("failed", "did not end in 2 s"),
        "wrong": ("failed", "AssertionError: out 1.0e+00; | allowed 1e-02"),
        "wrong but recorded": ("recorded", "AssertionError: out 1.0e+00; | allowed 1e-02"),
    }
    assert "== canary: 1 passed, 3 failed, 1 recorded, 1 needs CUDA" in capsys.readouterr().out


def test_only_selects_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert canary.run_rows("cpu", 0, ["fine", "lacking"], SAMPLES) == 0
    lines = [json.loads(line.removeprefix(canary.ANSWER)) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines if "end" in line] == ["passed", "needs CUDA"]
    assert canary.run_rows("cpu", 1, ["fine"], SAMPLES) == 0 and '"end"' not in capsys.readouterr().out


def test_comparison_rejects_wrong_values_shapes_and_nan() -> None:
    expected = torch.ones(4, dtype=torch.float64)
    assert compare({"out": expected.float()}, {"out": expected}, FP32) == "out 0.0e+00"
    for actual in (expected * 1.02, expected * torch.nan, expected[:3], torch.zeros(4)):
        with pytest.raises(AssertionError, match="allowed 1e-02"):
            compare({"out": actual}, {"out": expected}, BF16)
    compare({"out": expected * 1.02}, {"out": expected}, BF16, factor=3)


def test_sum_in_bf16_fails_embedding_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.mpu.embedding_lookup.embedding_lookup", F.embedding)
    with pytest.raises(AssertionError, match=r"row 1\.\de-01"):
        row_of("embedding gradient of a token that occurs 2,000 times")(CPU)


def test_rows_of_dropped_choices_in_weights_fail_grouped_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.ops import grouped

    def with_dropped_rows(counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        ends[-1] = 128
        return ends

    monkeypatch.setattr(grouped, "ends_of", with_dropped_rows)
    with pytest.raises(AssertionError, match="dweights"):
        row_of("grouped_mm with rows after the last expert")(CPU)


def test_missing_guard_fails_grouped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.ops import grouped

    monkeypatch.setattr(grouped, "select_implementation", lambda x, output_size: grouped.GROUPED)
    for name in ("0 rows", "sizes not divisible by 8"):
        with pytest.raises(AssertionError, match="the implementation is grouped, expected loop"):
            row_of(f"grouped_mm with {name} (guarded)")(CPU)


def test_attention_that_sees_later_keys_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron.ops.attention.attention", lambda q, k, v, mask=None: F.scaled_dot_product_attention(q, k, v)
    )
    with pytest.raises(AssertionError, match="allowed 1e-02"):
        row_of("causal attention, d = 64")(CPU)


@pytest.mark.parametrize("has_decay_per_element", [False, True])
def test_delta_rule_that_ignores_documents_or_rounds_too_much_fails(has_decay_per_element: bool) -> None:
    def ignore_documents(*inputs: torch.Tensor, starts: torch.Tensor) -> Any:
        return gated_delta_rule(*inputs)

    def decay_more(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, *others: torch.Tensor,
        starts: torch.Tensor,
    ) -> Any:  # fmt: skip
        return gated_delta_rule(query, key, value, 1.1 * log_decay, *others, starts=starts)

    for rule in (ignore_documents, decay_more):
        with pytest.raises(AssertionError, match="allowed 2e-02"):
            compare_delta_rule(rule, CPU, has_decay_per_element=has_decay_per_element, factor=DELTA_FACTOR)


def test_row_without_its_package_is_not_judged() -> None:
    def run(device: torch.device) -> str:
        raise NeedsPackage("fla-core")

    assert canary.judge_row(Row("row", run), CPU) == (canary.NEEDS_PACKAGE, "fla-core is not installed")


def test_rows_that_need_cuda_say_so() -> None:
    with pytest.raises(NeedsCuda):
        canary_compare.require_cuda(CPU)
    assert canary_compare.relative_error(torch.zeros(2), torch.zeros(3)) == float("inf")
