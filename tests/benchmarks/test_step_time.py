"""The contenders of the benchmark do the same work, and its arithmetic is right."""

from __future__ import annotations

import pytest

from benchmarks import step_time, turns
from benchmarks.contenders import CONTENDERS
from benchmarks.plain_gpt import GPTSizes
from benchmarks.turns import PRODUCT, PRODUCTS_PER_TURN, Record, Work, text_of_step
from tests.harness import run_ranks

SIZES = GPTSizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
WORK = Work(sizes=SIZES, batch_size=2, steps=2, kind="cpu", dtype="fp32", threads=1)


def losses(rank: int, steps: int) -> dict[str, list[float]]:
    """Train each contender on the same few batches."""
    found = {}
    for name, build in CONTENDERS.items():
        step = build(SIZES, WORK.batch_size, WORK.kind, WORK.dtype)
        found[name] = [float(step(text_of_step(WORK, 0))) for _ in range(steps)]
    return found


def test_all_contenders_have_the_same_losses_from_the_same_weights() -> None:
    found = run_ranks(1, losses, 6, init=False)[0]
    assert set(found) == set(step_time.NAMES)
    expected = found["plain"]
    assert expected[-1] < expected[0] - 1e-3  # the weights have moved, clipped and decayed, in all of them
    for name, own in found.items():
        assert own == pytest.approx(expected, abs=2e-6), name


def test_mfu_and_speed_are_ratios_of_the_measured_turns() -> None:
    records = {
        "ours": Record(turns_s=[1.0, 4.0, 1.0], cpu_s=[2.0] * 3, losses=[1.0], peak_bytes=1),
        "plain": Record(turns_s=[1.5, 4.0, 1.5], cpu_s=[3.0] * 3, losses=[1.0], peak_bytes=1),
        PRODUCT: Record(turns_s=[PRODUCTS_PER_TURN * 2048.0**3 * 2 / 1e9] * 3),
    }
    result = step_time.summarize(records, WORK)
    ours, plain = result["contenders"]["ours"], result["contenders"]["plain"]
    assert result["peak_flops_per_s"] == pytest.approx(1e9)
    assert ours["ms_per_step"] == pytest.approx(500.0)
    assert ours["tokens_per_s"] == pytest.approx(64.0)
    assert plain["ours_speed"][1] == pytest.approx(1.5)  # the slow round was slow for both
    assert plain["ours_cpu_speed"][1] == pytest.approx(1.5)
    layers, head, attention = 2 * (12 * 32 * 32 + 13 * 32), 64 * 32 + 2 * 32, 2 * 32 * 16
    assert ours["mfu"] == pytest.approx(32 * 6 * (layers + head + attention) / 0.5 / 1e9)
    assert "ours" in step_time.table(result)


def test_contenders_take_turns_in_processes_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(turns, "PRODUCT_SIDE", 64)
    tiny = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 32 --seq-length 8"
    short = (
        f"--batch-size 1 --rounds 2 --steps 1 --threads 1 --device cpu --contenders plain --json {tmp_path}/out.json"
    )
    result = step_time.main([*tiny.split(), *short.split()], start_method="fork")
    assert (tmp_path / "out.json").exists()
    assert len(result["contenders"]["plain"]["losses"]) == 3
    assert result["contenders"]["plain"]["mfu"] > 0.0
