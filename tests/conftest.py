"""Shared set-up of all tests: CPU, one thread a process, no DeepSpeed chatter.

| tests marked ``gpu`` | run on |
|---|---|
| (no option) | CUDA; skipped where there is none |
| --gpu-device cuda | CUDA; where there is none pytest ends with an error |
| --gpu-device cpu | the CPU in the device's place: the dry form |
| --gpu-device sim | the simulated device of examples/accelerator_sim, which refuses tensors of two devices at once |

``@pytest.mark.gpu(only="why")`` is CUDA's own, and has no dry form. ``--gpu-shard 2/4`` runs every fourth of the
selected tests, from the second on, so that a file with many compilations can be split over several processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator
from datetime import date
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MEGATRON_PROVE", "0")  # the layout check of each of some hundred runs would take a second

import pytest

from megatron import environment

try:
    import torch
    import torch._dynamo  # torch's optimizers import it: once here rather than in every forked rank
except ModuleNotFoundError as error:
    environment.exit_if_outside(error)  # pytest would print a traceback
    raise

import hypothesis

from megatron.ops import causal_attention
from tests.helpers import large_pages

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # some hundred programs of the tests would each compile ours anew,
sys.dont_write_bytecode = False  # and each worker all tests
causal_attention.is_built()  # loads it: here, for the same reason
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it leaves in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
SLOW_TIMEOUT_S = 400  # up to 50 s of CPU time in one test, on machines that are three times slower or busy


def _prepare_forked_child() -> None:
    """Keep a forked rank from copying what the test run holds, and from waiting for its compiler's threads.

    A collection would go over all of it, 2 GB at the end of a long run. Threads do not live on in a child, but the
    compiler's pool takes them for idle ones.
    """
    gc.freeze()
    if async_compile := sys.modules.get("torch._inductor.async_compile"):
        async_compile.AsyncCompile.pool.cache_clear()


os.register_at_fork(after_in_child=_prepare_forked_child)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run what is marked slow; see DAYS_OF_ALL_CASES")
    parser.addoption("--every", action="store_true", help="with --all: all cases, of every day")
    parser.addoption("--gpu-shard", default="1/1", metavar="I/N", help="run test I, I + N, ... of the selected ones")
    parser.addoption("--gpu-device", choices=("cuda", "cpu", "sim"), help="what tests marked gpu run on; see above")


def pytest_configure(config: pytest.Config) -> None:
    """Configure hypothesis: the same examples in each short run, new ones in a long run."""
    os.environ.setdefault("TEST_DAY", str(date.today().toordinal()))  # workers inherit it
    if hasattr(config, "workerinput"):  # of pytest-xdist
        large_pages.enable()
    if config.getoption("--every") and not config.getoption("--all"):
        raise pytest.UsageError("--every adds cases to --all. Give both")
    hypothesis.settings.register_profile("ours", derandomize=not config.getoption("--all"), deadline=None)
    hypothesis.settings.load_profile("ours")
    gpu_device = config.getoption("--gpu-device")
    if gpu_device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--gpu-device cuda needs a GPU and a CUDA build of torch, found none")
    if gpu_device == "sim":
        _make_simulated_device()


def _make_simulated_device() -> None:
    """Register the plug-in and make its device ready, which torch wants ahead of the first backward of a process."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "accelerator_sim"))
    os.environ["ENABLE_DEEPSPEED_ADAPTOR"] = "0"  # no test that runs on it needs DeepSpeed, whose import takes 2 s
    import megatron_accelerator_sim

    from megatron import accelerators, device

    device.prepare(megatron_accelerator_sim.NAME)
    accelerators.adapt(megatron_accelerator_sim.NAME)


