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

from megatron.debug.compare import compare, grouped
from megatron.debug.dump_files import GRADIENT, WEIGHT, Dump, Samples, Writer, read, write_manifest
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, OUTPUT
from megatron.debug.statistics import Cut
from tools import compare_dumps

FACTS = {
    "layout": {"tensor": 1, "pipe": 2, "data": 1},
    "family": "gpt2",
    "micro_batch_size": 1,
    "world_size": 2,
    "ranks": [{"stage": 0, "tensor": 0, "data": 0}, {"stage": 1, "tensor": 0, "data": 0}],
    "dtype": "fp32",
    "seed": 1,
    "device": "cpu",
}
NAMES = ("zeroth", "first", "second", "third")  # of the pieces: two chunks on each of two stages


def write(folder: Path, ahead_ns: tuple[int, int], value: Callable[[str, str], torch.Tensor]) -> Dump:
    """Return the dump of a step on two hosts whose clocks are ahead by so much; each module is called "shared", too."""
    write_manifest(folder, FACTS)
    writers = [Writer(folder, rank, with_tensors=True) for rank in (0, 1)]
    for writer in writers:
        writer.begin(1)
    for what, pieces in ((WEIGHT, NAMES), (OUTPUT, NAMES), (GRAD_OUTPUT, NAMES[::-1]), (GRADIENT, NAMES)):
        for name in pieces:
            piece = NAMES.index(name)
            writer = writers[piece % 2]
            own = {"micro_batch": 0, "samples": Samples(0, 1)} if what in (OUTPUT, GRAD_OUTPUT) else {}
            writer.add(value(name, what), name, what, chunk=piece // 2, **own)
            if what == OUTPUT:
                writer.add(value(name, "shared"), "shared", what, chunk=piece // 2, call=piece // 2, **own)
    for writer in writers:
        writer.close()
    dump, ticks = read(folder), count(1)
    times = {id(r): next(ticks) for r in sorted(dump.records, key=lambda r: r.time_ns)}
    return dump._replace(records=[replace(r, time_ns=times[id(r)] + ahead_ns[r.rank]) for r in dump.records])


def of_name(name: str, what: str) -> torch.Tensor:
    return torch.full((1, 3), 1.0 + NAMES.index(name) + 10.0 * (what == "shared"))


@pytest.mark.parametrize("ahead_ns", [(0, 0), (1000, 0), (0, 1000)], ids=str)
def test_stages_and_chunks_tell_the_order_and_clocks_of_hosts_do_not(ahead_ns: tuple[int, int], tmp_path: Path) -> None:
    first = write(tmp_path / "a", ahead_ns, of_name)
    other = write(tmp_path / "b", (0, 0), lambda name, what: of_name(name, what) * 2)
    found = compare(first, other)
    names = [(each.phase, each.key.name) for each in found.differences if each.key.name != "shared"]
    assert names == [
        *(("weights", name) for name in NAMES),
        *(("forward", name) for name in NAMES),
        *(("backward", name) for name in NAMES[::-1]),
        *(("gradients", name) for name in NAMES),
    ]
    calls = {key.call: records[0].statistics.mean for key, records in grouped(first).items() if key.name == "shared"}
    assert calls == {0: 11.0, 1: 12.0, 2: 13.0, 3: 14.0}


@pytest.mark.parametrize("with_tensors", [False, True], ids=["statistics", "tensors"])
def test_shares_add_up_and_rows_whose_gradient_never_came_are_zeros(tmp_path: Path, with_tensors: bool) -> None:
    """The positions of a micro-batch are no samples, however many rows of them a rank holds."""
    whole = torch.randn(4, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole[2:] = 0.0
    share, table = torch.randn_like(whole), torch.randn(4, 6)
    given = {"one": {0: [("summed", whole), ("rows", whole), ("positions", table)]}}
    given["parts"] = {0: [("summed", share), ("rows", whole[:2])], 1: [("summed", whole - share)]}
    for name, ranks in given.items():
        write_manifest(tmp_path / name, FACTS | {"dtype": "fp64"})
        for rank in (0, 1):
            writer = Writer(tmp_path / name, rank, with_tensors=with_tensors)
            writer.begin(1)
            for module, x in ranks.get(rank, []):
                cut = Cut(0, 0, 2, 4) if len(x) < 4 else None
                own = {"cut": cut, "is_share": name == "parts" and module == "summed"}
                writer.add(x, module, GRAD_INPUT, micro_batch=0, samples=Samples(0, 2), **own)
            if name == "parts":
                for half in (0, 1):  # of two micro-batches
                    rows, samples = table[2 * rank :][:2], Samples(half, half + 1)
                    cut = Cut(0, 2 * rank, 2, 4)
                    writer.add(rows, "positions", GRAD_INPUT, cut=cut, micro_batch=half, samples=samples)
            writer.close()
    found = compare(read(tmp_path / "one"), read(tmp_path / "parts"))
    assert found.first is None, compare_dumps.verdict(found)
    assert {(each.key.name, each.by_tensors) for each in found.differences} == {
        ("summed", with_tensors), ("rows", with_tensors)
    }  # fmt: skip
    norms = {each.key.name: compare_dumps.plain(each)["norms"][1] for each in found.differences}
    assert norms["summed"] is None and norms["rows"] == pytest.approx(float(whole.norm()))


def test_equal_places_of_nan_leave_the_finite_numbers_to_judge(tmp_path: Path) -> None:
    def numbers(*values: float) -> Callable[[str, str], torch.Tensor]:
        return lambda name, what: torch.tensor([values])

    plain = write(tmp_path / "plain", (0, 0), numbers(1.0, math.nan, math.inf, 2.0))
    wanted = {
        "near": ((1.0, math.nan, math.inf, 2.001), pytest.approx(0.001 / 5**0.5, rel=1e-2)),
        "moved": ((math.nan, 1.0, math.inf, 2.0), math.inf),
        "sign": ((1.0, math.nan, -math.inf, 2.0), math.inf),
        "more": ((1.0, math.nan, math.inf, math.inf), math.inf),
    }
    for name, (values, error) in wanted.items():
        found = compare(plain, write(tmp_path / name, (0, 0), numbers(*values)))
        assert all(each.error == error for each in found.differences)
        assert all(each.by_tensors for each in found.differences)


def test_a_dump_of_another_seed_or_format_is_not_gone_on_with(tmp_path: Path) -> None:
    write_manifest(tmp_path, FACTS)
    with pytest.raises(ValueError, match="contains the dump of another run .dtype fp32, now bf16; seed 1, now 2"):
        write_manifest(tmp_path, FACTS | {"dtype": "bf16", "seed": 2})


def test_a_rank_makes_the_folder_that_its_host_has_not(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "new" / "dump", 3)
    writer.make()
    assert (tmp_path / "new" / "dump" / "rank-00003.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_the_verdict_comes_ahead_of_the_picture_and_stands_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", (0, 0), of_name)
    write(tmp_path / "b", (0, 0), lambda name, what: of_name(name, what) * 2)
    words = ["compare_dumps.py", str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(sys, "argv", words)
    assert compare_dumps.main() == 1
    out = capsys.readouterr().out
    assert 0 < out.index("verdict: ") < out.index("picture: ")
    (tmp_path / "b" / "compare.png").unlink()
    (tmp_path / "b" / "compare.png").mkdir()
    assert compare_dumps.main() == 1
    captured = capsys.readouterr()
    assert "verdict: " in captured.out and "the picture cannot be drawn: " in captured.err
    monkeypatch.setattr(sys, "argv", [*words, "--picture", str(tmp_path / "b" / "compare.png")])
    assert compare_dumps.main() == 2
    assert "compare_dumps.py: the picture cannot be drawn: " in capsys.readouterr().err


def test_what_has_no_samples_is_left_out_where_micro_batches_differ_in_size(tmp_path: Path) -> None:
    for name, number in (("large", 1), ("small", 2)):
        write_manifest(tmp_path / name, FACTS | {"world_size": 1})
        writer = Writer(tmp_path / name, 0)
        writer.begin(1)
        for micro_batch in range(number):
            size = 2 // number
            samples = Samples(micro_batch * size, (micro_batch + 1) * size)
            for of, width in (("states", size), ("positions", 1)):
                writer.add(torch.ones(width, 3), of, OUTPUT, micro_batch=micro_batch, samples=samples)
        writer.close()
    large, small = read(tmp_path / "large"), read(tmp_path / "small")
    assert [(each.key.name, each.error < 1e-12) for each in compare(large, small).differences] == [("states", True)]
    assert {each.key.name for each in compare(large, large).differences} == {"states", "positions"}
