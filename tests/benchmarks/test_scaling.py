"""The scaling study: its layouts, efficiencies and terms are right, and it writes no more than its sections."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import TERMS, Prediction, best, predictions
from megatron.planner.machine import Link, device
from tds.schedule.simulate import bubble

SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 1024 --seq-length 512 "
    "--max-position-embeddings 512 --batch-size 1 --gas 1 --attention-dropout 0 --hidden-dropout 0 --data-path none"
)


@pytest.fixture(scope="module")
def found() -> list[Prediction]:
    return predictions(device("h100-80g"), devices=(8, 64, 1024), flags=f"{SMALL} --bf16")


def prediction(**others: object) -> Prediction:
    layout = {"stages": 2, "replicas": 4, "tensor": 1, "schedule": "1f1b", "micro_batches": 4}
    times = {"seconds": dict.fromkeys(TERMS, 1.0), "closed_s": 6.0, "tokens": 60}
    given = {"series": "weak", "fits": True, "mfu": 0.5} | layout | times | others
    return Prediction(**given)  # type: ignore[arg-type]


def test_every_layout_has_its_devices_and_both_series_their_micro_batches(found: list[Prediction]) -> None:
    assert {one.devices for one in found} == {8, 64, 1024} and {one.stages for one in found} == {1, 2, 4, 8}
    for one in found:
        samples = one.micro_batches * one.replicas
        assert samples == scaling.STRONG_SAMPLES if one.series == "strong" else one.micro_batches == 64
    assert len({(one.series, one.devices, one.stages) for one in found}) == len(found)


def test_without_messages_the_simulated_bubble_is_the_closed_form(found: list[Prediction]) -> None:
    """Of 1f1b with the pieces' own costs; the mean piece over the step is what computes."""
    for one in found:
        if one.stages == 1:
            assert one.seconds["bubble"] == pytest.approx(0.0, abs=1e-12) and one.seconds["messages"] == 0.0
        assert one.closed_s == pytest.approx(one.step_s, rel=0.05)
    pieces = ((1.0, 1.0, 1.0),) * 4
    step_s = scaling._simulated(pieces, "1f1b", 12, 0.0)
    assert 1 - 12 * 3.0 / step_s == pytest.approx(bubble(4, 12))
    assert scaling._simulated(pieces, "zb-h1", 12, 0.0) < step_s < scaling._simulated(pieces, "1f1b", 12, 0.5)


def test_slow_links_add_messages_and_leave_the_bubble(found: list[Prediction]) -> None:
    link = Link.of(bandwidth=1e9, latency_s=1e-3)
    slow = predictions(replace(device("h100-80g"), intra=link, inter=link), devices=(64,), flags=f"{SMALL} --bf16")
    fast = [one for one in found if one.devices == 64]
    for one, other in zip(slow, fast, strict=True):
        assert one.seconds["bubble"] == pytest.approx(other.seconds["bubble"])
        assert one.stages == 1 or one.seconds["messages"] > 5 * other.seconds["messages"] > 0


def test_the_terms_make_up_the_step_and_shares_their_parts(found: list[Prediction]) -> None:
    for one in found:
        assert min(one.seconds.values()) >= -1e-9 and set(one.seconds) == set(TERMS)
        assert sum(one.share(term) for term in TERMS) == pytest.approx(1.0)
    assert prediction().step_s == 6.0 and prediction().tokens_per_s == 10.0 and prediction().devices == 8


def test_strong_scaling_loses_to_the_bubble_and_weak_scaling_does_not(found: list[Prediction]) -> None:
    shares = {
        series: [one.share("bubble") for one in found if one.series == series and one.stages == 4]
        for series in ("strong", "weak")
    }
    assert shares["strong"] == sorted(shares["strong"]) and shares["strong"][-1] > 3 * shares["strong"][0]
    assert max(shares["weak"]) - min(shares["weak"]) < 0.02


def test_tensor_ranks_add_their_sums_and_take_their_devices(found: list[Prediction]) -> None:
    some = predictions(device("h100-80g"), tensor=2, devices=(8,), flags=f"{SMALL} --bf16")
    assert {one.devices for one in some} == {8} and {one.stages for one in some} == {1, 2, 4}
    assert all(one.seconds["tensor"] > 0 for one in some) and not any(one.seconds["tensor"] for one in found)


def test_the_fastest_that_fits_stands_for_a_number_of_devices() -> None:
    slow = prediction(seconds=dict.fromkeys(TERMS, 2.0))
    large = prediction(fits=False, tokens=600)
    other = prediction(series="strong", tokens=600)
    assert best([slow, prediction(), large, other], "weak", 8) == prediction()
    assert best([large], "weak", 8) is None and "none fits" in scaling.table([large])


def test_a_section_is_replaced_between_its_marks_alone() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- y: begin --><!-- y: end -->\n"
    new = scaling.replaced(text, "x", "new\n")
    assert new == text.replace("\nold\n", "\n\nnew\n\n") and scaling.replaced(new, "x", "new") == new
    for wrong in ("", text * 2, "<!-- x: end --><!-- x: begin -->"):
        with pytest.raises(ValueError, match="x: begin"):
            scaling.replaced(wrong, "x", "new")


def test_the_prediction_is_written_into_a_copy_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(predictions, devices=(8,), flags=f"{SMALL} --bf16")
    monkeypatch.setattr(scaling, "predictions", few)
    before = scaling.PAGE.read_text(encoding="utf-8")
    scaling.main(["--gpu", "a100-80g", "--schedule", "zb-h1", "--out", str(tmp_path)])
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "a100-80g, zb-h1, tensor 1" in text and "| weak | 8 |" in text
    assert scaling.PAGE.read_text(encoding="utf-8") == before


def test_a_tensor_size_below_1_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.main(["--tensor", "0"])
    assert "--tensor must be at least 1, got 0" in capsys.readouterr().err
