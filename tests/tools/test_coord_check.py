"""tools/coord_check.py, the coordinate check: by muP activations stay level over widths, and without it they rise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import coord_check
from tools.coord_check import CURVES, WIDTHS, Magnitudes

MAX_LEVEL_RATIO, MIN_GROWTH_RATIO = 1.4, 3.0


def size_ratios(by_width: dict[int, Magnitudes], component: str, first_step: int = 0) -> list[float]:
    """Return how large a part is in each width beside the narrowest, in each step from number ``first_step`` on."""
    narrow, *wider = (component_sizes[component][first_step:] for component_sizes in by_width.values())
    return [size / base for component_sizes in wider for size, base in zip(component_sizes, narrow, strict=True)]


@pytest.mark.parametrize(
    "extra",
    [
        "--activation gated-silu --position-embedding-type rope --normalization RMSNorm",
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in ("", "--untie-embeddings-and-output-weights", "--position-embedding-type alibi")
        ),
    ],
)
@pytest.mark.parametrize("heads", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_mup_keeps_activation_size_constant_over_widths(extra: str, heads: int) -> None:
    tool_flags = ["--steps", "3", "--lr", "0.005", "--heads", str(heads)]
    args, model_flags = coord_check.make_parser().parse_known_args([*tool_flags, *extra.split()])
    assert args.widths == list(WIDTHS)
    with_mup = coord_check.train_widths(args, model_flags, has_mup=True)
    for component in list(CURVES)[:-1]:
        part_ratios = size_ratios(with_mup, component)
        assert min(part_ratios) >= 1 / MAX_LEVEL_RATIO and max(part_ratios) <= MAX_LEVEL_RATIO, (component, part_ratios)
    part_ratios = size_ratios(
        with_mup, "logits", first_step=1
    )  # ahead of the first update they fall as 1 / sqrt(m), towards 0
    assert min(part_ratios) >= 0.4 and max(part_ratios) <= 1.2, part_ratios
    args.widths = [WIDTHS[0], WIDTHS[-1]]
    without_mup = coord_check.train_widths(args, model_flags, has_mup=False)
    assert all(
        size_ratios(without_mup, component)[-1] >= MIN_GROWTH_RATIO for component in ("attention", "feed-forward")
    )
    assert size_ratios(without_mup, "logits")[-1] > 1.2


@pytest.mark.slow
def test_plot_is_drawn_and_growth_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "coord.svg"
    assert coord_check.main(["--widths", "16", "32", "--steps", "1", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("without muP: growth from width 16 to 32: attention ")
    assert lines[1].startswith("with muP: ")
    assert "<svg" in out.read_text() and lines[2] == f"plot written to {out}"


def test_invalid_flags_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coord_check.main(["--num-query-groups", "3", "--widths", "64"])
    assert "--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3" in capsys.readouterr().err
