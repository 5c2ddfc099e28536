"""The order of a run is that of its stages and chunks, whatever the clocks of its hosts say; and other small facts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from megatron.debug.compare import compare, group_records
from megatron.debug.dump_files import GRADIENT, WEIGHT, Dump, DumpWriter, SampleRange, read_dump, write_manifest
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, OUTPUT
from megatron.debug.statistics import ShardSlice
from tools import compare_dumps

MANIFEST = {
    "layout": {"tensor": 1, "pipe": 2, "data": 1},
    "family": "gpt2",
    "micro_batch_size": 1,
    "world_size": 2,
    "ranks": [{"stage": 0, "tensor": 0, "data": 0}, {"stage": 1, "tensor": 0, "data": 0}],
    "dtype": "fp32",
    "seed": 1,
    "device": "cpu",
}
CHUNK_NAMES = ("zeroth", "first", "second", "third")  # of the virtual stages: 2 stages, 2 chunks


def write_dump(folder: Path, clock_offsets_ns: tuple[int, int], value: Callable[[str, str], torch.Tensor]) -> Dump:
    """Return the dump of a step on two hosts whose clocks are ahead by so much; each module is called "shared", too."""
    write_manifest(folder, MANIFEST)
    writers = [DumpWriter(folder, rank, with_tensors=True) for rank in (0, 1)]
    for writer in writers:
        writer.begin(1)
    for tensor_type, names in (
        (WEIGHT, CHUNK_NAMES),
        (OUTPUT, CHUNK_NAMES),
        (GRAD_OUTPUT, CHUNK_NAMES[::-1]),
        (GRADIENT, CHUNK_NAMES),
    ):
        for name in names:
            chunk_idx = CHUNK_NAMES.index(name)
            writer = writers[chunk_idx % 2]
            fields = {"micro_batch": 0, "samples": SampleRange(0, 1)} if tensor_type in (OUTPUT, GRAD_OUTPUT) else {}
            writer.add(value(name, tensor_type), name, tensor_type, chunk=chunk_idx // 2, **fields)
            if tensor_type == OUTPUT:
                writer.add(
                    value(name, "shared"), "shared", tensor_type, chunk=chunk_idx // 2, call=chunk_idx // 2, **fields
                )
    for writer in writers:
        writer.close()
    dump, tick_counter = read_dump(folder), count(1)
    times = {id(record): next(tick_counter) for record in sorted(dump.records, key=lambda record: record.time_ns)}
    return dump._replace(
        records=[replace(record, time_ns=times[id(record)] + clock_offsets_ns[record.rank]) for record in dump.records]
    )


def value_of_name(name: str, tensor_type: str) -> torch.Tensor:
    return torch.full((1, 3), 1.0 + CHUNK_NAMES.index(name) + 10.0 * (tensor_type == "shared"))


@pytest.mark.parametrize("clock_offsets_ns", [(0, 0), (1000, 0), (0, 1000)], ids=str)
def test_order_follows_stages_and_chunks_instead_of_clocks(clock_offsets_ns: tuple[int, int], tmp_path: Path) -> None:
    first_dump = write_dump(tmp_path / "a", clock_offsets_ns, value_of_name)
    scaled_dump = write_dump(tmp_path / "b", (0, 0), lambda name, tensor_type: value_of_name(name, tensor_type) * 2)
    comparison = compare(first_dump, scaled_dump)
    names = [
        (difference.phase, difference.key.name)
        for difference in comparison.differences
        if difference.key.name != "shared"
    ]
    assert names == [
        *(("weights", name) for name in CHUNK_NAMES),
        *(("forward", name) for name in CHUNK_NAMES),
        *(("backward", name) for name in CHUNK_NAMES[::-1]),
        *(("gradients", name) for name in CHUNK_NAMES),
    ]
    calls = {
        key.call: records[0].statistics.mean
        for key, records in group_records(first_dump).items()
        if key.name == "shared"
    }
    assert calls == {0: 11.0, 1: 12.0, 2: 13.0, 3: 14.0}


@pytest.mark.parametrize("with_tensors", [False, True], ids=["statistics", "tensors"])
def test_partial_sums_add_up_and_missing_gradient_rows_are_zero(tmp_path: Path, with_tensors: bool) -> None:
    """The positions of a micro-batch are no samples, however many rows of them a rank holds."""
    full = torch.randn(4, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    full[2:] = 0.0
    first_summand, table = torch.randn_like(full), torch.randn(4, 6)
    tensors_by_dump = {"one": {0: [("summed", full), ("rows", full), ("positions", table)]}}
    tensors_by_dump["parts"] = {
        0: [("summed", first_summand), ("rows", full[:2])],
        1: [("summed", full - first_summand)],
    }
    for name, ranks in tensors_by_dump.items():
        write_manifest(tmp_path / name, MANIFEST | {"dtype": "fp64"})
        for rank in (0, 1):
            writer = DumpWriter(tmp_path / name, rank, with_tensors=with_tensors)
            writer.begin(1)
            for module, tensor in ranks.get(rank, []):
                shard_slice = ShardSlice(0, 0, 2, 4) if len(tensor) < 4 else None
                fields = {"shard_slice": shard_slice, "is_share": name == "parts" and module == "summed"}
                writer.add(tensor, module, GRAD_INPUT, micro_batch=0, samples=SampleRange(0, 2), **fields)
            if name == "parts":
                for micro_batch in (0, 1):  # of two micro-batches
                    rows, samples = table[2 * rank :][:2], SampleRange(micro_batch, micro_batch + 1)
                    shard_slice = ShardSlice(0, 2 * rank, 2, 4)
                    writer.add(
                        rows, "positions", GRAD_INPUT, shard_slice=shard_slice, micro_batch=micro_batch, samples=samples
                    )
            writer.close()
    comparison = compare(read_dump(tmp_path / "one"), read_dump(tmp_path / "parts"))
    assert comparison.first is None, compare_dumps.verdict(comparison)
    assert {(difference.key.name, difference.is_from_tensors) for difference in comparison.differences} == {
        ("summed", with_tensors), ("rows", with_tensors)
    }  # fmt: skip
    norms = {
        difference.key.name: compare_dumps.difference_to_json(difference)["norms"][1]
        for difference in comparison.differences
    }
    assert norms["summed"] is None and norms["rows"] == pytest.approx(float(full.norm()))


def test_finite_values_are_compared_if_nan_positions_match(tmp_path: Path) -> None:
    def make_value(*values: float) -> Callable[[str, str], torch.Tensor]:
        return lambda name, tensor_type: torch.tensor([values])

    reference_dump = write_dump(tmp_path / "plain", (0, 0), make_value(1.0, math.nan, math.inf, 2.0))
    cases = {
        "near": ((1.0, math.nan, math.inf, 2.001), pytest.approx(0.001 / 5**0.5, rel=1e-2)),
        "moved": ((math.nan, 1.0, math.inf, 2.0), math.inf),
        "sign": ((1.0, math.nan, -math.inf, 2.0), math.inf),
        "more": ((1.0, math.nan, math.inf, math.inf), math.inf),
    }
    for name, (values, error) in cases.items():
        comparison = compare(reference_dump, write_dump(tmp_path / name, (0, 0), make_value(*values)))
        assert all(difference.error == error for difference in comparison.differences)
        assert all(difference.is_from_tensors for difference in comparison.differences)


def test_dump_of_other_seed_or_dtype_is_rejected(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(ValueError, match="contains the dump of another run .dtype fp32, now bf16; seed 1, now 2"):
        write_manifest(tmp_path, MANIFEST | {"dtype": "bf16", "seed": 2})


def test_writer_creates_missing_folder(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path / "new" / "dump", 3)
    writer.create_files()
    assert (tmp_path / "new" / "dump" / "rank-00003.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_verdict_is_printed_before_and_without_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(tmp_path / "a", (0, 0), value_of_name)
    write_dump(tmp_path / "b", (0, 0), lambda name, tensor_type: value_of_name(name, tensor_type) * 2)
    arguments = ["compare_dumps.py", str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert compare_dumps.main() == 1
    stdout = capsys.readouterr().out
    assert 0 < stdout.index("verdict: ") < stdout.index("picture: ")
    (tmp_path / "b" / "compare.png").unlink()
    (tmp_path / "b" / "compare.png").mkdir()
    assert compare_dumps.main() == 1
    captured = capsys.readouterr()
    assert "verdict: " in captured.out and "the picture cannot be drawn: " in captured.err
    monkeypatch.setattr(sys, "argv", [*arguments, "--picture", str(tmp_path / "b" / "compare.png")])
    assert compare_dumps.main() == 2
    assert "compare_dumps.py: the picture cannot be drawn: " in capsys.readouterr().err


def test_rows_without_samples_are_skipped_if_micro_batch_sizes_differ(tmp_path: Path) -> None:
    for name, num_micro_batches in (("large", 1), ("small", 2)):
        write_manifest(tmp_path / name, MANIFEST | {"world_size": 1})
        writer = DumpWriter(tmp_path / name, 0)
        writer.begin(1)
        for micro_batch in range(num_micro_batches):
            micro_batch_size = 2 // num_micro_batches
            samples = SampleRange(micro_batch * micro_batch_size, (micro_batch + 1) * micro_batch_size)
            for module_name, num_rows in (("states", micro_batch_size), ("positions", 1)):
                writer.add(torch.ones(num_rows, 3), module_name, OUTPUT, micro_batch=micro_batch, samples=samples)
        writer.close()
    large, small = read_dump(tmp_path / "large"), read_dump(tmp_path / "small")
    assert [(difference.key.name, difference.error < 1e-12) for difference in compare(large, small).differences] == [
        ("states", True)
    ]
    assert {difference.key.name for difference in compare(large, large).differences} == {"states", "positions"}
