"""The contenders of the benchmark do the same work, and its arithmetic is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import contenders, step_time, turns
from benchmarks.contenders import GPTSizes, LlamaSizes, Sizes, T5Sizes, YoutuSizes
from benchmarks.step_time import PRODUCT, PRODUCTS, Record, Work, bars
from tests.helpers.harness import run_ranks

SIZES = GPTSizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
T5_SIZES = T5Sizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, enc_seq_length=16)
LLAMA_SIZES = LlamaSizes(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16, ff_hidden_size=40
)
YOUTU_SIZES = YoutuSizes(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16, ff_hidden_size=40,
    kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=6,
)  # fmt: skip
ALL_SIZES = pytest.mark.parametrize(
    "model_sizes", [SIZES, T5_SIZES, LLAMA_SIZES, YOUTU_SIZES], ids=lambda model_sizes: model_sizes.model
)
WORK = Work(sizes=SIZES, batch_size=2, steps=2, kind="cpu", dtype="fp32", threads=1)


def train_contenders(rank: int, model_sizes: Sizes, steps: int, names: list[str]) -> dict[str, list[float]]:
    """Train each contender on the same batch, over and over."""
    builders = contenders.CONTENDERS[model_sizes.model]
    assert set(builders) == set(step_time.NAMES[model_sizes.model])
    losses_by_name = {}
    for name in names:
        step = builders[name](model_sizes, WORK.batch_size, WORK.kind, WORK.dtype)
        losses_by_name[name] = [float(step(model_sizes.batch(WORK.batch_size, 0))) for _ in range(steps)]
    return losses_by_name


def check_equal_losses(model_sizes: Sizes, names: list[str]) -> None:
    losses_by_name = run_ranks(1, train_contenders, model_sizes, 6, names, init=False, deadline_s=400)[0]
    expected = losses_by_name["hf"]
    assert expected[-1] < expected[0] - 1e-3  # the weights have moved, clipped and decayed, in all of them
    for name in names:
        assert losses_by_name[name] == pytest.approx(expected, abs=2e-6), name


@pytest.mark.slow
@ALL_SIZES
def test_all_contenders_have_equal_losses(model_sizes: Sizes) -> None:
    check_equal_losses(
        model_sizes, [name for name in step_time.NAMES[model_sizes.model] if not name.endswith(("-compiled", "-fp8"))]
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
@ALL_SIZES
def test_compiled_contenders_have_equal_losses(model_sizes: Sizes) -> None:
    check_equal_losses(
        model_sizes, ["hf", *(name for name in step_time.NAMES[model_sizes.model] if name.endswith("-compiled"))]
    )


def test_mfu_and_speed_are_computed_from_turns() -> None:
    records = {
        "ours": Record(turns_s=[1.0, 4.0, 1.0], cpu_s=[2.0] * 3, losses=[1.0], peak_bytes=1),
        "plain": Record(turns_s=[1.5, 4.0, 1.5], cpu_s=[3.0] * 3, losses=[1.0], peak_bytes=1),
        PRODUCT: Record(turns_s=[PRODUCTS["cpu"][1] * 2048.0**3 * 2 / 1e9] * 3),
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
    rows = step_time.table(result).splitlines()
    assert any(row.startswith("ours ") for row in rows)
    assert any(row.startswith("met ") and "1.5, at least 1.05 speed of ours over plain" in row for row in rows)


def test_t5_flops_equal_formula() -> None:
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


def test_unequal_first_losses_raise() -> None:
    step_time.check_first_losses({"ours": 1.0, "hf": 1.00001}, 1e-4)
    for other in (1.001, float("nan")):
        with pytest.raises(RuntimeError, match="must agree within"):
            step_time.check_first_losses({"ours": 1.0, "hf": other}, 1e-4)


@pytest.mark.parametrize("model, names", [("gpt2", ["plain"]), ("t5", ["hf"])])
def test_contenders_alternate_in_separate_processes(tmp_path, monkeypatch, model: str, names: list[str]) -> None:
    monkeypatch.setitem(step_time.PRODUCTS, "cpu", (64, 2))
    lengths = {"gpt2": "--seq-length 8", "t5": "--enc-seq-length 16"}[model]
    model_flags = f"--model {model} --num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 256 {lengths}"
    run_flags = "--batch-size 1 --rounds 2 --steps 1 --threads 1 --device cpu"
    output_flags = f"--contenders {' '.join(names)} --json {tmp_path}/out.json"
    result = step_time.main(f"{model_flags} {run_flags} {output_flags}".split(), start_method="fork")
    assert (tmp_path / "out.json").exists()
    for name in names:
        row = result["contenders"][name]
        assert len(row["losses"]) == 3 and row["mfu"] > 0.0


def test_bars_apply_to_measured_contenders_only() -> None:
    ours = {"mfu": 0.73, "mfu_sheet": None, "peak_memory_bytes": 90}
    compiled = {"mfu": 0.79, "mfu_sheet": None, "peak_memory_bytes": 101}
    hf = {"speed_of_ours": {"ours": (1.0, 1.25, 2.0), "ours-compiled": (1.0, 1.39, 2.0)}, "peak_memory_bytes": 100}
    is_met_by_bar = {
        bar.name: bar.is_met for bar in bars("gpt2", "cpu", {"ours": ours, "ours-compiled": compiled, "hf": hf})
    }
    assert is_met_by_bar == {
        "MFU of ours": True,
        "MFU of ours-compiled": False,
        "speed of ours over hf": True,
        "speed of ours-compiled over hf": False,
        "peak memory of ours over hf's": True,
        "peak memory of ours-compiled over hf's": False,
    }
    t5 = {bar.name: (bar.is_met, bar.quartiles[1]) for bar in bars("t5", "cpu", {"ours": ours, "hf": hf})}
    assert t5 == {"speed of ours over hf": (False, 1.25), "peak memory of ours over hf's": (True, 0.9)}


@pytest.mark.parametrize(("family", "share"), [("gpt2", 0.5), ("t5", 0.42)])
def test_gpu_bar_uses_best_contender_and_data_sheet(family: str, share: float) -> None:
    def are_met(*shares: float | None) -> list[bool]:
        rows = {name: {"mfu_sheet": share} for name, share in zip(step_time.OURS, shares, strict=False)}
        assert not list(bars(family, "cuda", rows)), "of a model that is too small for it nothing is asked"
        return [bar.is_met for bar in bars(family, "cuda", rows, is_large=True)]

    assert are_met(share - 0.01, share) == [True]
    assert are_met(share - 0.01) == [False]
    assert are_met(None) == [], "of a GPU that is not known nothing is asked"


def test_large_size_has_1_3b_parameters_and_flags_override_it() -> None:
    from benchmarks.contenders import make_config
    from megatron.models import registry

    for family in step_time.MODELS:
        args = step_time.parse_args(["--model", family, "--size", "1.3b", "--device", "cpu"])
        assert args.contenders == step_time.OURS
        num_parameters = registry.costs_of(make_config(step_time.work_of(args).sizes)).num_parameters
        assert 1.25e9 < num_parameters < 1.35e9, family
    args = step_time.parse_args("--size 1.3b --num-layers 2 --batch-size 1".split())
    assert (args.num_layers, args.hidden_size, args.batch_size) == (2, 2048, 1)


def test_gpu_products_are_longer_than_launch_overhead() -> None:
    assert step_time.products_of("cpu") == (2048, 8)
    side, num_products = step_time.products_of("cuda")
    assert num_products * 2 * side**3 / 989e12 > 0.05, "seconds of a turn at best"


def test_strict_exits_with_code_1_on_missed_bar(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(step_time.PRODUCTS, "cpu", (64, 2))
    model_flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 256 --seq-length 8 --batch-size 1"
    )
    run_flags = "--rounds 1 --steps 1 --threads 1 --device cpu --contenders ours --strict --json"
    with pytest.raises(SystemExit) as end:
        step_time.main([*model_flags.split(), *run_flags.split(), str(tmp_path / "out.json")], start_method="fork")
    assert end.value.code == 1, "so small a model is far from 0.72"
    assert (tmp_path / "out.json").exists()


def test_missing_package_has_no_version() -> None:
    assert turns._version("no-such-package") is None
    assert turns._version("torch")
