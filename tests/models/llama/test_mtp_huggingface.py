"""Multi-token prediction layers in Hugging Face folders: names, copies, folders with and without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.checkpoint_args import read_source
from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, format_of
from megatron.checkpoint.huggingface.convert import export, import_folder, save_first
from megatron.checkpoint.huggingface.weights import expected_weights, weights_from_huggingface, weights_to_huggingface
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.models.common.huggingface_mtp import QWEN, layer_names
from megatron.models.llama.huggingface import PRESETS, recipes
from tests.helpers.expert_models import MOE_CASES
from tests.helpers.latent_models import LATENT_CASES, LATENT_FLAGS
from tests.helpers.modern_decoders import FLAGS

NUM_LAYERS = 3


def make_config(model_type: str = "glm4_moe", mtp_num_layers: int = 1, extra: str = "") -> Config:
    common, cases = (LATENT_FLAGS, LATENT_CASES) if model_type in LATENT_CASES else (FLAGS, MOE_CASES)
    flags = f"{common} {cases[model_type].flags} --data-path none --device cpu --seq-length 8 {extra}"
    config = parse([*flags.split(), "--mtp-num-layers", str(mtp_num_layers)], world_size=1, family="llama", env={})
    return config if config.model.vocab_size else config.with_vocab(101)


def make_weights(config: Config) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {name: torch.randn(tensor.shape) for name, tensor in expected_weights(config).items()}


def write_folder(path: Path, config: Config, tensors: dict[str, torch.Tensor], model_type: str = "glm4_moe") -> Path:
    path.mkdir()
    path.joinpath("config.json").write_text(json.dumps(config_to_huggingface(config, "float32", model_type)))
    folder.write_tensors(path, tensors, 10**9)
    return path


def test_names_are_those_of_published_folders() -> None:
    config = make_config(mtp_num_layers=2)
    assert config.model.num_layers == NUM_LAYERS and config.model.untie_embeddings
    weights = make_weights(config)
    tensors = weights_to_huggingface(weights, config)
    for depth in range(2):
        layer = f"model.layers.{NUM_LAYERS + depth}"
        for ours, theirs in {
            "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_norm": "shared_head.norm",
            "layer.input_norm": "input_layernorm", "layer.post_attention_norm": "post_attention_layernorm",
            "layer.attention.dense": "self_attn.o_proj", "layer.mlp.router": "mlp.gate",
            "layer.mlp.experts.5.down": "mlp.experts.5.down_proj",
            "layer.mlp.shared_expert.down": "mlp.shared_experts.down_proj",
        }.items():  # fmt: skip
            assert torch.equal(tensors[f"{layer}.{theirs}.weight"], weights[f"mtp.{depth}.{ours}.weight"]), ours
        assert torch.equal(tensors[f"{layer}.embed_tokens.weight"], weights["embedding.word.weight"])
        assert torch.equal(tensors[f"{layer}.shared_head.head.weight"], weights["head.weight"])
    assert config_to_huggingface(config, "float32")["num_nextn_predict_layers"] == 2


def test_names_of_qwen_have_one_layer_without_copies() -> None:
    """No type that is supported has them yet: this is the table of Qwen 3.5's folders."""
    (preset,) = (preset for preset in PRESETS if preset.model_type == "qwen3")
    config = make_config("qwen3_moe")
    dense = replace(config, model=replace(config.model, num_experts=0))
    mappings = recipes(replace(preset, mtp=QWEN), dense)
    hf_names = {name: mapping.hf_names for name, mapping in mappings.items() if name.startswith("mtp.")}
    assert hf_names["mtp.0.eh_proj.weight"] == ("mtp.fc.weight",)
    assert hf_names["mtp.0.enorm.weight"] == ("mtp.pre_fc_norm_embedding.weight",)
    assert hf_names["mtp.0.hnorm.weight"] == ("mtp.pre_fc_norm_hidden.weight",)
    assert hf_names["mtp.0.final_norm.weight"] == ("mtp.norm.weight",)
    assert hf_names["mtp.0.layer.mlp.down.weight"] == ("mtp.layers.0.mlp.down_proj.weight",)
    assert not QWEN.copies(dense.model, "word", "head")
    two = replace(dense.model, mtp_num_layers=2)
    assert list(QWEN.problems(two)) == ["--mtp-num-layers must be at most 1, got 2"]
    assert [name for *_, name in layer_names(None, two)] == [f"model.layers.{idx}" for idx in range(NUM_LAYERS)]


