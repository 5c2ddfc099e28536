"""The history of a run's samples: stretches after restarts and rollbacks, and the ranks that read a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config import parse
from megatron.config.batch_rampup import BatchSizes
from megatron.data.data_loader import DataLoader
from megatron.errors import DataError
from megatron.mpu.topology import Topology
from megatron.training import sample_history
from megatron.training.sample_history import Stretch, read_stretches, reader_of


def append(folder: Path, extra: str, topology: Topology, step: int, samples: int) -> None:
    argv = f"--data-path none --vocab-size 9 --dry-run --seq-length 16 {extra}".split()
    sample_history.append(folder, parse(argv, world_size=topology.world_size), topology, step, samples)


def test_later_starts_replace_repeated_steps(tmp_path: Path) -> None:
    """Steps of 4 samples; a restart after step 5 on 2 replicas; a rollback to step 3, which skips samples."""
    one, two = Topology(pipe=1, data=1, tensor=1), Topology(pipe=1, data=2, tensor=1)
    append(tmp_path, "--batch-size 2 --gas 2", one, 0, 0)
    append(tmp_path, "--batch-size 2 --gas 2", two, 5, 20)
    append(tmp_path, "--batch-size 2 --gas 2", two, 8, 44)
    append(tmp_path, "--batch-size 2 --gas 2", two, 6, 60)
    with open(tmp_path / sample_history.FILE_NAME, "a") as file:
        file.write('{"step": 7, "sam')
    stretches = read_stretches(tmp_path)
    assert [(s.step, s.stop_step, s.samples, s.stop_samples) for s in stretches] == [
        (0, 5, 0, 20), (5, 6, 20, 28), (6, None, 60, None),
    ]  # fmt: skip
    assert stretches[2].samples_of(7) == range(60, 68) and stretches[2].step_of(68) == 8
    with pytest.raises(DataError, match="has no sample_history.jsonl"):
        read_stretches(tmp_path / "other")


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("topology", [Topology(1, 2, 1), Topology(2, 3, 2, context=2)], ids=["dp2", "pp2 dp3 cp2 tp2"])
def test_reader_equals_data_loader(topology: Topology, is_interleaved: bool) -> None:
    sizes = BatchSizes.ramp(24, 12, 6, 60)
    stretch = Stretch(4, 30, 2, sizes, is_interleaved, 16, topology)
    loaders = [
        DataLoader(
            range(10**6), micro_batch_size=2, num_micro_batches=1, data_rank=replica, data_size=topology.data,
            samples_consumed=30, batch_sizes=sizes, is_interleaved=is_interleaved,
        ).micro_batches()
        for replica in range(topology.data)
    ]  # fmt: skip
    for step in range(5, 12):
        samples = stretch.samples_of(step)
        found: set[int] = set()
        for sample in samples:
            assert stretch.step_of(sample) == step
        readers = {sample: reader_of(stretch, step, sample) for sample in samples}
        for replica in range(topology.data):
            num_micro_batches = max((r.micro_batch for r in readers.values() if r.replica == replica), default=-1) + 1
            for micro_batch in range(num_micro_batches):
                for sample in next(loaders[replica]).indices:
                    assert readers[sample][:2] == (replica, micro_batch)
                    found.add(sample)
        assert found == set(samples)
        ranks = readers[samples.start].ranks
        assert {topology.coordinate(rank).data for rank in ranks} == {readers[samples.start].replica}
        assert len(ranks) == topology.world_size // topology.data
        if topology.context > 1:
            assert readers[samples.start].chunks[ranks[0]] == [(0, 4), (12, 16)]


def test_history_has_skipped_steps_and_excluded_documents(tmp_path: Path) -> None:
    one = Topology(pipe=1, data=1, tensor=1)
    append(tmp_path, "--batch-size 2 --iterations-to-skip 2 4-5", one, 0, 0)
    sample_history.append(tmp_path, parse(["--dry-run", "--vocab-size", "9"], world_size=1), one, 6, 12, "ab12")
    before, after = read_stretches(tmp_path)
    assert [step for step in range(1, 7) if step in before.skipped_steps] == [2, 4, 5] and before.exclusion is None
    assert not after.skipped_steps and after.exclusion == "ab12"

    excluded = {"web": np.array([0, 1, 2, 5]), "books": np.array([], np.int64), "code": np.array([3, 7, 8])}
    sample_history.write_excluded(tmp_path, "ab12", excluded)
    code, web, new = sample_history.read_excluded(tmp_path, "ab12", ["code", "web", "new"])
    assert code.tolist() == [[3, 3], [7, 8]] and web.tolist() == [[0, 2], [5, 5]] and new.shape == (0, 2)
    with pytest.raises(DataError, match="excludes documents of web, code, but the run's corpora are a, b"):
        sample_history.read_excluded(tmp_path, "ab12", ["a", "b"])
    with pytest.raises(DataError, match="excluded-cd34.json"):
        sample_history.read_excluded(tmp_path, "cd34", ["web"])
    sample_history.write_excluded(tmp_path, "ef56", {"web": np.array([4])})
    assert sample_history.read_excluded(tmp_path, "ef56", ["renamed"])[0].tolist() == [[4, 4]]
