"""A thousand single-bit flips anywhere in a checkpoint: the loader finds each of them (row K02)."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.checkpoint import open_checkpoint, open_latest, save, verify
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_equals_sample, make_records, save_on_one_rank, world_group
from tests.helpers.harness import run_ranks

NUM_FLIPS = 1000
FLIPS_PER_REGION = 30
SEGMENTS = (256, verify.SEGMENT_BYTES)  # bytes: a file in many of them, and in one
MANIFEST_LINES = ("checksum", "version, sequence, step", "state", "files", "index")


@dataclass(frozen=True)
class Region:
    """The bytes from ``start`` to ``stop`` of a file, which mean one thing to the loader."""

    path: Path
    name: str
    start: int
    stop: int

    @property
    def num_bits(self) -> int:
        return 8 * (self.stop - self.start)


def _save(rank: int, root: Path) -> str:
    return save(root, 20, make_records(rank, 2, 20), {"step": 20, "seed": 20}, world_group(rank, 2)).name


def _split_into_regions(path: Path) -> list[Region]:
    """Return the regions of one file, which together are all of it."""
    content = path.read_bytes()
    if path.name == "manifest.json":
        lines = content.split(b"\n", len(MANIFEST_LINES) - 1)
        lengths = {name: len(line) + 1 for name, line in zip(MANIFEST_LINES, lines, strict=True)}
        lengths["index"] -= 1  # what follows the last cut has no newline taken from it
    else:
        header = int.from_bytes(content[:8], "little")
        lengths = {"length of the header": 8, "header": header, "payload": len(content) - 8 - header}
    start, regions = 0, []
    for name, length in lengths.items():
        regions.append(Region(path, name, start, start + length))
        start += length
    assert start == len(content) and all(region.num_bits for region in regions)
    return regions


def _choose_flips(regions: list[Region]) -> list[tuple[Region, int, int]]:
    """Return (region, place, bit): some of each region, the others anywhere, every bit as likely as any."""
    rng = random.Random(7)
    chosen = [region for region in regions for _ in range(FLIPS_PER_REGION)]
    chosen += rng.choices(regions, [region.num_bits for region in regions], k=NUM_FLIPS - len(chosen))
    return [(region, rng.randrange(region.start, region.stop), rng.randrange(8)) for region in chosen]


class FlippedBit:
    """One bit of a file is the other way round, as long as the block lasts."""

    def __init__(self, path: Path, offset: int, bit: int) -> None:
        self._path, self._offset, self._mask = path, offset, 1 << bit

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR)
        (byte,) = os.pread(descriptor, 1, self._offset)
        os.pwrite(descriptor, bytes([byte ^ self._mask]), self._offset)
        os.close(descriptor)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks wrote, and an older one beside it."""
    root = tmp_path_factory.mktemp("flips")
    save_on_one_rank(root, 10)
    run_ranks(2, _save, root)
    return root / "step-00000020"


@pytest.fixture
def regions(saved: Path) -> list[Region]:
    """Every byte of the newer checkpoint."""
    return [region for path in sorted(saved.iterdir()) for region in _split_into_regions(path)]


def test_all_flipped_bits_are_detected(saved: Path, regions: list[Region], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(regions) == 2 * 3 + len(MANIFEST_LINES)
    flips = _choose_flips(regions)
    assert len(flips) == NUM_FLIPS and {region for region, _, _ in flips} == set(regions)
    missed = []
    for flip_idx, (region, offset, bit) in enumerate(flips):
        monkeypatch.setattr(verify, "SEGMENT_BYTES", SEGMENTS[flip_idx % 2])
        with FlippedBit(region.path, offset, bit):
            try:
                open_checkpoint(saved, SINGLE)
                missed.append((region.path.name, region.name, offset, bit))
            except CheckpointError as error:
                assert region.path.name in str(error) and "damaged" in str(error)
    assert not missed
    for segment_bytes in SEGMENTS:  # with every bit back in its place
        monkeypatch.setattr(verify, "SEGMENT_BYTES", segment_bytes)
        assert_equals_sample(open_checkpoint(saved, SINGLE), 20)


def test_flipped_bit_falls_back_to_older_checkpoint(
    saved: Path, regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr("megatron.log.warning", messages.append)
    for region in regions:
        with FlippedBit(region.path, region.start + (region.stop - region.start) // 2, 3):
            assert_equals_sample(open_latest(saved.parent, SINGLE), 10)
        assert any("falling back to step-00000010" in line for line in messages), region
        messages.clear()
