"""The scaling study: its layouts, efficiencies and terms are right, and it writes no more than its sections."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import TERMS, Prediction, fastest_layout, predict
from megatron.planner.machine import Link, gpu_machine
from tds.schedule.simulate import bubble

SMALL_FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 1024 --seq-length 512 "
    "--max-position-embeddings 512 --batch-size 1 --gas 1 --attention-dropout 0 --hidden-dropout 0 --data-path none"
)


@pytest.fixture(scope="module")
def all_predictions() -> list[Prediction]:
    return predict(gpu_machine("h100-80g"), device_counts=(8, 64, 1024), flags=f"{SMALL_FLAGS} --bf16")


def make_prediction(**overrides: object) -> Prediction:
    layout = {"num_stages": 2, "num_replicas": 4, "tensor": 1, "schedule": "1f1b", "num_micro_batches": 4}
    times = {"seconds": dict.fromkeys(TERMS, 1.0), "planner_s": 6.0, "tokens": 60}
    fields = {"series": "weak", "fits": True, "mfu": 0.5} | layout | times | overrides
    return Prediction(**fields)  # type: ignore[arg-type]


def test_predictions_have_expected_devices_and_micro_batches(all_predictions: list[Prediction]) -> None:
    assert {point.num_devices for point in all_predictions} == {8, 64, 1024} and {
        point.num_stages for point in all_predictions
    } == {1, 2, 4, 8}
    for point in all_predictions:
        samples = point.num_micro_batches * point.num_replicas
        assert samples == scaling.STRONG_SAMPLES if point.series == "strong" else point.num_micro_batches == 64
    assert len({(point.series, point.num_devices, point.num_stages) for point in all_predictions}) == len(
        all_predictions
    )


def test_simulated_bubble_without_messages_equals_formula(all_predictions: list[Prediction]) -> None:
    """Of 1f1b with the costs of the virtual stages; the mean virtual stage over the step is what computes."""
    for point in all_predictions:
        if point.num_stages == 1:
            assert point.seconds["bubble"] == pytest.approx(0.0, abs=1e-12) and point.seconds["messages"] == 0.0
        assert point.planner_s == pytest.approx(point.step_s, rel=0.05)
    chunk_costs = ((1.0, 1.0, 1.0),) * 4
    step_s = scaling._simulate_step(chunk_costs, "1f1b", 12, 0.0)
    assert 1 - 12 * 3.0 / step_s == pytest.approx(bubble(4, 12))
    assert (
        scaling._simulate_step(chunk_costs, "zb-h1", 12, 0.0)
        < step_s
        < scaling._simulate_step(chunk_costs, "1f1b", 12, 0.5)
    )


def test_slow_links_add_message_time_and_keep_bubble(all_predictions: list[Prediction]) -> None:
    link = Link.uniform(bandwidth=1e9, latency_s=1e-3)
    slow = predict(
        replace(gpu_machine("h100-80g"), intra=link, inter=link), device_counts=(64,), flags=f"{SMALL_FLAGS} --bf16"
    )
    fast = [point for point in all_predictions if point.num_devices == 64]
    for point, other in zip(slow, fast, strict=True):
        assert point.seconds["bubble"] == pytest.approx(other.seconds["bubble"])
        assert point.num_stages == 1 or point.seconds["messages"] > 5 * other.seconds["messages"] > 0


def test_terms_sum_to_step_time(all_predictions: list[Prediction]) -> None:
    for point in all_predictions:
        assert min(point.seconds.values()) >= -1e-9 and set(point.seconds) == set(TERMS)
        assert sum(point.share(term) for term in TERMS) == pytest.approx(1.0)
    assert (
        make_prediction().step_s == 6.0
        and make_prediction().tokens_per_s == 10.0
        and make_prediction().num_devices == 8
    )


def test_bubble_grows_in_strong_scaling_only(all_predictions: list[Prediction]) -> None:
    shares = {
        series: [point.share("bubble") for point in all_predictions if point.series == series and point.num_stages == 4]
        for series in ("strong", "weak")
    }
    assert shares["strong"] == sorted(shares["strong"]) and shares["strong"][-1] > 3 * shares["strong"][0]
    assert max(shares["weak"]) - min(shares["weak"]) < 0.02


def test_tensor_ranks_add_all_reduce_time(all_predictions: list[Prediction]) -> None:
    tensor_predictions = predict(gpu_machine("h100-80g"), tensor=2, device_counts=(8,), flags=f"{SMALL_FLAGS} --bf16")
    assert {point.num_devices for point in tensor_predictions} == {8} and {
        point.num_stages for point in tensor_predictions
    } == {1, 2, 4}
    assert all(point.seconds["tensor"] > 0 for point in tensor_predictions) and not any(
        point.seconds["tensor"] for point in all_predictions
    )


def test_best_selects_fastest_fitting_prediction() -> None:
    slow = make_prediction(seconds=dict.fromkeys(TERMS, 2.0))
    large = make_prediction(fits=False, tokens=600)
    other = make_prediction(series="strong", tokens=600)
    assert fastest_layout([slow, make_prediction(), large, other], "weak", 8) == make_prediction()
    assert fastest_layout([large], "weak", 8) is None and "none fits" in scaling.table([large])


def test_section_is_replaced_between_its_markers() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- y: begin --><!-- y: end -->\n"
    new = scaling.replace_section(text, "x", "new\n")
    assert new == text.replace("\nold\n", "\n\nnew\n\n") and scaling.replace_section(new, "x", "new") == new
    for invalid_text in ("", text * 2, "<!-- x: end --><!-- x: begin -->"):
        with pytest.raises(ValueError, match="x: begin"):
            scaling.replace_section(invalid_text, "x", "new")


def test_prediction_is_written_to_copy_of_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_predictions = functools.partial(predict, device_counts=(8,), flags=f"{SMALL_FLAGS} --bf16")
    monkeypatch.setattr(scaling, "predict", few_predictions)
    before = scaling.PAGE.read_text(encoding="utf-8")
    scaling.main(["--gpu", "a100-80g", "--schedule", "zb-h1", "--out", str(tmp_path)])
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "a100-80g, zb-h1, tensor 1" in text and "| weak | 8 |" in text
    assert scaling.PAGE.read_text(encoding="utf-8") == before


def test_tensor_flag_rejects_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["--tensor", "0"])
    assert "--tensor must be at least 1, got 0" in capsys.readouterr().err
