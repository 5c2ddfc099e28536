"""Parts ``tests`` and ``layouts``: the repository's own checks, pytest and tools/check_layout.py, on a device.

| part | case | runs | on |
|---|---|---|---|
| tests | gpu: FILE | ``pytest -m gpu --all`` of every file that has such tests, in shards if it is long | the device |
| tests | suite: FOLDER | folders of the ordinary suite | the CPU, with this machine's Python and torch |
| layouts | one process twice, every layout over gloo | tools/check_layout.py | the device, which all ranks share |
| layouts | nccl | every collective with one rank; tools/check_layout.py over all GPUs | the device |

A case of ``tests`` fails with the names of the failed tests and the first line of each error. It reports skipped tests
with the reasons, and the attention kernels that ran. A file without any executed test does not pass.

Every case of ``layouts`` is one start of tools/check_layout.py: the same seed, tokens and global batch in one process
and in the layout; losses, gradient norm and every gradient must agree within the tool's bounds. Ranks that share a GPU
communicate through the host (tds/p2p/host_copies.py), which checks their values but not their speed. The results of the
single process are reused by all cases of a model and number format. NCCL runs with one rank, and with one rank per GPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, TIMED_OUT, Case, CompletedCommand, Machine, Part, Skip, run_command, run_python

MARK = "pytest.mark.gpu"
GPU_TEST_DIR = "tests/gpu"
FIRST_FILES = ("test_attention.py", "test_families.py", "test_optimizer.py")
"""Files in the folder ``GPU_TEST_DIR`` that run first, before its other files and files in other folders."""
SUITE: dict[str, tuple[str, ...]] = {
    "mpu": ("tests/mpu",),
    "ops": ("tests/ops",),
    "models": ("tests/models",),
    "optim": ("tests/optim",),
    "DeepSpeed's contract": ("tests/tds/test_deepspeed_contract.py", "tests/tds/test_private_names.py"),
    "tds": ("tests/tds/test_parity.py", "tests/tds/engine/test_engine.py", "tests/tds/p2p/test_exchange.py"),
    "runs": ("tests/training/test_golden.py", "tests/training/test_resume.py", "tests/training/test_compiled.py"),
    "checkpoints": ("tests/checkpoint/test_layouts.py", "tests/checkpoint/test_background.py"),
}
DRY_SUITE = {"ops": ("tests/models/common/test_norm.py", "tests/ops/test_gelu.py")}
NUM_SHARDS = {"tests/gpu/test_documents.py": 5}
"""File -> number of cases that it is split into: its 40 compilations of flex_attention take minutes in one process.

The number has no factor in common with the numbers of parameters (2, 3 and 7), so that each shard has all kinds.
"""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""Environment variables that hide the GPU from the ordinary suite, which expects machines without one."""
MAX_LISTED_NAMES, MAX_REASON_CHARS = 6, 150
TEST_LIMIT_S = 120.0
"""Time limit of a test in seconds, as in pyproject.toml."""
RESULT = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>\w+) )?(?P<name>\S+\.py::.+?)(?: (?P<last>PASSED|FAILED|ERROR|SKIPPED)\b.*)?$",
    re.MULTILINE,
)
"""Pattern of a line of ``pytest -v``, with or without xdist, also for a test that has not ended."""


@dataclass
class PytestReport:
    """The results of a pytest run.

    Attributes:
        failed: test -> first line of the error; includes failed set-ups and files that could not be imported.
        skipped: reason -> number of tests.
        properties: values that tests passed to ``record_property``, such as the name of the kernel that ran.
    """

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    properties: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All results in one line, with the names of failed tests."""
        names = [f"{name}: {error_line}" for name, error_line in list(self.failed.items())[:MAX_LISTED_NAMES]]
        num_unlisted = len(self.failed) - len(names)
        return "; ".join(
            [
                f"{self.passed} passed" + (f", {len(self.failed)} failed" if self.failed else ""),
                *names,
                *([f"and {num_unlisted} more failed"] if num_unlisted > 0 else []),
                *(f"{count} skipped: {reason}" for reason, count in self.skipped.most_common()),
                *self.properties,
            ]
        )

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers of results, for tables."""
        return {
            "passed": self.passed,
            "failed": len(self.failed),
            "skipped": sum(self.skipped.values()),
            "kernels": self.properties,
        }


