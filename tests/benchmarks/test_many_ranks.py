"""What rank 0 does grows no faster than ranks x log(ranks), and the benchmark that counts it is right itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import many_ranks, many_ranks_start, many_ranks_state
from benchmarks.many_ranks import Row
from benchmarks.many_ranks_counting import CountingGroup, CountingStore, fake_world, layout_of, lines_run
from benchmarks.many_ranks_start import COUNTED, SECONDS, Figure, Figures
from tds.watchdog.alarm import LOOKS_PER_S
from tests.helpers.harness import run_ranks


def grown(function: Callable[[int], Figures], few: int, many: int) -> dict[str, float]:
    """Return the exponent of what is counted, from ``few`` ranks to ``many``; in a process of its own."""

    def count(rank: int) -> list[dict[str, float]]:
        both = [function(ranks) for ranks in (few, many)]
        return [{title: each.value for title, each in one.items() if each.how != SECONDS} for one in both]

    first, last = run_ranks(1, count, init=False)[0]
    return {title: math.log(last[title] / first[title], many / few) for title in first if first[title]}


BAR = math.log(512 * math.log(512) / (64 * math.log(64)), 512 / 64)


@pytest.mark.parametrize("name", ["groups", "meeting", "checks", "watching", "ending"])
def test_start_and_end_grow_no_faster_than_ranks_times_their_logarithm(name: str) -> None:
    found = grown(many_ranks_start.PARTS[name], 64, 512)
    assert found and max(found.values()) <= BAR, found


def test_gloo_asks_of_the_store_in_proportion_to_the_ranks() -> None:
    found = grown(many_ranks_start.connecting, 4, 16)
    bytes_and_sockets = {"gloo: bytes of the same": 1.0, "gloo: connections of each rank": 0.0}
    assert found == pytest.approx({"gloo: a group and its first sum": 1.0, **bytes_and_sockets}, abs=0.03)


def test_a_step_grows_in_proportion_to_the_ranks() -> None:
    assert max(grown(many_ranks_state.stepping, 64, 512).values()) <= BAR


def test_plans_of_a_checkpoint_stay_with_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gets plain values for each tensor of a rank, sends back a name, and for a load gets nothing."""
    monkeypatch.setattr(many_ranks_state, "LAYERS", 4)
    ranks = 16
    found = many_ranks_state.saving(ranks)
    held = len(many_ranks_state.records_of(layout_of(ranks), 0))
    assert found["save: plans that come to rank 0"].value < 150 * held * ranks
    assert found["save: plans that go out"].value < 300 * ranks
    assert found["load: plans that come to rank 0"].value < 300 * ranks
    assert found["save: files"].value == ranks and found["save: manifest"].how == COUNTED
    assert found["files looked at to keep three"].value <= 4 * ranks + 10


def test_watchdogs_do_not_ask_more_of_a_store_than_it_can_answer() -> None:
    for ranks in (8, 5000):
        found = many_ranks_start.watching(ranks)["watchdogs of run and engine, looking"]
        assert found.value <= 2 * LOOKS_PER_S
        assert ranks > 8 or found.value == pytest.approx(2 * ranks / 0.3)


def test_a_counting_store_is_a_store_and_counts_each_question() -> None:
    store = CountingStore()
    store.set("a", "xyz")
    assert store.get("a") == b"xyz" and store.check(["a"]) and not store.check(["b", "c"])
    assert store.add("n", 2) == 2 and store.compare_set("a", "xyz", "u") == b"u"
    assert store.messages == 6 and store.calls["check"] == 2
    assert store.num_bytes == 4 + 4 + 1 + 2 + 1 + (1 + 3 + 1 + 1)
    dist.PrefixStore("p", store).set("k", "v")
    assert store.get("p/k") == b"v"


def test_stand_ins_count_groups_bytes_and_lines() -> None:
    with fake_world(64) as made:
        dist.new_group([0, 1, 2], backend="gloo")
        dist.new_group(backend="gloo")
    assert (made.calls, made.ranks) == (2, 67)
    group = CountingGroup.of(5)
    assert group.gather_objects("a") == ["a"] * 5 and group.received[0] % 5 == 0

    def loop(times: int) -> None:
        for _ in range(times):
            pass

    assert lines_run(partial(loop, 200)) - lines_run(partial(loop, 100)) == pytest.approx(200, abs=2)


