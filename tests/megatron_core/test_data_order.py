"""--data-order megatron yields the samples of megatron-core's dataset builder, in its order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import BlendPaths, build_train_valid_test
from megatron.data.blended_dataset import BlendedDataset
from tests.helpers.megatron_core import requires_megatron_core, run_megatron_core
from tests.helpers.token_data import write_token_files

pytestmark = [pytest.mark.slow, requires_megatron_core]
PROGRAM = "tests.megatron_core.data_order_program"
SPLITS = ("train", "valid", "test")
MAX_SAMPLES = 10_000
NUM_RANDOM_RUNS = 20


def write_corpora(folder: Path) -> dict[str, str]:
    """Write corpora of different sizes, with empty documents and with documents longer than several samples."""
    generator = np.random.default_rng(7)
    lengths = {
        "a": generator.integers(0, 60, 800),
        "b": np.where(generator.random(600) < 0.03, 700, generator.integers(1, 9, 600)),
        "c": np.array([0, 0, 5, 1, 0, 40, 3, 0, 17, 90, 0, 20, 0, 8, 6]),
        "d": generator.integers(1, 4, 2000),
    }
    lengths["a"][-1] = 20  # Megatron-core does not end for a split without tokens
    for idx, (name, sizes) in enumerate(lengths.items()):
        write_token_files(folder / name, sizes, first_token=1_000_000 * idx + 1)
    return {name: str(folder / name) for name in lengths}


def listed_runs(paths: dict[str, str]) -> list[dict[str, Any]]:
    """Return runs of one and of several epochs, with and without a separate last epoch, of one corpus and of blends."""
    a, b, c, d = paths.values()
    run = {"seq_length": 16, "seed": 1234, "split": "949,50,1", "surplus": 0.005}
    blend = f"0.5 {a} 0.3 {b} 0.2 {d}"
    return [
        {**run, "paths": a, "sizes": [500, 40, 3]},  # one epoch
        {**run, "paths": a, "sizes": [10_000, 700, 3]},  # seven epochs, the last one separate
        {**run, "paths": a, "sizes": [2_700, 75, 3]},  # two epochs together
        {**run, "paths": blend, "sizes": [10_000, 300, 30]},
        {**run, "paths": f"1.0 {a}", "sizes": [1_400, 40, 3]},  # a blend of one corpus: the surplus adds an epoch
        {**run, "paths": f"3 {c} 5 {a} 1 {b} 1 {d}", "sizes": [10_000, 100, 9], "split": "70,20,10", "surplus": 0.02},
        {**run, "paths": {"train": f"0.6 {a} 0.4 {b}", "valid": c, "test": f"2 {d}"}, "sizes": [5_000, 90, 30],
         "split": None},
    ]  # fmt: skip


def random_runs(paths: dict[str, str]) -> list[dict[str, Any]]:
    choose = random.Random(3)
    runs = []
    for _ in range(NUM_RANDOM_RUNS):
        names = choose.sample(list(paths), choose.randint(1, 3))
        weights = [choose.choice([1, 2, 0.3, 0.7, choose.random()]) for _ in names]
        words = " ".join(f"{weight} {paths[name]}" for weight, name in zip(weights, names, strict=True))
        runs.append({
            "paths": words if len(names) > 1 or choose.random() < 0.5 else paths[names[0]],
            "sizes": [choose.randint(1, 1500), choose.randint(1, 60), choose.randint(1, 9)],
            "seq_length": choose.choice([2, 7, 32, 100]),
            "seed": choose.randint(0, 2**32 - 1),
            "split": choose.choice(["6,2,2", "60,30,10", "0.8,0.1,0.1", "500,333,167"]),
            "surplus": choose.choice([0.005, 0.3]),
            "extra_token": choose.random() < 0.8,
        })  # fmt: skip
    return runs


def our_datasets(run: dict[str, Any]) -> tuple[BlendedDataset | None, ...]:
    paths = run["paths"]
    fields = {"data_path": paths} if isinstance(paths, str) else {f"{name}_data_path": paths[name] for name in paths}
    split = {} if run["split"] is None else {"split": run["split"]}
    return build_train_valid_test(
        BlendPaths(**fields, **split, order="megatron", surplus=run["surplus"]),
        seq_length=run["seq_length"], seed=run["seed"], vocab_size=10_000_000, num_samples=run["sizes"],
        has_extra_token=run.get("extra_token", True),
    )  # fmt: skip


def read_tokens(dataset: BlendedDataset, idx: int) -> np.ndarray:
    """Return the tokens of a sample; without an extra token, check that the unused one at the end has no loss."""
    sample = dataset[idx]
    if not isinstance(sample, dict):
        return sample
    assert sample["loss_mask"].tolist() == [1] * (len(sample["text"]) - 1) + [0]
    return sample["text"][:-1]


def test_samples_equal_those_of_megatron_core(tmp_path: Path) -> None:
    paths = write_corpora(tmp_path)
    runs = listed_runs(paths) + random_runs(paths)
    run_megatron_core(PROGRAM, tmp_path, runs=runs, max_samples=MAX_SAMPLES)
    for run_idx, run in enumerate(runs):
        for split, dataset in zip(SPLITS, our_datasets(run), strict=True):
            assert dataset is not None
            expected = np.load(tmp_path / f"{run_idx}-{split}.npy")
            assert len(expected) == min(dataset.order.num_samples, MAX_SAMPLES), (run, split)
            actual = np.stack([read_tokens(dataset, idx) for idx in range(len(expected))])
            assert np.array_equal(actual, expected), (run, split, np.flatnonzero((actual != expected).any(axis=1))[:5])