def read_report(path: Path) -> PytestReport:
    """Parse a file of ``pytest --junitxml``."""
    report = PytestReport()
    for case in ET.parse(path).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname", "").rpartition(".")[2], case.get("name", ""))))
        problems = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if problems:
            report.failed[name] = _first_line(problems[0])
        elif skipped is not None:
            report.skipped[skipped.get("message", "")] += 1
        else:
            report.passed += 1
        report.properties += [prop.get("value", "") for prop in case.iter("property")]
    return report


def _first_line(problem: ET.Element) -> str:
    """Return the reason of a failure: pytest's message, or the error in the traceback if there is no useful message."""
    message = " ".join((problem.get("message") or "").split())
    if message in ("", "collection failure", "failed on setup with") and problem.text:
        error_lines = [line[1:].strip() for line in problem.text.splitlines() if line.startswith("E ")]
        message = error_lines[0] if error_lines else problem.text.strip().splitlines()[-1]
    return message[:MAX_REASON_CHARS]


def judge_pytest(completed: CompletedCommand, path: Path) -> tuple[str, dict[str, Any]]:
    """Return the summary line and the figures of a pytest run that has ended.

    Raises:
        AssertionError: a test failed, or pytest did not finish.
        Skip: every test was skipped; the message has the reasons.
    """
    if completed.code == TIMED_OUT:
        raise AssertionError(_timeout_text(completed))
    report = read_report(path) if path.exists() else PytestReport()
    if report.failed:
        raise AssertionError(report.text)
    if completed.code:  # pytest was interrupted, failed internally, had a usage error, or collected no test
        raise AssertionError(f"pytest ended with code {completed.code}: {completed.text[-1000:]}")
    if not report.passed:
        raise Skip(report.text)
    return report.text, report.figures


def _timeout_text(completed: CompletedCommand) -> str:
    """Describe the progress of a killed run from its output, because pytest writes its report only at the end."""
    lines = [(match["first"] or match["last"], match["name"].strip()) for match in RESULT.finditer(completed.text)]
    ended = [(result, name) for result, name in lines if result is not None]
    failed = [name for result, name in ended if result in ("FAILED", "ERROR")]
    running = lines[-1][1] if lines and lines[-1][0] is None else ""
    return (
        f"did not end in {completed.seconds:.0f} s, after {len(ended)} tests"
        + (f" of which failed: {', '.join(failed[:MAX_LISTED_NAMES])}" if failed else "")
        + (f"; in {running}" if running else "")
    )


