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
from tests.helpers.runs import combine_injectors, launch_script, make_flags, train_ranks
from tests.training.test_resume import draw_random_numbers, make_kill_injector, read_losses

SHORT = "--train-iters 6 --hidden-dropout 0.1 --eval-iters 0 --device cpu"
FORMAT = "--checkpoint-format deepspeed"


def flatten(value: Any, key_path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every plain value and tensor in ``value`` by its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{key_path}/{key}")
    elif isinstance(value, (list, tuple)):
        for idx, inner in enumerate(value):
            yield from flatten(inner, f"{key_path}/{idx}")
    else:
        yield key_path, value


def read_tag(tag: Path) -> dict[str, Any]:
    """Return everything that DeepSpeed's files in ``tag`` hold, but what names the run's own folder and job."""
    values = {}
    for path in sorted(tag.glob("*.pt")):
        for key_path, value in flatten(load_safely(str(path))):
            if "/config/" not in key_path:
                values[f"{path.name}{key_path}"] = value
    return values


def assert_tags_equal(left: Path, right: Path) -> None:
    left_values, right_values = read_tag(left), read_tag(right)
    assert left_values.keys() == right_values.keys()
    for key_path, value in left_values.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right_values[key_path]), key_path
        else:
            assert value == right_values[key_path], key_path


def list_tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "global_step" in path.name)


@pytest.mark.parametrize(
    ("tensor", "pipe", "world_size", "extra_args"),
    [
        (1, 1, 2, "--bf16"),
        pytest.param(2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(1, 2, 4, "--bf16 --pipeline-chunks 1", marks=pytest.mark.slow),
        pytest.param(2, 1, 4, "--optimizer sgd --sgd-momentum 0.9", marks=pytest.mark.slow),
    ],
    ids=["1-1-2 bf16", "2-2-4", "1-2-4 bf16", "2-1-4 sgd"],
)
def test_killed_and_resumed_run_is_bitwise_equal(
    tensor: int, pipe: int, world_size: int, extra_args: str, corpus: Path, tmp_path: Path
) -> None:
    """Row A01."""
    layout = f"{SHORT} --model-parallel-size {tensor} --pipe-parallel-size {pipe} {extra_args}"
    reference_dir, resumed_dir = tmp_path / "whole", tmp_path / "cut"
    saving_args = f"{layout} {FORMAT} --save-interval 3 --keep-last 1"
    assert (
        train_ranks(world_size, make_flags(corpus, reference_dir, f"{layout} {FORMAT}"), draw_random_numbers)[0]
        == [0] * world_size
    )
    codes, _ = train_ranks(
        world_size,
        make_flags(corpus, resumed_dir, saving_args),
        combine_injectors(draw_random_numbers, make_kill_injector(5)),
    )
    assert -signal.SIGKILL in codes
    assert (list_tags(resumed_dir), (resumed_dir / "latest").read_text()) == (["global_step3"], "global_step3")
    resume_argv = make_flags(
        corpus, resumed_dir, f"{layout} --save-interval 3 --keep-last 1 --load {resumed_dir}"
    )  # the folder says the format
    assert train_ranks(world_size, resume_argv, draw_random_numbers)[0] == [0] * world_size
    assert read_losses(resumed_dir) == read_losses(reference_dir) and len(read_losses(resumed_dir)) == 6
    assert list_tags(resumed_dir) == ["global_step3", "global_step6"], "the one loaded is never deleted"
    assert_tags_equal(resumed_dir / "global_step6", reference_dir / "global_step6")
    states = [value for key_path, value in read_tag(resumed_dir / "global_step6").items() if "/rng/" in key_path]
    assert len({bytes(state.tolist()) for state in states}) == len(states) == world_size
    names = {path.name for path in (resumed_dir / "global_step6").iterdir()}
    expected = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(tensor * pipe)} | {"manifest.json"}
    assert expected <= names and any(name.startswith("layer_0") for name in names) == (pipe > 1)


@pytest.mark.slow
def test_weights_load_with_different_number_of_stages(corpus: Path, tmp_path: Path) -> None:
    """Row K15 in this format; the optimizer's states are refused, and so is a tensor size that was not saved."""
    saved_dir, loaded_dir, log = tmp_path / "two", tmp_path / "three", tmp_path / "log"
    size_args = f"{SHORT} --train-iters 1 --num-layers 3"
    assert train_ranks(2, make_flags(corpus, saved_dir, f"{size_args} {FORMAT} --pipe-parallel-size 2"))[0] == [0, 0]
    reshard_argv = make_flags(corpus, loaded_dir, f"{size_args} {FORMAT} --pipe-parallel-size 3 --load {saved_dir}")
    assert launch_script(3, reshard_argv, log) == [3, 3, 3]
    assert "saved tp1 pp2 dp1, now tp1 pp3 dp1" in log.read_text() and "--checkpoint-format native" in log.read_text()
    assert train_ranks(3, [*reshard_argv, "--load-weights-only"])[0] == [0, 0, 0]
    saved, loaded = read_tag(saved_dir / "global_step1"), read_tag(loaded_dir / "global_step1")
    layers = [key_path for key_path in saved if key_path.startswith("layer_")]
    assert len(layers) > 30 and all(torch.equal(saved[key_path], loaded[key_path]) for key_path in layers)