SLOWEST_FILES = (
    "cuda/test_matrix.py", "parity/test_layouts.py", "tds/watchdog/test_watchdog.py", "training/test_phases.py",
    "mutants/test_mutants.py", "examples/test_accelerator_sim.py", "training/test_guard.py",
    "parity/test_t5_layouts.py", "checkpoint/test_checkpoint_args.py", "training/test_kills.py",
    "training/test_faults.py", "test_run_script.py", "training/test_loss_scale.py", "planner/test_tool.py",
    "tds/test_parity.py", "optim/test_muon_layouts.py", "test_main_job.py", "launch/test_exit_codes.py",
    "parity/test_schedules.py", "parity/test_dropout.py", "parity/test_modern.py", "parity/test_experts.py",
)  # fmt: skip
"""Files of 12 s and more, longest first (mutants with --all): started first, so that none runs alone at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files of tests/cuda to one worker: the processes with the device start once, in seconds."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/cuda/"):
                return "tests/cuda"
            if "::test_mutant_is_killed[" in nodeid:
                return nodeid.partition(".py::")[0] + nodeid.partition("[")[2].partition(".")[0]  # one package of them
            return super()._split_scope(nodeid)

    return FileScheduling(config, log)


def _import_worker_share_first(config: pytest.Config) -> None:
    """Import the test files of this worker's share before pytest collects all of them.

    In a fresh clone pytest compiles each test file at its first import, 20 s of work that every worker would repeat.
    With different shares first, each worker finds the files of the others compiled.
    """
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    if worker is None or not _is_full_suite(config):
        return
    worker_idx, num_workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    worker_files = files[worker_idx * len(files) // num_workers : (worker_idx + 1) * len(files) // num_workers]
    for file in [
        *sorted((ROOT / "tests").glob("*/**/conftest.py")),
        *worker_files,
    ]:  # those register modules to rewrite
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest reports it when it collects the file
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without garbage collection, and leave the tests out of later collections."""
    gc.disable()
    try:
        _import_worker_share_first(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


DAYS_OF_ALL_CASES = {"tests/parity/": 6, "tests/cuda/test_matrix.py": 6}
"""Slow tests that are products of layouts, schedules and switches: the days in which ``--all`` runs all cases."""
DAYS_OF_OTHER_CASES = 3


def _deselect_cases_of_other_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each slow test with 3 cases or more, keep the cases of today: a third, of products of layouts a sixth.

    All cases take hours on two cores. ``--every`` runs all of them.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    today = int(os.environ["TEST_DAY"])
    dropped = set()
    for test, test_cases in cases.items():
        num_days = next(
            (days for path, days in DAYS_OF_ALL_CASES.items() if test.startswith(path)), DAYS_OF_OTHER_CASES
        )
        if len(test_cases) >= 3:
            dropped |= {item for item in test_cases if (crc32(item.nodeid.encode()) - today) % num_days}
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=sorted(dropped, key=lambda item: item.nodeid))


def _is_full_suite(config: pytest.Config) -> bool:
    """Return True if no files or tests are named on the command line."""
    return config.args in (["tests"], [str(ROOT / "tests")])


def select_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that belong to other shards than --gpu-shard."""
    idx, _, num_shards = config.getoption("--gpu-shard").partition("/")
    if not (idx.isdecimal() and num_shards.isdecimal() and 1 <= int(idx) <= int(num_shards)):
        raise pytest.UsageError(f"--gpu-shard must be I/N with I from 1 to N, got {idx}/{num_shards}")
    dropped = [item for position, item in enumerate(items) if position % int(num_shards) != int(idx) - 1]
    if dropped:
        items[:] = [item for item in items if item not in set(dropped)]
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    positions = {f"tests/{file}": position for position, file in enumerate(SLOWEST_FILES)}
    items.sort(
        key=lambda item: positions.get(item.nodeid.partition("::")[0], len(positions))
    )  # keeps the order otherwise
    if not config.getoption("--all"):  # deselected, not skipped: a worker reports each skipped test three times
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    elif not config.getoption("--every") and _is_full_suite(config):
        _deselect_cases_of_other_days(config, items)
    select_shard(config, items)
    has_gpu, gpu_device = torch.cuda.is_available(), config.getoption("--gpu-device")
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        if gpu_device is None and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))
        elif gpu_device in ("cpu", "sim") and "only" in marker.kwargs:
            item.add_marker(pytest.mark.skip(reason=f"CUDA's own: {marker.kwargs['only']}"))
