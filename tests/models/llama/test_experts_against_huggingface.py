"""Mixtral, Qwen 2 and 3 MoE and GLM 4 MoE with Hugging Face's weights: logits, loss, every gradient; folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import format_of
from megatron.config import Config, parse
from megatron.models.llama.huggingface import FORMATS
from tests.helpers.decoder_against_huggingface import Against
from tests.helpers.expert_models import EXPERTS, in_its_own_dtype, in_memory, on_disk, their_model
from tests.helpers.modern_decoders import FLAGS, LENGTH
from tests.tools.test_convert_hf import Run, convert, same, tensors_in

__all__ = ["convert"]  # the fixture

ALONE = (1e-12, 1e-13, 1e-12, None)
"""(logits, loss, gradients, weights) of one process."""


def make_reference(kind: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    return their_model(kind), EXPERTS[kind].our_config()


class OnDisk(Against):
    """The same where their gradients are compared as their files have them."""

    def reference(self, kind: str) -> tuple[Any, ...]:
        config, before, logits, loss, gradients, after = Against.reference(self, kind)
        return config, before, logits, loss, on_disk(gradients, kind), on_disk(after, kind)


def case(kind: str, allowed: tuple[float | None, ...] = ALONE) -> OnDisk:
    (form,) = (each for each in FORMATS if kind in each.model_types)
    return OnDisk(in_memory(form, kind), {kind: "fp64"}, make_reference, in_its_own_dtype, {"fp64": allowed})


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_same_weights_give_the_same_logits_loss_and_gradients(kind: str) -> None:
    case(kind).check(kind, 1)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "glm4_moe" else pytest.mark.slow) for k in EXPERTS])
def test_two_tensor_ranks_give_the_same_logits_loss_and_gradients(kind: str) -> None:
    case(kind, (1e-12, 1e-12, 1e-11, None)).check(kind, 2)


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_flags_of_each_are_its_settings(kind: str) -> None:
    config = EXPERTS[kind].our_config()
    words = f"{FLAGS} {EXPERTS[kind].flags} --seq-length {LENGTH} --data-path none --device cpu".split()
    parsed = parse(words, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    assert format_of(config).model_types == (kind,)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("mixtral", "qwen3_moe") else pytest.mark.slow) for k in EXPERTS]
)
def test_folders_go_there_and_back_bit_for_bit(kind: str, convert: Run, tmp_path: Path) -> None:
    their_model(kind, torch.float32).save_pretrained(tmp_path / "theirs")
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")[0] == 0
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert same(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "theirs"))
