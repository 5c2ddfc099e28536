"""tools/coord_check.py, the coordinate check: by muP activations stay level over widths, and without it they rise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import coord_check
from tools.coord_check import PARTS, WIDTHS, Sizes

LEVEL, RISEN = 1.4, 3.0


def ratios(by_width: dict[int, Sizes], part: str, first: int = 0) -> list[float]:
    """Return how large a part is in each width beside the narrowest, in each step from number ``first`` on."""
    narrow, *others = (sizes[part][first:] for sizes in by_width.values())
    return [size / base for sizes in others for size, base in zip(sizes, narrow, strict=True)]


@pytest.mark.parametrize(
    "extra",
    [
        "--activation gated-silu --position-embedding-type rope --normalization RMSNorm",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("", "--untie-embeddings-and-output-weights", "--position-embedding-type alibi")
        ),
    ],
)
@pytest.mark.parametrize("heads", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_activations_stay_level_over_widths_by_mup_alone(extra: str, heads: int) -> None:
    words = ["--steps", "3", "--lr", "0.005", "--heads", str(heads)]
    flags, rest = coord_check.make_parser().parse_known_args([*words, *extra.split()])
    assert flags.widths == list(WIDTHS)
    level = coord_check.check(flags, rest, has_mup=True)
    for part in list(PARTS)[:-1]:
        found = ratios(level, part)
        assert min(found) >= 1 / LEVEL and max(found) <= LEVEL, (part, found)
    found = ratios(level, "logits", first=1)  # ahead of the first update they fall as 1 / sqrt(m), towards 0
    assert min(found) >= 0.4 and max(found) <= 1.2, found
    flags.widths = [WIDTHS[0], WIDTHS[-1]]
    risen = coord_check.check(flags, rest, has_mup=False)
    assert all(ratios(risen, part)[-1] >= RISEN for part in ("attention", "feed-forward"))
    assert ratios(risen, "logits")[-1] > 1.2


@pytest.mark.slow
def test_the_picture_is_drawn_and_rises_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "coord.svg"
    assert coord_check.main(["--widths", "16", "32", "--steps", "1", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("without muP: growth from width 16 to 32: attention ")
    assert lines[1].startswith("with muP: ")
    assert "<svg" in out.read_text() and lines[2] == f"plot written to {out}"


def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coord_check.main(["--num-query-groups", "3", "--widths", "64"])
    assert "--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3" in capsys.readouterr().err
