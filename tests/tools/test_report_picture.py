"""What one sees of the page of ``tools/report.py``: Chromium takes a picture of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.tools.made_runs import make_run
from tests.tools.test_report import CHROMIUM, CHROMIUM_FLAGS, needs_chromium
from tools.report import render_page
from tools.report_parts.runs import read_run


def take_screenshot(html: Path, anchor: str = "") -> NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of the page as Chromium shows it."""
    assert CHROMIUM is not None
    path = html.with_suffix(".png")
    command = [CHROMIUM, *CHROMIUM_FLAGS, f"--screenshot={path}", f"--user-data-dir={html.parent / 'browser'}"]
    subprocess.run([*command, f"{html.as_uri()}{anchor}"], check=True, capture_output=True, timeout=60)
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


def background_share(pixels: NDArray[np.uint8], num_colors: int) -> float:
    """Return the share of the pixels that have one of the most frequent colours."""
    _, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    return float(np.sort(counts)[-num_colors:].sum() / counts.sum())


def count_blue_pixels(pixels: NDArray[np.uint8]) -> int:
    """Return how many pixels are of the first run's colour, or of one between it and the background."""
    red_of, blue_of = (pixels[..., channel].astype(int) for channel in (0, 2))
    return int((blue_of - red_of > 80).sum())


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("anchor", "brightness"), [("#light", range(200, 256)), ("#dark", range(80))])
def test_screenshot_shows_text_tables_and_curves(tmp_path: Path, anchor: str, brightness: range) -> None:
    """In both themes: the background, and on it text, tables and curves."""
    run = read_run(make_run(tmp_path / "run"), "run")
    (tmp_path / "page.html").write_text(render_page([run], "Runs"))
    pixels = take_screenshot(tmp_path / "page.html", anchor)
    assert pixels.shape == (2400, 1400, 3)
    assert int(np.median(pixels)) in brightness
    assert background_share(pixels, 2) < 0.97  # of the page and of its cards; 0.956, and 0.986 where no script draws
    assert count_blue_pixels(pixels) > 10_000  # 14,420; 4,626 without the curves of the twelve charts
    (tmp_path / "page.html").write_text("<html><body></body></html>")
    assert background_share(take_screenshot(tmp_path / "page.html"), 1) == 1.0
