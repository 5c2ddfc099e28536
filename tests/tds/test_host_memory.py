"""A training on a CPU keeps the memory that it frees, with a pipeline and without: both functions for that."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron import device
from tds import device as tds_device
from tds.engine import engine
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

PROGRAM = """
import os
import resource
import torch
from tds.device import keep_freed

if not os.fork():
    os.environ["MALLOC_ARENA_MAX"] = "2"
else:
    os.wait()
is_kept = keep_freed()
for step in range(10):
    if step == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.empty(2**20 * 9).fill_(1.0) for _ in range(4)]
    del kept
print(is_kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
"""
"""The first line is of a process whose user has set the allocator, the second of one whose user has not."""


def count_page_faults() -> list[tuple[str, int]]:
    """Return (whether memory is kept, pages that the system hands out for tensors of 36 MiB after the first step).

    Above 32 MiB glibc by itself never keeps one; below, that depends on what lies behind it in the heap. Many steps: a
    small object may come to lie within what one step has freed, and the next then takes new pages for a tensor or two.
    """
    settings = {**os.environ, "DS_ACCELERATOR": "cpu"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=settings)
    return [(line.split()[0], int(line.split()[1])) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep what is freed")
def test_freed_memory_is_retained_unless_user_configured_allocator() -> None:
    (user_is_retained, user_faults), (is_retained, faults) = count_page_faults()
    assert (is_retained, user_is_retained) == ("True", "False")
    assert faults < user_faults / 4


@pytest.mark.parametrize(("max_threshold", "expected_threshold"), [(2**40, 2**30), (2**25, 2**25), (0, None)])
def test_older_glibc_uses_largest_accepted_threshold(
    monkeypatch: pytest.MonkeyPatch, max_threshold: int, expected_threshold: int | None
) -> None:
    """They refuse more than 32 MiB; the trim threshold alone would make all larger tensors new pages."""
    calls: list[tuple[int, int]] = []

    def mallopt(option: int, value: int) -> int:
        is_accepted = option == tds_device.TRIM_THRESHOLD or value <= max_threshold
        calls.extend([(option, value)] * is_accepted)
        return int(is_accepted)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    for variable in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(variable)
    assert tds_device.keep_freed() == (expected_threshold is not None)
    expected_calls = (
        []
        if expected_threshold is None
        else [(tds_device.MMAP_THRESHOLD, expected_threshold), (tds_device.TRIM_THRESHOLD, 2**30)]
    )
    assert calls == expected_calls
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")
    assert not tds_device.keep_freed() and calls == expected_calls


def test_training_without_pipeline_retains_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_retained in (True, False):
        monkeypatch.setattr(tds_device, "keep_freed", lambda is_retained=is_retained: is_retained)
        assert device.keep_freed_memory() is is_retained


def _count_keep_freed_calls(rank: int) -> int:
    calls: list[int] = []
    engine.keep_freed = lambda: bool(calls.append(1))  # type: ignore[assignment]
    make_engine(Toy("chain"), 1)
    return len(calls)


def test_cpu_engine_retains_freed_memory() -> None:
    assert run_ranks(1, _count_keep_freed_calls) == [1]
