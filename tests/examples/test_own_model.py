"""The example of one's own model: it runs as written, and every layout is the same model."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from examples import own_model
from megatron.config import parse
from megatron.training import world
from megatron.training.metrics import read_metrics
from megatron.training.parity import Trace, compare, trace_steps
from tests.harness import run_ranks

SCRIPT = Path(own_model.__file__)
SIZES = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 24 --device cpu".split()  # noqa: SIM905
SIZES += "--hidden-dropout 0.1 --lr 1e-2".split()  # noqa: SIM905


def trace_rank(rank: int, layout: str, world_size: int) -> Trace:
    """What each rank runs: three steps in fp64."""
    config = parse([*SIZES, "--fp64", "--train-iters", "3", *layout.split()], world_size=world_size)
    here = world.start(config)
    dataset = own_model.MaskedBytes(config.batch.seq_length, range(18))
    return trace_steps(config, here, dataset, own_model.model_provider, own_model.forward_step, steps=3, eval_every=3)


@functools.cache
def serial() -> Trace:
    return run_ranks(1, trace_rank, "--batch-size 2 --gas 4", 1)[0]


@pytest.mark.parametrize(
    "num_ranks, layout",
    [
        (4, "--model-parallel-size 2 --pipe-parallel-size 2 --gas 4"),
        (2, "--pipe-parallel-size 2 --gas 4"),
        (2, "--pipe-parallel-size 2 --gas 4 --pipeline-chunks 2"),
        (2, "--pipe-parallel-size 2 --gas 4 --pipeline-schedule zb-h1"),
        (2, "--model-parallel-size 2 --gas 4"),
    ],
)
def test_every_layout_has_the_losses_and_gradients_of_one_process(num_ranks: int, layout: str) -> None:
    found = compare(serial(), run_ranks(num_ranks, trace_rank, f"--batch-size 2 {layout}", num_ranks))
    assert found.loss <= 1e-12 and found.norm <= 1e-12
    assert found.gradient <= 1e-11, found.worst


def run_script(rank: int, world_size: int, folder: str, flags: list[str]) -> None:
    """Run the file as ``python`` would, but let the ranks meet in a file."""
    os.chdir(folder)
    sys.argv = [str(SCRIPT), *SIZES, *flags]
    sys.stdout = open("output", "a", buffering=1)  # noqa: SIM115 - until the process ends
    init = dist.init_process_group

    def meet_in_file(backend: str, init_method: str, timeout: timedelta) -> None:
        init(backend, store=dist.FileStore("store", world_size), rank=rank, world_size=world_size, timeout=timeout)

    dist.init_process_group = meet_in_file  # type: ignore[assignment]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_runs_as_written_alone_and_on_two_stages_of_two_slices(tmp_path: Path) -> None:
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


def test_samples_are_functions_of_their_number_and_hide_some_text() -> None:
    samples = own_model.MaskedBytes(24, range(18, 19))
    for index in (0, len(samples) - 1):
        sample, again = samples[index], samples[index]
        assert all((sample[key] == again[key]).all() for key in own_model.KEYS)
        is_masked = sample["is_masked"].astype(bool)
        assert is_masked.any() and (sample["tokens"][is_masked] == own_model.MASK).all()
        assert (sample["tokens"][~is_masked] == sample["labels"][~is_masked]).all()
        assert ((sample["labels"] == own_model.PAD) == (sample["is_text"] == 0)).all()