def run_pytest(
    paths: Sequence[str], words: Sequence[str], machine: Machine, folder: Path, *, env: Mapping[str, str] | None = None
) -> tuple[str, dict[str, Any]]:
    """Run the tests in ``paths`` with the pytest options ``words``; return the result of ``judge_pytest``."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-p", "no:cacheprovider", "-vv", "--tb=short", f"--junitxml={report}", f"--basetemp={folder / 'tmp'}"]
    if machine.limit_factor != 1:
        options.append(f"--timeout={TEST_LIMIT_S * machine.limit_factor:.0f}")
    process = run_command(machine, [sys.executable, "-m", "pytest", *options, *words, *paths], env)
    return judge_pytest(process, report)


def gpu_files() -> list[str]:
    """Return the files with tests for a GPU, the most important first."""
    files = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if f"@{MARK}" in (text := path.read_text(encoding="utf-8")) or f"pytestmark = {MARK}" in text
    ]

    def sort_key(file: str) -> tuple[bool, int, str]:
        folder, _, name = file.rpartition("/")
        return folder != GPU_TEST_DIR, FIRST_FILES.index(name) if name in FIRST_FILES else len(FIRST_FILES), file

    return sorted(files, key=sort_key)


def suite_cases(machine: Machine) -> list[Case]:
    """Return a case for each file with tests for a GPU, and one for each part of the suite."""
    options = ["-m", "gpu", "-p", "no:xdist", f"--gpu-device={machine.device_type}"]
    suite = []
    for file in gpu_files():
        words = [*options, *([] if machine.is_dry else ["--all"])]
        num_shards = NUM_SHARDS.get(file, 1)
        for shard in range(1, num_shards + 1):
            shard_words = [*words, f"--gpu-shard={shard}/{num_shards}"] if num_shards > 1 else words
            run = partial(run_pytest, [file], shard_words, env={"DS_ACCELERATOR": machine.device_type})
            suffix = f" {shard}/{num_shards}" if num_shards > 1 else ""
            suite.append(Case(f"gpu: {file.removeprefix('tests/')}{suffix}", run, limit_s=200.0))
    workers = max(1, min(4, machine.num_cores // 4))
    words = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else ["-p", "no:xdist"]
    for name, paths in (DRY_SUITE if machine.is_dry else SUITE).items():
        suite.append(Case(f"suite: {name}", partial(run_pytest, paths, words, env=NO_GPU), limit_s=150.0))
    return suite


NUM_CONCURRENT = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
"""Number of test files that run at the same time. Each process has its own GPU context of 0.5 GB and small tensors."""
TESTS_PART = Part(
    "tests",
    "GPU tests on the device, and the ordinary suite with this torch",
    suite_cases,
    300.0,
    num_concurrent=NUM_CONCURRENT,
)


# Several ranks on one GPU over gloo, and NCCL itself, each compared with one process on the same GPU.

LIMIT_S, DRY_LIMIT_S = 240.0, 900.0
"""Time limits of a case in seconds, which include starting Python while three cases run concurrently.

The limit of a dry run is longer, because it may share the machine with other tests.
"""
MICRO_BATCHES = 4
"""Micro-batches of a step, over all replicas."""
SIZES = {
    "gpt2": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --batch-size 2 --steps 5",
    "t5": "--model t5 --num-layers 2 --hidden-size 256 --num-attention-heads 4 --enc-seq-length 128 --steps 5",
    "llama": "--model llama --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --batch-size 2 "
    "--steps 5 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128",
}
"""Family -> flags. LLaMA's layers have experts."""
TOY_SIZES = {
    "gpt2": "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --batch-size 1 --steps 2",
    "t5": "--model t5 --num-layers 2 --hidden-size 16 --num-attention-heads 4 --enc-seq-length 16 --steps 2",
    "llama": "--model llama --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --batch-size 1 "
    "--steps 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16",
}
TENSOR, PIPE, DATA = "--model-parallel-size 2", "--pipe-parallel-size 2", "--data-parallel-size 2"
CONTEXT, EXPERT = "--context-parallel-size 2", "--expert-model-parallel-size 2"
LAYOUTS = {
    "gpt2 fp64 tp 2": TENSOR,
    "gpt2 fp64 pp 2, 1f1b": PIPE,
    "gpt2 fp64 dp 2": DATA,
    "gpt2 fp64 tp 2 x pp 2": f"{TENSOR} {PIPE}",
    "gpt2 fp64 dp 2, ZeRO 1": f"{DATA} --zero-stage 1",
    "gpt2 fp64 dp 2, ZeRO 2": f"{DATA} --zero-stage 2",
    "gpt2 fp64 dp 2, ZeRO 3": f"{DATA} --zero-stage 3",
    "gpt2 fp64 pp 2, gpipe": f"{PIPE} --pipeline-schedule gpipe",
    "gpt2 fp64 pp 2, zb-h1": f"{PIPE} --pipeline-schedule zb-h1",
    "gpt2 fp64 pp 2, interleaved": f"{PIPE} --pipeline-chunks 2",
    "gpt2 fp64 pp 2, zb-v": f"{PIPE} --pipeline-schedule zb-v",
    "gpt2 fp64 pp 2, dualpipev": f"{PIPE} --pipeline-schedule dualpipev",
    "gpt2 fp64 pp 2, zb-h1 with chunks": f"{PIPE} --pipeline-chunks 2 --pipeline-schedule zb-h1",
    "gpt2 fp32 tp 2 x pp 2": f"{TENSOR} {PIPE}",
    "gpt2 fp32 dp 2, ZeRO 1": f"{DATA} --zero-stage 1",
    "gpt2 fp32 dp 2, ZeRO 3": f"{DATA} --zero-stage 3",
    "t5 fp64 tp 2 x pp 2": f"{TENSOR} {PIPE}",
    "gpt2 fp64 cp 2": CONTEXT,
    "llama fp64 dp 2 x ep 2": f"{DATA} {EXPERT}",
    "gpt2 fp64 tp 2 x pp 2 x dp 2": f"{TENSOR} {PIPE} {DATA}",
    "gpt2 fp64 pp 2 x dp 2, zb-h1, ZeRO 3": f"{PIPE} {DATA} --pipeline-schedule zb-h1 --zero-stage 3",
    "llama fp64 dp 4 x ep 2, ZeRO 3": f"--data-parallel-size 4 {EXPERT} --zero-stage 3",
}
"""Name of a case, which starts with its model and number format -> flags of the layout."""
ALL_GPUS = {"tp": "--model-parallel-size", "pp": "--pipe-parallel-size", "dp": "--data-parallel-size"}


