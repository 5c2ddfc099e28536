"""All ranks learn of data that end early or differ; middle stages read none; a replica has samples of its own."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tds
from tds.engine.data_consistency import DataEnded, checksum
from tds.engine.pipeline_json import should_compare_data
from tds.pipe import PipelineModule
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.toys import Toy, make_engine, train_batch, train_reference


def _exhaust_data(rank: int) -> list[Any]:
    """Return what three stages see of: data that end on all, on the last alone, within a call; and a step after it."""
    toy = Toy("chain")
    engine = make_engine(toy, 3)
    batches, outcomes = toy.make_batches(), []
    for first, last in (
        (2 * batches, 2 * batches),
        (2 * batches, batches),
        (batches[:3], batches),
        (2 * batches, batches * 2),
    ):
        data = iter(first if rank == 0 else last)
        steps = 0
        try:
            for _ in range(2):
                engine.train_batch(data)
                steps += 1
            with pytest.raises(StopIteration):
                engine.train_batch(data)
        except DataEnded as error:
            outcomes.append((steps, str(error)))
        else:
            outcomes.append((steps, "all ended"))
    with pytest.raises(DataEnded):
        engine.eval_batch(iter(batches[: 3 if rank == 2 else 4]))
    with pytest.raises(StopIteration):
        engine.eval_batch(iter([]))
    return [*outcomes, train_batch(engine, toy)]


def test_all_ranks_raise_at_data_end_and_can_continue() -> None:
    ranks = run_ranks(3, _exhaust_data)
    both_end, one_ends, ends_within_call, both_end_again = ranks[0][:4]
    assert both_end == both_end_again == (2, "all ended")
    assert (
        one_ends[0] == 1 and "got none for this call on rank 2 (stage 2, replica 0), and more on rank 0" in one_ends[1]
    )
    assert "a multiple of gradient_accumulation_steps" in one_ends[1] and "RepeatingLoader" in one_ends[1]
    assert (
        ends_within_call[0] == 0
        and "needs 4 micro-batches, but the data ended after 3 on rank 0 (stage 0, replica 0)" in ends_within_call[1]
    )
    _, expected = train_reference(Toy("chain"))
    for *outcomes, (_, gradients, _) in ranks:
        assert outcomes == ranks[0][:4], "middle stages too"
        assert all(torch.allclose(g, expected[name], rtol=1e-11, atol=1e-15) for name, g in gradients.items())


def _train_incomplete_batch(rank: int) -> Any:
    """Weights that change: an unfinished global batch must leave none of it."""
    toy = Toy("chain", num_micro_batches=2)
    engine = make_engine(toy, 2)
    engine.optimizer.param_groups[0]["lr"] = 1.0
    before = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(DataEnded):
        engine.train_batch(iter(toy.make_batches()[:1]))
    return all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


def test_incomplete_global_batch_changes_no_weights() -> None:
    assert run_ranks(2, _train_incomplete_batch) == [True, True]


def _train_with_different_labels(rank: int, should_check: bool) -> Any:
    """Train on two stages whose loaders differ in the last labels of the second micro-batch."""
    toy = Toy("chain", pipeline={"check_data": should_check})
    engine = make_engine(toy, 2)
    assert torch.isfinite(engine.train_batch(iter(toy.make_batches())))
    batches = toy.make_batches()
    if rank == 1:
        x, (target, mask) = batches[1]
        batches[1] = x, (target, 1 - mask)
    engine.train_batch(iter(batches))


def test_check_data_detects_stages_with_different_samples() -> None:
    codes, _, reports = fork_ranks(2, _train_with_different_labels, True)
    assert codes == [1, 1]
    assert "DataDisagreement: all ranks of a replica that read data must read the same micro-batches" in reports[0]
    assert "micro-batch 1 differs: checksum" in reports[0] and "rank 1 (stage 1, replica 0)" in reports[1]
    run_ranks(2, _train_with_different_labels, False)
    with pytest.raises(ValueError, match="must be true or false, got 'yes'"):
        should_compare_data({"check_data": "yes"})


def test_checksum_depends_on_values_dtypes_shapes_and_nesting() -> None:
    x = torch.arange(6)
    others = [x + 1, x.int(), x.view(2, 3), (x,), (x, None), {"x": x}, {"y": x}, x.bfloat16(), torch.tensor(0)]
    assert len({checksum(value) for value in [x, *others]}) == 1 + len(others)
    assert checksum((x, {"a": [x]})) == checksum((x.clone(), {"a": (x.clone(),)}))


class _FileDataset(torch.utils.data.Dataset):
    """Sample i is the file of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(list(self.folder.iterdir()))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4, 6), float((self.folder / str(index)).read_text()))
        return x, x


def _train_on_files(rank: int, folder: Path, log: Path) -> tuple[list[float], int]:
    """Return the samples of two steps that this rank has, and how many it has opened, its loader's processes too."""
    file = os.open(log / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def audit_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(folder)):
            os.write(file, b".")

    sys.addaudithook(audit_open)
    toy = Toy("chain", micro_batch_size=2, num_micro_batches=2, dtype=torch.float32)
    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(toy.layer_specs(), num_stages=3, loss_fn=lambda out, y: ((out - y) ** 2).mean())
    engine = make_engine(toy, 3, lambda **kwargs: tds.initialize(**kwargs, training_data=_FileDataset(folder)), module)
    seen: list[float] = []

    def record_batch(batch: Any) -> Any:
        seen.extend(batch[0][:, 0, 0].tolist())
        return batch

    engine.set_batch_fn(record_batch)
    for _ in range(2):
        engine.train_batch()
    return seen, (log / str(rank)).stat().st_size


def test_middle_stages_read_no_samples_and_replicas_share_them(tmp_path: Path) -> None:
    samples, log = tmp_path / "samples", tmp_path / "log"
    samples.mkdir()
    log.mkdir()
    for index in range(16):
        (samples / str(index)).write_text(str(index))
    ranks = run_ranks(6, _train_on_files, samples, log)
    first, middle, last = ranks[:2], ranks[2:4], ranks[4:]
    assert middle == [([], 0)] * 2
    assert [seen for seen, _ in first] == [seen for seen, _ in last]
    assert all(len(seen) == 8 and opened >= 8 for seen, opened in first + last)
    assert sorted(itertools.chain(*(seen for seen, _ in first))) == list(range(16))
