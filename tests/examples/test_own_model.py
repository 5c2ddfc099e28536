"""A model of one's own: the example runs as its page tells, and every layout is the same model."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.config import parse
from megatron.runtime import rendezvous
from megatron.training import initialize
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.parity import Trace, compare, trace_steps
from megatron.training.trainer import HOOKS, Callback
from tests.helpers.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "own_model.py"
PAGE = ROOT / "docs" / "own_model.md"
SIZES = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 24 --device cpu".split()
SIZES += "--hidden-dropout 0.1 --lr 1e-2".split()


def load_script() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("own_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


own_model = load_script()


def test_documented_blocks_are_in_example_in_order() -> None:
    script = SCRIPT.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    positions = [script.find(f"\n\n{block}") for block in blocks]
    assert len(positions) >= 4 and -1 not in positions and positions == sorted(positions)


@pytest.mark.parametrize("page", [PAGE, ROOT / "docs" / "zh" / "own_model.md"], ids=["english", "chinese"])
def test_hook_table_lists_every_hook_with_its_arguments(page: Path) -> None:
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", page.read_text(encoding="utf-8"), flags=re.M)
    hooks = {name: ", ".join([*inspect.signature(getattr(Callback, name)).parameters][1:]) for name in HOOKS}
    assert dict(rows) == hooks


def trace_rank(rank: int, layout: str, world_size: int) -> Trace:
    """What each rank runs: three steps in fp64."""
    argv = [*SIZES, "--fp64", "--train-iters", "3", *layout.split()]
    config = parse(argv, world_size=world_size, extra_args_provider=own_model.add_flags)
    world = initialize.start(config)
    dataset = own_model.MaskedBytes(config.batch.seq_length, range(18))
    return trace_steps(
        config, world, dataset, own_model.model_provider, own_model.forward_step, num_steps=3, eval_every=3
    )


@functools.cache
def trace_one_process() -> Trace:
    return run_ranks(1, trace_rank, "--batch-size 2 --gas 4", 1)[0]


@pytest.mark.parametrize(
    "num_ranks, layout",
    [
        pytest.param(4, "--model-parallel-size 2 --pipe-parallel-size 2 --gas 4", marks=pytest.mark.slow),
        (2, "--pipe-parallel-size 2 --gas 4 --pipeline-chunks 2"),
        *(
            pytest.param(2, f"{flags} --gas 4", marks=pytest.mark.slow)
            for flags in ("--pipe-parallel-size 2", "--pipe-parallel-size 2 --pipeline-schedule zb-h1")
        ),
        pytest.param(2, "--model-parallel-size 2 --gas 4", marks=pytest.mark.slow),
    ],
)
def test_every_layout_equals_one_process(num_ranks: int, layout: str) -> None:
    differences = compare(trace_one_process(), run_ranks(num_ranks, trace_rank, f"--batch-size 2 {layout}", num_ranks))
    assert differences.loss <= 1e-12 and differences.norm <= 1e-12
    assert differences.gradient <= 1e-11, differences.worst_gradient


def test_micro_batch_size_does_not_change_losses_and_gradients() -> None:
    """Micro-batches have different numbers of masked bytes, as context ranks would have."""
    two_samples, four_samples = (
        run_ranks(1, trace_rank, f"{sizes} --hidden-dropout 0", 1)
        for sizes in ("--batch-size 2 --gas 4", "--batch-size 4 --gas 2")
    )
    differences = compare(two_samples[0], four_samples)
    assert differences.loss <= 1e-12 and differences.norm <= 1e-12
    assert differences.gradient <= 1e-11, differences.worst_gradient


def collect_values(ranks: Sequence[Trace]) -> list[Any]:
    """Return losses, norms and every gradient and weight of each rank."""
    return [
        (t.losses, t.eval_losses, t.grad_norms, [(n, v.tolist()) for tensors_by_name in (t.gradients, t.weights)
         for n, (_, v) in tensors_by_name.items()])
        for t in ranks
    ]  # fmt: skip


@pytest.mark.parametrize(
    "num_ranks, layout",
    [
        (2, "--pipe-parallel-size 2"),
        pytest.param(2, "--pipe-parallel-size 2 --pipeline-chunks 2", marks=pytest.mark.slow),
        pytest.param(2, "--pipe-parallel-size 2 --pipeline-schedule zb-h1", marks=pytest.mark.slow),
        pytest.param(2, "--pipe-parallel-size 2 --pipeline-schedule gpipe", marks=pytest.mark.slow),
        pytest.param(4, "--pipe-parallel-size 4", marks=pytest.mark.slow),
        pytest.param(4, "--pipe-parallel-size 2 --model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_loss_as_layer_is_bitwise_equal(num_ranks: int, layout: str) -> None:
    argv = f"--batch-size 2 --gas 4 {layout}"
    loss_function_traces, loss_layer_traces = (
        run_ranks(num_ranks, trace_rank, argv + extra_flags, num_ranks) for extra_flags in ("", " --loss-as-layer")
    )
    assert collect_values(loss_function_traces) == collect_values(loss_layer_traces)
    assert len(loss_layer_traces[0].losses) == 3 and loss_layer_traces[0].losses[2] < loss_layer_traces[0].losses[0]


def test_loss_as_layer_is_rejected_without_pipeline() -> None:
    with pytest.raises(AssertionError, match="--loss-as-layer requires a pipeline"):
        run_ranks(1, trace_rank, "--batch-size 2 --gas 4 --loss-as-layer", 1)


def run_script(rank: int, world_size: int, folder: str, flags: list[str]) -> None:
    """Run the file as ``python`` would, but let the ranks meet in a file."""
    os.chdir(folder)
    sys.argv = [str(SCRIPT), *SIZES, *flags]
    sys.stdout = open("output", "a", buffering=1)  # noqa: SIM115 - until the process ends
    rendezvous.open_store = lambda *_: dist.FileStore("store", world_size)
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_script_runs_on_one_rank_and_in_2x2_layout(tmp_path: Path) -> None:
    flags = "--train-iters 4 --gas 2 --log-interval 1 --eval-interval 2 --eval-iters 1 --progress plain"
    layouts = {1: "", 4: "--model-parallel-size 2 --pipe-parallel-size 2"}
    losses: dict[int, Any] = {}
    for num_ranks, layout in layouts.items():
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        run_ranks(num_ranks, run_script, num_ranks, str(folder), f"{flags} {layout}".split(), init=False)
        (run,) = (folder / "runs").glob("own_model-*")
        records = read_metrics(run / "metrics.jsonl")
        assert [(r["kind"], r["step"]) for r in records] == [
            ("train", 1), ("train", 2), ("valid", 2), ("train", 3), ("train", 4), ("valid", 4), ("save", 4), ("test", 4)
        ]  # fmt: skip
        losses[num_ranks] = [record["loss"] for record in records if "loss" in record]
        assert (run / "checkpoints" / "step-00000004" / "manifest.json").exists()
        assert "parameters on each rank" in (folder / "output").read_text()
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-5)
    assert losses[1][-1] < losses[1][0]


def test_samples_depend_on_index_and_mask_text() -> None:
    samples = own_model.MaskedBytes(24, range(18, 19))
    for index in (0, len(samples) - 1):
        sample, same_sample = samples[index], samples[index]
        assert all((sample[key] == same_sample[key]).all() for key in own_model.KEYS)
        is_masked = sample["is_masked"].astype(bool)
        assert is_masked.any() and (sample["tokens"][is_masked] == own_model.MASK).all()
        assert (sample["tokens"][~is_masked] == sample["labels"][~is_masked]).all()
        assert ((sample["labels"] == own_model.PAD) == (sample["is_text"] == 0)).all()