@pytest.mark.parametrize("extra", ["", "--tie-embeddings-and-output-weights"])
def test_round_trip_is_bitwise(extra: str, tmp_path: Path) -> None:
    config = make_config(mtp_num_layers=2, extra=extra)
    weights = make_weights(config)
    tensors = weights_to_huggingface(weights, config)
    path = write_folder(tmp_path / "theirs", config, tensors)
    source = read_source(path, "llama")
    assert source is not None and source.config.model.mtp_num_layers == 2
    saved, imported = import_folder(path, tmp_path / "run")
    assert imported.model == config.model
    loaded = read_weights(open_folder(tmp_path / "run"))
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)
    result = export(open_folder(tmp_path / "run"), tmp_path / "back")
    exported = folder.read_tensors(tmp_path / "back")
    assert exported.keys() == tensors.keys() and all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert not [note for note in result.notes if "multi-token" in note]
    assert saved.exists()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_round_trip_with_latents_is_bitwise(model_type: str, tmp_path: Path) -> None:
    config = make_config(model_type, mtp_num_layers=2)
    tensors = weights_to_huggingface(make_weights(config), config, model_type)
    assert f"model.layers.{NUM_LAYERS + 1}.self_attn.kv_a_proj_with_mqa.weight" in tensors
    path = write_folder(tmp_path / "theirs", config, tensors, model_type)
    _, imported = import_folder(path, tmp_path / "run")
    assert imported.model == config.model
    export(open_folder(tmp_path / "run"), tmp_path / "back")
    assert folder.read_json(tmp_path / "back", "config.json")["model_type"] == model_type
    exported = folder.read_tensors(tmp_path / "back")
    assert exported.keys() == tensors.keys() and all(torch.equal(exported[name], tensors[name]) for name in tensors)


def test_copies_may_be_missing_but_must_not_differ() -> None:
    config = make_config()
    weights = make_weights(config)
    tensors = weights_to_huggingface(weights, config)
    copies = [f"model.layers.{NUM_LAYERS}.embed_tokens.weight", f"model.layers.{NUM_LAYERS}.shared_head.head.weight"]
    without = {name: tensor for name, tensor in tensors.items() if name not in copies}
    loaded = weights_from_huggingface(without, config)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    for name in copies:
        with pytest.raises(CheckpointError, match=f"{name} must equal .* the multi-token prediction layers share it"):
            weights_from_huggingface({**tensors, name: tensors[name] + 1}, config)


def test_folder_without_the_tensors_is_a_model_without_the_layers(tmp_path: Path) -> None:
    """transformers drops them when it saves a model, but keeps the key of config.json."""
    config, plain = make_config(), make_config(mtp_num_layers=0)
    weights = make_weights(plain)
    path = write_folder(tmp_path / "theirs", config, weights_to_huggingface(weights, plain))
    assert config_from_huggingface(folder.read_json(path, "config.json")).model.mtp_num_layers == 1
    source = read_source(path, "llama")
    assert source is not None and source.config.model.mtp_num_layers == 0
    _, imported = import_folder(path, tmp_path / "run")
    assert imported.model.mtp_num_layers == 0
    assert read_weights(open_folder(tmp_path / "run")).keys() == weights.keys()


def test_missing_tensor_of_a_layer_is_an_error() -> None:
    config = make_config()
    tensors = weights_to_huggingface(make_weights(config), config)
    del tensors[f"model.layers.{NUM_LAYERS}.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=f"model.layers.{NUM_LAYERS}.eh_proj.weight: missing"):
        weights_from_huggingface(tensors, config)


def test_export_of_other_types_leaves_the_layers_out_and_says_so(tmp_path: Path) -> None:
    config = make_config("qwen3_moe", mtp_num_layers=1)
    assert format_of(config).model_types == ("qwen3_moe",)
    weights = make_weights(config)
    save_first(tmp_path / "run" / "checkpoints", weights, config, "none", {})
    result = export(open_folder(tmp_path / "run"), tmp_path / "back")
    (note,) = (note for note in result.notes if "multi-token" in note)
    assert "the 1 multi-token prediction layers are not exported" in note and "qwen3_moe have no names" in note
    exported = folder.read_tensors(tmp_path / "back")
    plain = make_config("qwen3_moe", mtp_num_layers=0)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    expected = weights_to_huggingface(kept, plain)
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name], expected[name]) for name in expected)
