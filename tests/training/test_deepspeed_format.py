"""Checkpoints in DeepSpeed's own files: a resumed run is the same, a kill leaves one whole, DeepSpeed reads them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from tds.deepspeed.safe_load import load_safely
from tests.helpers.runs import flags, start_script, together, train_ranks
from tests.training.test_resume import draw_numbers, kill_after, losses

SHORT = "--train-iters 6 --hidden-dropout 0.1 --eval-iters 0 --device cpu"
FORMAT = "--checkpoint-format deepspeed"


def flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every plain value and tensor in ``value`` by its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{place}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{place}/{number}")
    else:
        yield place, value


def content(tag: Path) -> dict[str, Any]:
    """Return everything that DeepSpeed's files in ``tag`` hold, but what names the run's own folder and job."""
    found = {}
    for path in sorted(tag.glob("*.pt")):
        for place, value in flat(load_safely(str(path))):
            if "/config/" not in place:
                found[f"{path.name}{place}"] = value
    return found


def assert_same(one: Path, other: Path) -> None:
    a, b = content(one), content(other)
    assert a.keys() == b.keys()
    for place, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[place]), place
        else:
            assert value == b[place], place


def tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "global_step" in path.name)


@pytest.mark.parametrize(
    ("tensor", "pipe", "world_size", "more"),
    [
        (1, 1, 2, "--bf16"),
        pytest.param(2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(1, 2, 4, "--bf16 --pipeline-chunks 1", marks=pytest.mark.slow),
        pytest.param(2, 1, 4, "--optimizer sgd --sgd-momentum 0.9", marks=pytest.mark.slow),
    ],
    ids=["1-1-2 bf16", "2-2-4", "1-2-4 bf16", "2-1-4 sgd"],
)
def test_a_killed_and_resumed_run_is_bit_for_bit_the_same(
    tensor: int, pipe: int, world_size: int, more: str, corpus: Path, tmp_path: Path
) -> None:
    """Row A01."""
    layout = f"{SHORT} --model-parallel-size {tensor} --pipe-parallel-size {pipe} {more}"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saving = f"{layout} {FORMAT} --save-interval 3 --keep-last 1"
    assert train_ranks(world_size, flags(corpus, whole, f"{layout} {FORMAT}"), draw_numbers)[0] == [0] * world_size
    codes, _ = train_ranks(world_size, flags(corpus, cut, saving), together(draw_numbers, kill_after(5)))
    assert -signal.SIGKILL in codes
    assert (tags(cut), (cut / "latest").read_text()) == (["global_step3"], "global_step3")
    again = flags(corpus, cut, f"{layout} --save-interval 3 --keep-last 1 --load {cut}")  # the folder says the format
    assert train_ranks(world_size, again, draw_numbers)[0] == [0] * world_size
    assert losses(cut) == losses(whole) and len(losses(cut)) == 6
    assert tags(cut) == ["global_step3", "global_step6"], "the one loaded is never deleted"
    assert_same(cut / "global_step6", whole / "global_step6")
    states = [value for place, value in content(cut / "global_step6").items() if "/rng/" in place]
    assert len({bytes(state.tolist()) for state in states}) == len(states) == world_size
    names = {path.name for path in (cut / "global_step6").iterdir()}
    wanted = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(tensor * pipe)} | {"manifest.json"}
    assert wanted <= names and any(name.startswith("layer_0") for name in names) == (pipe > 1)


@pytest.mark.slow
def test_weights_load_on_another_number_of_stages(corpus: Path, tmp_path: Path) -> None:
    """Row K15 in this format; the optimizer's states are refused, and so is a tensor size that was not saved."""
    first, second, log = tmp_path / "two", tmp_path / "three", tmp_path / "log"
    size = f"{SHORT} --train-iters 1 --num-layers 3"
    assert train_ranks(2, flags(corpus, first, f"{size} {FORMAT} --pipe-parallel-size 2"))[0] == [0, 0]
    moved = flags(corpus, second, f"{size} {FORMAT} --pipe-parallel-size 3 --load {first}")
    assert start_script(3, moved, log) == [3, 3, 3]
    assert "saved tp1 pp2 dp1, now tp1 pp3 dp1" in log.read_text() and "--checkpoint-format native" in log.read_text()
    assert train_ranks(3, [*moved, "--load-weights-only"])[0] == [0, 0, 0]
    one, other = content(first / "global_step1"), content(second / "global_step1")
    layers = [place for place in one if place.startswith("layer_")]
    assert len(layers) > 30 and all(torch.equal(one[place], other[place]) for place in layers)
