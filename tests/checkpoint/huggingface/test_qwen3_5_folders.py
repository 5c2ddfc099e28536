"""Folders of Qwen3.5 with images, stacked experts, and multi-token prediction layers of Qwen's types."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface
from megatron.checkpoint.huggingface.convert import import_folder
from megatron.checkpoint.huggingface.weights import (
    expected_weights,
    open_pretrained,
    weights_from_huggingface,
    weights_to_huggingface,
)
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard
from tests.helpers.delta_decoders import DELTA_CASES, LINEAR
from tests.helpers.modern_decoders import COMMON_SETTINGS, FULL, ModelCase
from tests.tools.test_convert_hf import ConvertCommand, convert, read_tensors

__all__ = ["convert"]  # the fixture

VISION = {
    "depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 12, "patch_size": 2, "out_hidden_size": 38,
    "num_position_embeddings": 4,
}  # fmt: skip
TYPES = {"qwen3_5": ("Qwen3_5", "qwen3_5_text"), "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_text")}
"""model_type of a folder with images -> prefix of the classes, model_type of its text part."""


def make_model_with_images(model_type: str) -> Any:
    """Return a random model of the class that reads images."""
    import transformers

    prefix, text_type = TYPES[model_type]
    text = {**COMMON_SETTINGS, **DELTA_CASES[text_type].settings, "tie_word_embeddings": False}
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config)


@pytest.mark.parametrize("model_type", TYPES)
def test_text_part_of_a_folder_with_images_is_imported(
    model_type: str, convert: ConvertCommand, tmp_path: Path
) -> None:
    model = make_model_with_images(model_type)
    model.save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == model_type
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run", "--verify")
    assert code == 0 and "verified" in output, output
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified" in output, output
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == TYPES[model_type][1]
    exported, saved = read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs")
    for name, tensor in exported.items():
        if ".experts." not in name:
            assert tensor.equal(saved[name.replace("model.", "model.language_model.", 1)]), name
    assert any(name.startswith("model.visual.") for name in saved)


def write_stacked_folder(path: Path) -> dict[str, torch.Tensor]:
    """Write a folder with the names of published folders of Qwen3.5 with experts; return the tensors by expert."""
    case = DELTA_CASES["qwen3_5_moe_text"]
    case.huggingface_model(torch.float32).save_pretrained(path / "text")
    tensors = read_tensors(path / "text")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"

        def weights(projection: str, experts: str = experts) -> torch.Tensor:
            return torch.stack([tensors[f"{experts}.{idx}.{projection}_proj.weight"] for idx in range(5)])

        stacked[f"{experts}.gate_up_proj"] = torch.cat((weights("gate"), weights("up")), dim=1)
        stacked[f"{experts}.down_proj"] = weights("down")
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stacked.items()}
    published["model.visual.pos_embed.weight"] = torch.zeros(4, 8)
    text_config = json.loads((path / "text" / "config.json").read_text())
    text_config["rope_parameters"] |= {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
    (path / "published").mkdir()
    folder.write_json(
        path / "published" / folder.CONFIG,
        {
            "model_type": "qwen3_5_moe",
            "text_config": text_config,
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
    )
    folder.write_tensors(path / "published", published, 10**9)
    return tensors


def test_stacked_experts_are_read(tmp_path: Path) -> None:
    tensors = write_stacked_folder(tmp_path)
    _, config = import_folder(tmp_path / "published", tmp_path / "run")
    expected = weights_from_huggingface(tensors, config, "qwen3_5_moe_text")
    with ExitStack() as stack:
        imported = read_weights(open_folder(tmp_path / "run"))
        assert all(imported[name].equal(weight) for name, weight in expected.items())
        pretrained = open_pretrained(tmp_path / "published", stack)
        assert pretrained.shapes.keys() == expected.keys()
        for name, weight in expected.items():
            half = len(weight) // 2
            shard = Shard(tuple(weight.shape), 0, half, len(weight) - half)
            assert pretrained.read(name, shard).equal(weight[half:]), name
            if weight.dim() == 2:
                columns = Shard(tuple(weight.shape), 1, 1, weight.shape[1] - 1)
                assert pretrained.read(name, columns).equal(weight[:, 1:]), name


def test_stacked_experts_of_another_number_are_rejected(tmp_path: Path) -> None:
    write_stacked_folder(tmp_path)
    settings = folder.read_json(tmp_path / "published", folder.CONFIG)
    settings["text_config"]["num_experts"] = 4
    folder.write_json(tmp_path / "published" / folder.CONFIG, settings)
    with pytest.raises(CheckpointError, match=r"experts\.4\.gate_proj\.weight: no such tensor in this model"):
        import_folder(tmp_path / "published", tmp_path / "run")


# Multi-token prediction.


def make_mtp_config(model_type: str) -> Config:
    case = DELTA_CASES[model_type]
    case = ModelCase(case.prefix, {**case.settings, "layer_types": [LINEAR, LINEAR, FULL]}, config=case.config)
    settings = {**case.huggingface_config().to_dict(), "mtp_num_hidden_layers": 1, "mlp_only_layers": []}
    return config_from_huggingface(settings)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_multi_token_prediction_layers_round_trip(model_type: str, tmp_path: Path) -> None:
    config = make_mtp_config(model_type)
    torch.manual_seed(1)
    weights = {name: torch.randn(tensor.shape) for name, tensor in expected_weights(config).items()}
    tensors = weights_to_huggingface(weights, config, model_type)
    for ours, theirs in {
        "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "final_norm": "norm",
        "layer.attention.dense": "layers.0.self_attn.o_proj", "layer.attention.key_norm": "layers.0.self_attn.k_norm",
    }.items():  # fmt: skip
        assert tensors[f"mtp.{theirs}.weight"].equal(weights[f"mtp.0.{ours}.weight"]), ours
    restored = weights_from_huggingface(tensors, config, model_type)
    assert restored.keys() == weights.keys() and all(restored[name].equal(weights[name]) for name in weights)
    folder.write_json(tmp_path / folder.CONFIG, config_to_huggingface(config, "float32", model_type))
    folder.write_tensors(tmp_path, tensors, 10**9)
    _, imported = import_folder(tmp_path, tmp_path / "run")
    assert imported.model == config.model
    without_layers = replace(config, model=replace(config.model, mtp_num_layers=0))
    unused = weights_from_huggingface(tensors, without_layers, model_type)
    assert unused.keys() == {name for name in weights if not name.startswith("mtp.")}
