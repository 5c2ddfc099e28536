"""The files of a Hugging Face folder: shards and index, damage, kills; names and biases of other writers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.checkpoint.checkpoint_args import read_source
from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface, saved_config
from megatron.checkpoint.huggingface.convert import export, import_folder
from megatron.checkpoint.huggingface.weights import expected_weights, weights_from_huggingface, weights_to_huggingface
from megatron.checkpoint.huggingface_args import read_headers
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.errors import CheckpointError, ConfigError
from tests.helpers.checkpoint_samples import FailAt
from tests.helpers.huggingface_models import make_family_config, save_model

_LLAMA_WORD_EMBEDDING = "model.embed_tokens.weight"
_EXTRA_SETTINGS: dict[str, dict[str, object]] = {
    "gpt2": {},
    "llama": {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "gated-silu"},
}
TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
    "d": torch.zeros(50, 2),
}


@pytest.mark.parametrize(("max_bytes", "num_files"), [(10_000, 1), (40, 2), (35, 3), (1, 4)])
def test_tensors_round_trip_through_any_number_of_files(max_bytes: int, num_files: int, tmp_path: Path) -> None:
    names = folder.write_tensors(tmp_path, TENSORS, max_bytes)
    assert len(names) == num_files and (tmp_path / folder.INDEX).exists() == (num_files > 1)
    loaded = folder.read_tensors(tmp_path)
    assert sorted(loaded) == sorted(TENSORS) and all(
        loaded[n].dtype == t.dtype and loaded[n].equal(t) for n, t in TENSORS.items()
    )
    assert {key for name in names for key in load_file(tmp_path / name)} == {*TENSORS}
    if num_files > 1:
        index = json.loads((tmp_path / folder.INDEX).read_text())
        assert index["metadata"]["total_size"] == 24 + 8 + 4 + 400
        assert all(key in load_file(tmp_path / name) for key, name in index["weight_map"].items())


def test_index_entries_without_tensors_or_files_are_rejected(tmp_path: Path) -> None:
    first_file, _ = folder.write_tensors(tmp_path, TENSORS, 40)
    save_file({"a": TENSORS["a"]}, tmp_path / first_file)
    with pytest.raises(CheckpointError, match="lack tensors that the index lists: b, c"):
        folder.read_tensors(tmp_path)
    (tmp_path / first_file).write_bytes(b"\x08\0\0\0\0\0\0\0{not it}")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        folder.read_tensors(tmp_path)
    (tmp_path / first_file).unlink()
    with pytest.raises(CheckpointError, match=f"must contain {first_file}, which is missing"):
        folder.read_tensors(tmp_path)
    (tmp_path / folder.INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="must be in the folder"):
        folder.read_tensors(tmp_path)


@pytest.mark.parametrize("direction", ["export", "import"])
def test_failure_at_any_operation_leaves_no_output_folder(direction: str, tmp_path: Path) -> None:
    save_model(tmp_path / "run", make_family_config("gpt2"))
    checkpoint = open_folder(tmp_path / "run")
    export(checkpoint, tmp_path / "theirs")

    def convert(out: Path) -> object:
        return export(checkpoint, out) if direction == "export" else import_folder(tmp_path / "theirs", out)

    with FailAt(10**6, None) as operations:
        convert(tmp_path / "counted")
    last_rename_idx = (
        len(operations.operations) - 1 - operations.operations[::-1].index("rename")
    )  # what follows it flushes its name
    commit_idx = operations.operations.index("rename")
    harmless_idxs = (
        range(commit_idx + 1, commit_idx + 6) if direction == "import" else ()
    )  # the checkpoint's name and the hint

    def raise_error() -> None:
        raise OSError("planted")

    for operation_idx in set(range(0, last_rename_idx + 1, 1 if direction == "export" else 5)) - set(harmless_idxs):
        with FailAt(operation_idx, raise_error), pytest.raises((ConfigError, CheckpointError), match="planted"):
            convert(tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["counted", "run", "theirs"]


def test_unprefixed_names_load_and_mask_buffers_are_skipped(tmp_path: Path) -> None:
    config = make_family_config("gpt2", hidden_bias=True)
    save_model(tmp_path / "run", config)
    export(open_folder(tmp_path / "run"), tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.1.attn.masked_bias": torch.ones(())}, path)
    import_folder(tmp_path / "theirs", tmp_path / "back")
    weights, reimported = (read_weights(open_folder(tmp_path / name)) for name in ("run", "back"))
    assert sorted(weights) == sorted(reimported) and all(
        reimported[name].equal(tensor) for name, tensor in weights.items()
    )


def test_nonzero_biases_are_imported(tmp_path: Path) -> None:
    save_model(tmp_path / "run", make_family_config("gpt2"))
    export(open_folder(tmp_path / "run"), tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = 0.5
    save_file(tensors, path)
    _, config = import_folder(tmp_path / "theirs", tmp_path / "back")
    assert config.model.hidden_bias
    assert read_weights(open_folder(tmp_path / "back"))["layers.1.mlp.up.bias"][3] == 0.5


@pytest.mark.parametrize(
    ("family", "word_embedding"), [("gpt2", "transformer.wte.weight"), ("llama", _LLAMA_WORD_EMBEDDING)]
)
def test_missing_untied_head_error_names_lm_head(family: str, word_embedding: str, tmp_path: Path) -> None:
    config = make_family_config(family, untie_embeddings=True, hidden_bias=family == "gpt2", **_EXTRA_SETTINGS[family])
    weights = {name: torch.randn(tensor.shape) for name, tensor in expected_weights(config).items()}
    hf_weights = weights_to_huggingface(weights, config)
    assert weights_from_huggingface(hf_weights, config)["head.weight"].equal(weights["head.weight"])
    del hf_weights["lm_head.weight"]
    assert word_embedding in hf_weights
    with pytest.raises(CheckpointError, match=r'lm_head.weight: missing.*set "tie_word_embeddings": true'):
        weights_from_huggingface(hf_weights, config)
    tmp_path.joinpath("config.json").write_text(json.dumps(config_to_huggingface(config, "float32")))
    folder.write_tensors(tmp_path, hf_weights, 10**9)
    with pytest.raises(CheckpointError, match=r'lm_head.weight: missing.*set "tie_word_embeddings": true'):
        read_source(tmp_path, family)


def test_missing_t5_head_loads_as_word_embedding(tmp_path: Path) -> None:
    fields = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 29}
    hf_config = transformers.T5Config(**fields, tie_word_embeddings=False)
    transformers.T5ForConditionalGeneration(hf_config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf_model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, local_files_only=True)
    config = config_from_huggingface(folder.read_json(tmp_path, "config.json"))
    assert config.model.untie_embeddings and read_source(tmp_path, "t5") is not None
    assert weights_from_huggingface(folder.read_tensors(tmp_path), config)["head.weight"].equal(hf_model.lm_head.weight)


@pytest.mark.parametrize(
    ("table_dtype", "head_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.half)],
)
def test_tied_head_of_other_dtype_is_compared_by_value(table_dtype: torch.dtype, head_dtype: torch.dtype) -> None:
    config = make_family_config("t5")
    weights = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in expected_weights(config).items()}
    hf_weights = weights_to_huggingface({name: tensor.to(table_dtype) for name, tensor in weights.items()}, config)
    head_copy = hf_weights["shared.weight"].to(head_dtype)
    loaded = weights_from_huggingface({**hf_weights, "lm_head.weight": head_copy}, config)
    assert loaded["embedding.word.weight"].equal(hf_weights["shared.weight"])
    head_copy[3, 5] += 0.5
    with pytest.raises(CheckpointError, match="lm_head.weight must equal shared.weight"):
        weights_from_huggingface({**hf_weights, "lm_head.weight": head_copy}, config)


def test_single_file_takes_precedence_over_stale_index(tmp_path: Path) -> None:
    """As in transformers."""
    save_small_llama(tmp_path, 1)
    saved = load_file(tmp_path / "model.safetensors")
    folder.write_tensors(tmp_path, {name: tensor + 1 for name, tensor in saved.items()}, 20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    hf_state = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    loaded = folder.read_tensors(tmp_path)
    assert sorted(loaded) == sorted(hf_state) and all(loaded[name].equal(tensor) for name, tensor in hf_state.items())
    assert {header.file.name for header in read_headers(tmp_path).values()} == {"model.safetensors"}
    (tmp_path / "model.safetensors").unlink()
    hf_state = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    assert all(folder.read_tensors(tmp_path)[name].equal(tensor) for name, tensor in hf_state.items())


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"])
def test_saved_rotary_buffers_are_skipped(name: str, tmp_path: Path) -> None:
    save_small_llama(tmp_path, 2)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: torch.ones(4)}, path, metadata={"format": "pt"})
    config = config_from_huggingface(folder.read_json(tmp_path, "config.json"))
    assert set(weights_from_huggingface(folder.read_tensors(tmp_path), config)) == set(expected_weights(config))
    assert read_source(tmp_path, "llama") is not None


def save_small_llama(path: Path, seed: int) -> None:
    """Write an untied LLaMA of two layers with random weights into ``path``."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def test_tied_head_with_other_values_is_rejected() -> None:
    config = make_family_config("t5")
    weights = {name: torch.randn(tensor.shape) for name, tensor in expected_weights(config).items()}
    hf_weights = {**weights_to_huggingface(weights, config), "lm_head.weight": torch.randn(29, 16)}
    with pytest.raises(CheckpointError, match="lm_head.weight must equal shared.weight"):
        weights_from_huggingface(hf_weights, config)


def test_config_round_trips_through_huggingface_format() -> None:
    for family in ("gpt2", "t5"):
        config = make_family_config(
            family, hidden_dropout=0.25, attention_dropout=0.25, layernorm_epsilon=3e-6, kv_hidden_size=8
        )
        loaded = config_from_huggingface(config_to_huggingface(config, "float32"))
        dropouts = {"hidden_dropout": 0.25, "attention_dropout": 0.25, "layernorm_epsilon": 3e-6}
        assert loaded.model == replace(config.model, max_position_embeddings=loaded.model.max_position_embeddings)
        assert {name: getattr(loaded.model, name) for name in dropouts} == dropouts


def test_metadata_without_config_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="does not describe its model"):
        saved_config({"progress": {}})
