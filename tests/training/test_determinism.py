"""``--deterministic``: what is set for CUDA and only there, and what the start table says."""

from __future__ import annotations

import os

import pytest
import torch

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.training import device_setup
from megatron.training.device_setup import WORKSPACE
from tests.helpers.runs import flags, train_ranks

FLAGS = "--data-path none --vocab-size 100".split()


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop(WORKSPACE, None)


def config_of(*extra):
    return parse([*FLAGS, *extra], world_size=1)


def settle_as(kind, monkeypatch, *extra):
    """Settle as on a machine with that device; return (cuBLAS's setting, torch's)."""
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setattr(device_setup.device, "choose", lambda requested: kind)
    device_setup.configure_device(config_of(*extra))
    return os.environ.get(WORKSPACE), torch.are_deterministic_algorithms_enabled()


def test_cuda_is_told_to_repeat_itself_before_it_is_used(monkeypatch):
    assert settle_as("cuda", monkeypatch, "--deterministic") == (":4096:8", True)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(("kind", "extra"), [("cuda", []), ("cpu", []), ("cpu", ["--deterministic"])])
def test_nothing_is_set_without_the_flag_or_without_cuda(kind, extra, monkeypatch):
    assert settle_as(kind, monkeypatch, *extra) == (None, False)


def test_a_workspace_that_the_user_chose_is_kept_if_cublas_repeats_itself_with_it(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    assert settle_as("cuda", monkeypatch, "--deterministic") == (":16:8", True)
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(ConfigError, match="must be :4096:8 or :16:8, got ':0:0'"):
        settle_as("cuda", monkeypatch, "--deterministic")


@pytest.mark.parametrize(
    ("kind", "extra", "said"),
    [
        ("cuda", [], "not bit for bit"),
        ("cuda", ["--deterministic"], "bit for bit in the same layout (--deterministic)"),
        ("cpu", ["--deterministic"], "on a CPU so without --deterministic, too"),
        ("cpu", [], None),
    ],
)
def test_the_start_table_says_how_exactly_a_run_resumes(kind, extra, said):
    rows = list(device_setup.determinism_rows(config_of(*extra), kind))
    assert [name for name, _ in rows] == ([] if said is None else ["resume"])
    assert said is None or said in rows[0][1]


def test_a_run_on_a_cpu_takes_the_flag_and_says_that_it_changes_nothing(corpus, tmp_path, capfd):
    short = "--train-iters 1 --warmup 0 --eval-iters 0"
    assert train_ranks(1, flags(corpus, tmp_path / "run", f"{short} --deterministic"))[0] == [0]
    assert "│ resume " in capfd.readouterr().out