def layout_cases(machine: Machine) -> Sequence[Case]:
    """Return the cases: one process, every layout over gloo, and NCCL."""
    limit_s = DRY_LIMIT_S if machine.is_dry else LIMIT_S
    layouts = [Case("gpt2 fp64 one process twice", _repeat_one_process, limit_s)]
    layouts += [Case(name, _layout(name, layout), limit_s) for name, layout in LAYOUTS.items()]
    layouts.append(Case("nccl, one rank", _nccl_one_rank))
    layouts += [Case(f"nccl, {axis} over all GPUs", _nccl_over_all(axis), limit_s) for axis in ALL_GPUS]
    return layouts


def _repeat_one_process(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    result = _reference(machine, "gpt2", "fp64")[1]
    return f"second run compared with the first: {_format_result(result)}", _figures(result)


def _layout(name: str, layout: str) -> Callable[[Machine, Path], tuple[str, dict[str, Any]]]:
    model, dtype, _ = name.split(" ", 2)

    def run(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        reference, _ = _reference(machine, model, dtype)
        result = _compare(machine, folder, model, dtype, f"{layout} --distributed-backend gloo", reference)
        return f"{result['ranks']} ranks over gloo compared with one process: {_format_result(result)}", _figures(
            result
        )

    return run


def _nccl_over_all(axis: str) -> Callable[[Machine, Path], tuple[str, dict[str, Any]]]:
    def run(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        _require_nccl(machine)
        num_gpus = machine.num_devices
        if num_gpus < 2:
            raise Skip("NCCL requires a separate GPU for each rank; there is one GPU")
        num_heads = num_gpus * -(-4 // num_gpus)
        size_flags = f"--num-layers {num_heads} --num-attention-heads {num_heads} --hidden-size {64 * num_heads}"
        gas_flags = f"--gas {num_gpus}" if axis != "dp" else "--gas 1"
        layout = f"{size_flags} {gas_flags} {ALL_GPUS[axis]} {num_gpus} --distributed-backend nccl"
        result = _compare(machine, folder, "gpt2", "fp64", layout)
        return f"{num_gpus} GPUs compared with one process: {_format_result(result)}", _figures(result)

    return run


def _nccl_one_rank(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    _require_nccl(machine)
    output = run_python(machine, "-m", "benchmarks.gpu.checks").check().text
    return output.splitlines()[-1], {}


def _require_nccl(machine: Machine) -> None:
    if machine.device_type != "cuda":
        raise Skip("NCCL needs a GPU")


def _reference(machine: Machine, model: str, dtype: str) -> tuple[Path, dict[str, Any]]:
    """Run one process, unless an earlier case has run it.

    Returns:
        Path of its saved trace, and the comparison of a second run of the same process with it.
    """

    def make() -> tuple[Path, dict[str, Any]]:
        machine.work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"one-{model}-{dtype}-", dir=machine.work))
        return folder / "trace", _compare(machine, folder, model, dtype, "", folder / "trace")

    return machine.compute_once(f"layouts {model} {dtype}", make)


def _compare(
    machine: Machine, folder: Path, model: str, dtype: str, layout: str, reference: Path | None = None
) -> dict[str, Any]:
    """Compare ``layout`` with one process by tools/check_layout.py, and return its results.

    Raises:
        AssertionError: the tool failed, or the layout differs from one process.
    """
    words = [*(TOY_SIZES if machine.is_dry else SIZES)[model].split(), "--device", machine.device_type]
    if "--gas" not in layout:
        replicas = re.search(r"--data-parallel-size (\d+)", layout)
        words += ["--gas", str(MICRO_BATCHES // (int(replicas[1]) if replicas else 1))]
    words += [*layout.split(), *(["--fp32"] if dtype == "fp32" else [])]
    words += ["--json", str(folder / "seen.json"), *(["--reference", str(reference)] if reference else [])]
    process = run_python(machine, str(ROOT / "tools" / "check_layout.py"), *words)
    if not (folder / "seen.json").exists():
        process.check()
    result: dict[str, Any] = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    assert result["is_equal"], f"not equal to one process: {_format_result(result)}"
    process.check()
    return result


def _format_result(result: dict[str, Any]) -> str:
    """Return the observed and allowed values in one line."""
    values = result["seen"]
    names = {"loss": "losses", "first_norm": "gradient norm", "gradient": f"worst gradient ({result['worst']})"}
    return ", ".join(
        f"{text} {values[name]['observed']:.1e} (allowed {values[name]['allowed']:.0e})" for name, text in names.items()
    )


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    return {"ranks": result["ranks"], **{name: value["observed"] for name, value in result["seen"].items()}}


def try_nccl() -> str:
    """Run every collective of the project on the GPU over NCCL, with this process as the only rank; return a summary.

    Raises:
        AssertionError: a collective changed the values.
    """
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.randn(64, 32, dtype=torch.float64, device="cuda")
    expected = tensor.clone()
    operations: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda out: dist.all_reduce(out.copy_(tensor)),
        "broadcast": lambda out: dist.broadcast(out.copy_(tensor), 0),
        "all_gather": lambda out: dist.all_gather([out], tensor),
        "all_gather_into_tensor": lambda out: dist.all_gather_into_tensor(out, tensor),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, [tensor]),
        "reduce_scatter_tensor": lambda out: dist.reduce_scatter_tensor(out, tensor),
        "all_to_all_single": lambda out: dist.all_to_all_single(out, tensor),
        "reduce": lambda out: dist.reduce(out.copy_(tensor), 0),
    }
    for name, operation in operations.items():
        out = torch.zeros_like(tensor)
        operation(out)
        assert torch.equal(out, expected), f"{name} over NCCL changed the values of a single rank"
    dist.barrier()
    version = ".".join(map(str, torch.cuda.nccl.version()))
    dist.destroy_process_group()
    return f"NCCL {version} with one rank: {', '.join(operations)} return their input"


LAYOUTS_PART = Part(
    "layouts",
    "every layout compared with one process, several ranks on one GPU over gloo",
    layout_cases,
    300.0,
    num_concurrent=3,
)

if __name__ == "__main__":
    print(try_nccl())
    sys.exit(0)
