"""Mixtral, Qwen 2 and 3 MoE and GLM 4 MoE with Hugging Face's weights: logits, loss, every gradient; folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, format_of
from megatron.config import Config, parse
from megatron.models.llama.huggingface import FORMATS
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.expert_models import (
    MOE_CASES,
    accept_model_tensors,
    disable_upcasts,
    make_huggingface_model,
    to_file_tensors,
)
from tests.helpers.modern_decoders import FLAGS, SEQ_LENGTH
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

SINGLE_PROCESS_TOLERANCES = (1e-12, 1e-13, 1e-12, None)
"""(logits, loss, gradients, weights) of one process."""


def make_reference(model_type: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    return make_huggingface_model(model_type), MOE_CASES[model_type].our_config()


class OnDisk(HuggingFaceComparison):
    """The same where their gradients are compared as their files have them."""

    def run_huggingface(self, case: str) -> tuple[Any, ...]:
        config, before, logits, loss, gradients, after = HuggingFaceComparison.run_huggingface(self, case)
        return config, before, logits, loss, to_file_tensors(gradients, case), to_file_tensors(after, case)


def make_comparison(model_type: str, allowed: tuple[float | None, ...] = SINGLE_PROCESS_TOLERANCES) -> OnDisk:
    (hf_format,) = (candidate for candidate in FORMATS if model_type in candidate.model_types)
    return OnDisk(
        accept_model_tensors(hf_format, model_type),
        {model_type: "fp64"},
        make_reference,
        disable_upcasts,
        {"fp64": allowed},
    )


@pytest.mark.parametrize("model_type", MOE_CASES)
def test_logits_loss_and_gradients_match_hugging_face(model_type: str) -> None:
    make_comparison(model_type).check(model_type, 1)


@pytest.mark.parametrize(
    "model_type", [pytest.param(k, marks=() if k == "glm4_moe" else pytest.mark.slow) for k in MOE_CASES]
)
def test_two_tensor_ranks_match_hugging_face(model_type: str) -> None:
    make_comparison(model_type, (1e-12, 1e-12, 1e-11, None)).check(model_type, 2)


@pytest.mark.parametrize("model_type", MOE_CASES)
def test_flags_match_hugging_face_settings(model_type: str) -> None:
    config = MOE_CASES[model_type].our_config()
    flags = f"{FLAGS} {MOE_CASES[model_type].flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu".split()
    parsed = parse(flags, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    assert format_of(config).model_types == (model_type,)


@pytest.mark.parametrize(
    "model_type", [pytest.param(k, marks=() if k in ("mixtral", "qwen3_moe") else pytest.mark.slow) for k in MOE_CASES]
)
def test_folder_round_trip_is_bitwise(model_type: str, convert: ConvertCommand, tmp_path: Path) -> None:
    make_huggingface_model(model_type, torch.float32).save_pretrained(tmp_path / "theirs")
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")[0] == 0
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3}, "[0,1,1,1,0]"),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2}, "[0,1,0,1,0]"),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 2}, "[0,0,1,0,0]"),
    ],
)
def test_layers_with_experts_of_ernie_round_trip(changes: dict[str, int], layers: str) -> None:
    case = MOE_CASES["ernie4_5_moe"]
    fields = config_to_huggingface(case.our_config(), "float32") | {"num_hidden_layers": 5} | changes
    config = config_from_huggingface(fields)
    assert config.model.moe_layer_freq == layers
    assert config_from_huggingface(config_to_huggingface(config, "float32", "ernie4_5_moe")).model == config.model