@pytest.mark.parametrize("ranks", [8, 64, 512, 4096, 10_000])
def test_the_layout_that_is_measured_has_all_ranks_and_two_replicas(ranks: int) -> None:
    topology = layout_of(ranks)
    assert topology.world_size == ranks and topology.data >= 2 and topology.tensor * topology.pipe > 1


def row(how: str = COUNTED, **values: float) -> Row:
    return Row("part", "title", "bytes", how, {int(name[1:]): value for name, value in values.items()})


def test_growth_is_a_power_and_the_bar_that_of_n_log_n() -> None:
    linear, square = row(n8=9.0, n512=512.0, n10000=10_000.0), row(n8=1.0, n512=512.0**2, n10000=1e8)
    assert linear.exponent == pytest.approx(1) and square.exponent == pytest.approx(2) and linear.span == (512, 10_000)
    assert linear.bar == pytest.approx(1.131, abs=1e-3) and linear.is_within and not square.is_within
    exact = row(n512=512 * math.log(512), n10000=10_000 * math.log(10_000))
    assert exact.is_within and exact.exponent == pytest.approx(exact.bar)
    assert row(n64=5.0).exponent == 0 and row(n64=5.0).is_within and row(n8=0.0, n64=0.0).exponent == 0
    slow = row(SECONDS, n512=1.0, n10000=(10_000 / 512) ** 1.25)
    assert slow.is_within and not row(n512=1.0, n10000=(10_000 / 512) ** 1.25).is_within


def test_a_table_says_what_grows_too_fast_and_figures_have_units() -> None:
    lines = many_ranks.table([row(n512=512.0, n10000=10_000.0), row(n512=1.0, n10000=1e4)], "ranks").splitlines()
    assert lines[0].startswith("| ranks | 512 | 10,000 | unit |")
    assert lines[3].endswith("| 1.00 | yes |") and lines[4].endswith("| 3.10 | **no** |")
    figures = (0.0123, "s"), (12.3, "s"), (2.5e9, "bytes"), (7, "x")
    assert [many_ranks.text(value, unit) for value, unit in figures] == ["0.012", "12", "2.5 G", "7"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ranks 4", "--ranks must be at least 8, got 4"),
        ("--ranks 12", "--ranks must be a multiple of 8, got 12"),
        ("--documents 1", "--documents must be at least 8, got 1"),
        ("--only planner", "give --out DIR too"),
    ],
)
def test_options_that_cannot_be_are_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        many_ranks.parse_args(line.split())
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_order_of_documents_is_looked_at_by_two_ranks_of_a_host(tmp_path: Path) -> None:
    found = many_ranks_state.order(20_000, tmp_path)
    assert {figure.how for figure in found.values()} == {SECONDS, COUNTED, "wall clock"} and len(found) == 7


def test_the_page_gets_tables_and_a_picture_and_a_figure_that_grows_too_fast_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(power: int, ranks: int) -> Figures:
        return {"a": Figure(ranks, "bytes"), "b": Figure(ranks**power, "messages")}

    found: list[int] = []
    for power in (1, 2):
        function = partial(part, power)
        function.__name__ = "part"  # type: ignore[attr-defined]
        monkeypatch.setattr(many_ranks, "PARTS", {"some": (function,)})
        found.append(many_ranks.main(["--ranks", "64", "512", "--documents", "--out", str(tmp_path)]))
    assert found == [0, 1] and "grows faster than n log n: b, as n^2.00" in capsys.readouterr().out
    page = (tmp_path / "scaling.md").read_text()
    assert "| b | 4,096 | 262,144 | messages | counted | 2.00 | **no** |" in page
    assert (tmp_path / "pictures" / "scaling_ranks.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_grows_too_fast_up_to_ten_thousand_ranks(tmp_path: Path) -> None:
    assert many_ranks.main(["--ranks", "512", "10000", "--documents", "--out", str(tmp_path)]) == 0
