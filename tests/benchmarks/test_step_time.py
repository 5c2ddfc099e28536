"""The contenders of the benchmark do the same work, and its arithmetic is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import contenders, step_time, t5_contenders, turns
from benchmarks.sizes import GPTSizes, Sizes, T5Sizes
from benchmarks.turns import PRODUCT, PRODUCTS_PER_TURN, Record, Work
from tests.harness import run_ranks

SIZES = GPTSizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
T5_SIZES = T5Sizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, enc_seq_length=16)
WORK = Work(sizes=SIZES, batch_size=2, steps=2, kind="cpu", dtype="fp32", threads=1)


def losses(rank: int, sizes: Sizes, steps: int, names: list[str]) -> dict[str, list[float]]:
    """Train each contender on the same batch, over and over."""
    builders = {"gpt2": contenders, "t5": t5_contenders}[sizes.family].CONTENDERS
    assert set(builders) == set(step_time.NAMES[sizes.family])
    found = {}
    for name in names:
        step = builders[name](sizes, WORK.batch_size, WORK.kind, WORK.dtype)
        found[name] = [float(step(sizes.batch(WORK.batch_size, 0))) for _ in range(steps)]
    return found


def check(sizes: Sizes, names: list[str]) -> None:
    found = run_ranks(1, losses, sizes, 6, names, init=False, deadline_s=400)[0]
    expected = found["hf"]
    assert expected[-1] < expected[0] - 1e-3  # the weights have moved, clipped and decayed, in all of them
    for name in names:
        assert found[name] == pytest.approx(expected, abs=2e-6), name


@pytest.mark.parametrize("sizes", [SIZES, T5_SIZES], ids=lambda sizes: sizes.family)
def test_all_contenders_have_the_same_losses_from_the_same_weights(sizes: Sizes) -> None:
    check(sizes, step_time.EAGER[sizes.family])


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("sizes", [SIZES, T5_SIZES], ids=lambda sizes: sizes.family)
def test_compiled_contenders_have_the_same_losses_too(sizes: Sizes) -> None:
    eager = step_time.EAGER[sizes.family]
    check(sizes, ["hf", *(name for name in step_time.NAMES[sizes.family] if name not in eager)])


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
    assert plain["speed_of_ours"]["ours"][1] == pytest.approx(1.5)  # the slow round was slow for both
    assert plain["cpu_speed_of_ours"]["ours"][1] == pytest.approx(1.5)
    layers, head, attention = 2 * (12 * 32 * 32 + 13 * 32), 64 * 32 + 2 * 32, 2 * 32 * 16
    assert ours["mfu"] == pytest.approx(32 * 6 * (layers + head + attention) / 0.5 / 1e9)
    assert ours["mfu_whole"] == pytest.approx(32 * 6 * (layers + head + 2 * attention) / 0.5 / 1e9)
    assert "ours" in step_time.table(result)


def test_flops_of_t5_are_those_of_the_note() -> None:
    """Products of both sides, whole attention matrices, the head on the targets; norms are left out."""
    h, f, s_e, s_d = 32, 128, 16, T5_SIZES.target_length
    encoder = s_e * (8 * h * h + 4 * h * f) + 4 * s_e * s_e * h
    decoder = s_d * (8 * h * h + 4 * h * f) + 4 * s_d * s_d * h + 4 * (s_d + s_e) * h * h + 4 * s_d * s_e * h
    expected = 3 * (2 * encoder + 2 * decoder + 2 * s_d * h * 256)
    work = replace(WORK, sizes=T5_SIZES)
    records = {
        "ours": Record(turns_s=[1.0], cpu_s=[1.0], losses=[1.0]),
        PRODUCT: Record(turns_s=[1.0]),
    }
    result = step_time.summarize(records, work)
    assert result["flops_per_step"] == pytest.approx(WORK.batch_size * expected, rel=0.02)
    ours = result["contenders"]["ours"]
    assert ours["tokens_per_s"] == pytest.approx(2 * 2 * (s_e + s_d))
    assert ours["mfu_whole"] == ours["mfu"]


def test_unequal_first_losses_end_a_run() -> None:
    step_time.check_first_losses({"ours": 1.0, "hf": 1.00001}, 1e-4)
    for other in (1.001, float("nan")):
        with pytest.raises(RuntimeError, match="same thing"):
            step_time.check_first_losses({"ours": 1.0, "hf": other}, 1e-4)


@pytest.mark.parametrize("model, names", [("gpt2", ["plain"]), ("t5", ["hf"])])
def test_contenders_take_turns_in_processes_of_their_own(tmp_path, monkeypatch, model: str, names: list[str]) -> None:
    monkeypatch.setattr(turns, "PRODUCT_SIDE", 64)
    lengths = {"gpt2": "--seq-length 8", "t5": "--enc-seq-length 16"}[model]
    tiny = f"--model {model} --num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 256 {lengths}"
    short = "--batch-size 1 --rounds 2 --steps 1 --threads 1 --device cpu"
    place = f"--contenders {' '.join(names)} --json {tmp_path}/out.json"
    result = step_time.main(f"{tiny} {short} {place}".split(), start_method="fork")
    assert (tmp_path / "out.json").exists()
    for name in names:
        row = result["contenders"][name]
        assert len(row["losses"]) == 3 and row["mfu"] > 0.0
