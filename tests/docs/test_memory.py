"""docs/memory.md: what its table and its example of the loss in chunks tell is what a dry run counts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.log import human_bytes
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.training.estimates import stage_memory

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZE_PATTERN = r"[\d.]+ [KMG]iB"
PAGES = [DOCS / "memory.md", DOCS / "zh" / "memory.md"]

every_page = pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])


def read_command(page: Path) -> tuple[int, str]:
    """Return the ranks and the flags of the command in the head of the table of stages."""
    match = re.search(r"WORLD_SIZE=(\d+) python pretrain_gpt2\.py --dry-run ([^`]+)`", page.read_text(encoding="utf-8"))
    assert match is not None
    return int(match[1]), match[2]


def count_memory(page: Path, flags: str) -> list[str]:
    """Return what a rank of the only stage holds by the dry run's arithmetic: on its device, and on the CPU if any."""
    ranks, base = read_command(page)
    config = parse(shlex.split(f"{base} {flags}"), world_size=ranks, env={})
    [memory] = stage_memory(
        config, Topology.from_world_size(ranks, 1, 1), registry.costs_of(config).stage_bounds(1, 1), "bf16"
    )
    return [human_bytes(memory.total)] + [human_bytes(memory.host)] * (memory.host > 0)


@every_page
def test_zero_stage_table_equals_dry_run(page: Path) -> None:
    table = page.read_text(encoding="utf-8").split("WORLD_SIZE=")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 5
    for stage, documented in rows:
        assert re.findall(SIZE_PATTERN, documented) == count_memory(page, "--zero-stage " + stage.replace("`", "")), (
            stage
        )


@every_page
def test_chunked_loss_example_equals_dry_run(page: Path) -> None:
    line = next(line for line in page.read_text(encoding="utf-8").splitlines() if "--zero-stage 3 --checkpoint" in line)
    [flags] = re.findall(r"`(--zero-stage 3 --checkpoint[^`]+)`", line)
    variants = (flags, f"{flags} --loss-chunk-tokens 0", "--zero-stage 3", "--zero-stage 3 --loss-chunk-tokens 256")
    assert re.findall(SIZE_PATTERN, line) == [size for variant in variants for size in count_memory(page, variant)]
