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
from tds.engine.pipeline_json import compares_data
from tds.pipe import PipelineModule
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.toys import Toy, make_engine, reference, train


def _ends(rank: int) -> list[Any]:
    """Return what three stages see of: data that end on all, on the last alone, within a call; and a step after it."""
    toy = Toy("chain")
    engine = make_engine(toy, 3)
    whole, ends = toy.batches(), []
    for first, last in ((2 * whole, 2 * whole), (2 * whole, whole), (whole[:3], whole), (2 * whole, whole * 2)):
        data = iter(first if rank == 0 else last)
        steps = 0
        try:
            for _ in range(2):
                engine.train_batch(data)
                steps += 1
            with pytest.raises(StopIteration):
                engine.train_batch(data)
        except DataEnded as error:
            ends.append((steps, str(error)))
        else:
            ends.append((steps, "all ended"))
    with pytest.raises(DataEnded):
        engine.eval_batch(iter(whole[: 3 if rank == 2 else 4]))
    with pytest.raises(StopIteration):
        engine.eval_batch(iter([]))
    return [*ends, train(engine, toy)]


def test_all_ranks_learn_of_data_that_end_and_can_go_on() -> None:
    ranks = run_ranks(3, _ends)
    both, one, within, again = ranks[0][:4]
    assert both == again == (2, "all ended")
    assert one[0] == 1 and "got none for this call on rank 2 (stage 2, replica 0), and more on rank 0" in one[1]
    assert "a multiple of gradient_accumulation_steps" in one[1] and "RepeatingLoader" in one[1]
    assert within[0] == 0 and "needs 4 micro-batches, got 3 on rank 0 (stage 0, replica 0), where the d" in within[1]
    _, wanted = reference(Toy("chain"))
    for *ends, (_, gradients, _) in ranks:
        assert ends == ranks[0][:4], "middle stages too"
        assert all(torch.allclose(g, wanted[name], rtol=1e-11, atol=1e-15) for name, g in gradients.items())


def _trains_until_the_end(rank: int) -> Any:
    """Weights that change: an unfinished global batch must leave none of it."""
    toy = Toy("chain", micro_batches=2)
    engine = make_engine(toy, 2)
    engine.optimizer.param_groups[0]["lr"] = 1.0
    before = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(DataEnded):
        engine.train_batch(iter(toy.batches()[:1]))
    return all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


def test_a_global_batch_that_is_not_whole_changes_no_weight() -> None:
    assert run_ranks(2, _trains_until_the_end) == [True, True]


def _checks(rank: int, checks: bool) -> Any:
    """Train on two stages whose loaders differ in the last labels of the second micro-batch."""
    toy = Toy("chain", pipeline={"check_data": checks})
    engine = make_engine(toy, 2)
    assert torch.isfinite(engine.train_batch(iter(toy.batches())))
    batches = toy.batches()
    if rank == 1:
        x, (target, mask) = batches[1]
        batches[1] = x, (target, 1 - mask)
    engine.train_batch(iter(batches))


def test_checksums_on_request_find_stages_that_read_different_samples() -> None:
    codes, _, reports = fork_ranks(2, _checks, True)
    assert codes == [1, 1]
    assert "DataDisagreement: all ranks of a replica that read data must read the same micro-batches" in reports[0]
    assert "micro-batch 1 differs: checksum" in reports[0] and "rank 1 (stage 1, replica 0)" in reports[1]
    run_ranks(2, _checks, False)
    with pytest.raises(ValueError, match="must be true or false, got 'yes'"):
        compares_data({"check_data": "yes"})


def test_a_checksum_sees_values_types_shapes_and_nesting() -> None:
    x = torch.arange(6)
    others = [x + 1, x.int(), x.view(2, 3), (x,), (x, None), {"x": x}, {"y": x}, x.bfloat16(), torch.tensor(0)]
    assert len({checksum(each) for each in [x, *others]}) == 1 + len(others)
    assert checksum((x, {"a": [x]})) == checksum((x.clone(), {"a": (x.clone(),)}))


class _Files(torch.utils.data.Dataset):
    """Sample i is the file of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(list(self.folder.iterdir()))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((4, 6), float((self.folder / str(index)).read_text()))
        return x, x


def _reads_files(rank: int, folder: Path, log: Path) -> tuple[list[float], int]:
    """Return the samples of two steps that this rank has, and how many it has opened, its loader's processes too."""
    file = os.open(log / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(folder)):
            os.write(file, b".")

    sys.addaudithook(hear)
    toy = Toy("chain", rows=2, micro_batches=2, dtype=torch.float32)
    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(toy.specs(), num_stages=3, loss_fn=lambda out, y: ((out - y) ** 2).mean())
    engine = make_engine(toy, 3, lambda **given: tds.initialize(**given, training_data=_Files(folder)), module)
    seen: list[float] = []

    def noting(batch: Any) -> Any:
        seen.extend(batch[0][:, 0, 0].tolist())
        return batch

    engine.set_batch_fn(noting)
    for _ in range(2):
        engine.train_batch()
    return seen, (log / str(rank)).stat().st_size


def test_middle_stages_open_no_sample_and_replicas_share_them(tmp_path: Path) -> None:
    samples, log = tmp_path / "samples", tmp_path / "log"
    samples.mkdir()
    log.mkdir()
    for index in range(16):
        (samples / str(index)).write_text(str(index))
    ranks = run_ranks(6, _reads_files, samples, log)
    first, middle, last = ranks[:2], ranks[2:4], ranks[4:]
    assert middle == [([], 0)] * 2
    assert [seen for seen, _ in first] == [seen for seen, _ in last]
    assert all(len(seen) == 8 and opened >= 8 for seen, opened in first + last)
    assert sorted(itertools.chain(*(seen for seen, _ in first))) == list(range(16))
