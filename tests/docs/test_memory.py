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
SIZE = r"[\d.]+ [KMG]iB"
PAGES = [DOCS / "memory.md", DOCS / "zh" / "memory.md"]

every_page = pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])


def command_of(page: Path) -> tuple[int, str]:
    """Return the ranks and the flags of the command in the head of the table of stages."""
    found = re.search(r"WORLD_SIZE=(\d+) python pretrain_gpt2\.py --dry-run ([^`]+)`", page.read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]), found[2]


def counted(page: Path, flags: str) -> list[str]:
    """Return what a rank of the only stage holds by the dry run's arithmetic: on its device, and on the CPU if any."""
    ranks, base = command_of(page)
    config = parse(shlex.split(f"{base} {flags}"), world_size=ranks, env={})
    [held] = stage_memory(config, Topology.of_world(ranks, 1, 1), registry.costs_of(config).stage_bounds(1, 1), "bf16")
    return [human_bytes(held.total)] + [human_bytes(held.host)] * (held.host > 0)


@every_page
def test_the_table_of_stages_is_what_a_dry_run_tells(page: Path) -> None:
    table = page.read_text(encoding="utf-8").split("WORLD_SIZE=")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 5
    for stage, sizes in rows:
        assert re.findall(SIZE, sizes) == counted(page, "--zero-stage " + stage.replace("`", "")), stage


@every_page
def test_the_example_of_the_loss_in_chunks_is_what_a_dry_run_tells(page: Path) -> None:
    line = next(line for line in page.read_text(encoding="utf-8").splitlines() if "--zero-stage 3 --checkpoint" in line)
    [flags] = re.findall(r"`(--zero-stage 3 --checkpoint[^`]+)`", line)
    variants = (flags, f"{flags} --loss-chunk-tokens 0", "--zero-stage 3", "--zero-stage 3 --loss-chunk-tokens 256")
    assert re.findall(SIZE, line) == [size for words in variants for size in counted(page, words)]
