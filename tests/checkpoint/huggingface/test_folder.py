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
from tests.helpers.huggingface_models import config_of, save_model

_LLAMA_WORD = "model.embed_tokens.weight"
_LLAMA: dict[str, dict[str, object]] = {
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
def test_tensors_come_back_from_any_number_of_files(max_bytes: int, num_files: int, tmp_path: Path) -> None:
    names = folder.write_tensors(tmp_path, TENSORS, max_bytes)
    assert len(names) == num_files and (tmp_path / folder.INDEX).exists() == (num_files > 1)
    back = folder.read_tensors(tmp_path)
    assert sorted(back) == sorted(TENSORS) and all(
        back[n].dtype == t.dtype and back[n].equal(t) for n, t in TENSORS.items()
    )
    assert {key for name in names for key in load_file(tmp_path / name)} == {*TENSORS}
    if num_files > 1:
        index = json.loads((tmp_path / folder.INDEX).read_text())
        assert index["metadata"]["total_size"] == 24 + 8 + 4 + 400
        assert all(key in load_file(tmp_path / name) for key, name in index["weight_map"].items())


def test_what_an_index_promises_must_be_there(tmp_path: Path) -> None:
    first, _ = folder.write_tensors(tmp_path, TENSORS, 40)
    save_file({"a": TENSORS["a"]}, tmp_path / first)
    with pytest.raises(CheckpointError, match="lack tensors that the index lists: b, c"):
        folder.read_tensors(tmp_path)
    (tmp_path / first).write_bytes(b"\x08\0\0\0\0\0\0\0{not it}")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        folder.read_tensors(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(CheckpointError, match=f"must contain {first}, which is missing"):
        folder.read_tensors(tmp_path)
    (tmp_path / folder.INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="must be in the folder"):
        folder.read_tensors(tmp_path)


@pytest.mark.parametrize("way", ["export", "import"])
def test_a_failure_at_any_moment_leaves_no_folder_of_that_name(way: str, tmp_path: Path) -> None:
    save_model(tmp_path / "run", config_of("gpt2"))
    checkpoint = open_folder(tmp_path / "run")
    export(checkpoint, tmp_path / "theirs")

    def convert(out: Path) -> object:
        return export(checkpoint, out) if way == "export" else import_folder(tmp_path / "theirs", out)

    with FailAt(10**6, None) as counted:
        convert(tmp_path / "counted")
    last = len(counted.names) - 1 - counted.names[::-1].index("rename")  # what follows it flushes its name
    commit = counted.names.index("rename")
    harmless = range(commit + 1, commit + 6) if way == "import" else ()  # the checkpoint's name and the hint

    def fault() -> None:
        raise OSError("planted")

    for k in set(range(0, last + 1, 1 if way == "export" else 5)) - set(harmless):
        with FailAt(k, fault), pytest.raises((ConfigError, CheckpointError), match="planted"):
            convert(tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["counted", "run", "theirs"]


def test_the_names_of_the_hub_are_read_and_masks_passed_over(tmp_path: Path) -> None:
    config = config_of("gpt2", hidden_bias=True)
    save_model(tmp_path / "run", config)
    export(open_folder(tmp_path / "run"), tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    held = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**held, "h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.1.attn.masked_bias": torch.ones(())}, path)
    import_folder(tmp_path / "theirs", tmp_path / "back")
    weights, back = (read_weights(open_folder(tmp_path / name)) for name in ("run", "back"))
    assert sorted(weights) == sorted(back) and all(back[name].equal(tensor) for name, tensor in weights.items())


def test_biases_that_were_trained_elsewhere_are_kept(tmp_path: Path) -> None:
    save_model(tmp_path / "run", config_of("gpt2"))
    export(open_folder(tmp_path / "run"), tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    held = load_file(path)
    held["transformer.h.1.mlp.c_fc.bias"][3] = 0.5
    save_file(held, path)
    _, config = import_folder(tmp_path / "theirs", tmp_path / "back")
    assert config.model.hidden_bias
    assert read_weights(open_folder(tmp_path / "back"))["layers.1.mlp.up.bias"][3] == 0.5


@pytest.mark.parametrize(("family", "word"), [("gpt2", "transformer.wte.weight"), ("llama", _LLAMA_WORD)])
def test_a_missing_head_of_an_untied_model_is_named(family: str, word: str, tmp_path: Path) -> None:
    config = config_of(family, untie_embeddings=True, hidden_bias=family == "gpt2", **_LLAMA[family])
    own = {name: torch.randn(tensor.shape) for name, tensor in expected_weights(config).items()}
    theirs = weights_to_huggingface(own, config)
    assert weights_from_huggingface(theirs, config)["head.weight"].equal(own["head.weight"])
    del theirs["lm_head.weight"]
    assert word in theirs
    with pytest.raises(CheckpointError, match=r'lm_head.weight: missing.*set "tie_word_embeddings": true'):
        weights_from_huggingface(theirs, config)
    tmp_path.joinpath("config.json").write_text(json.dumps(config_to_huggingface(config, "float32")))
    folder.write_tensors(tmp_path, theirs, 10**9)
    with pytest.raises(CheckpointError, match=r'lm_head.weight: missing.*set "tie_word_embeddings": true'):
        read_source(tmp_path, family)


def test_a_missing_head_of_a_t5_is_the_word_table_as_their_class_has_it(tmp_path: Path) -> None:
    fields = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 29}
    theirs = transformers.T5Config(**fields, tie_word_embeddings=False)
    transformers.T5ForConditionalGeneration(theirs).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held.pop("lm_head.weight", None)
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, local_files_only=True)
    config = config_from_huggingface(folder.read_json(tmp_path, "config.json"))
    assert config.model.untie_embeddings and read_source(tmp_path, "t5") is not None
    assert weights_from_huggingface(folder.read_tensors(tmp_path), config)["head.weight"].equal(loaded.lm_head.weight)


@pytest.mark.parametrize(
    ("table", "head"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.half)]
)
def test_a_tied_head_of_another_type_is_compared_by_value(table: torch.dtype, head: torch.dtype) -> None:
    config = config_of("t5")
    own = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in expected_weights(config).items()}
    theirs = weights_to_huggingface({name: tensor.to(table) for name, tensor in own.items()}, config)
    copy = theirs["shared.weight"].to(head)
    back = weights_from_huggingface({**theirs, "lm_head.weight": copy}, config)
    assert back["embedding.word.weight"].equal(theirs["shared.weight"])
    copy[3, 5] += 0.5
    with pytest.raises(CheckpointError, match="lm_head.weight must equal shared.weight"):
        weights_from_huggingface({**theirs, "lm_head.weight": copy}, config)


def test_one_file_takes_precedence_over_an_index_of_an_earlier_save(tmp_path: Path) -> None:
    """As in transformers."""
    save_small_llama(tmp_path, 1)
    wanted = load_file(tmp_path / "model.safetensors")
    folder.write_tensors(tmp_path, {name: tensor + 1 for name, tensor in wanted.items()}, 20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    found = folder.read_tensors(tmp_path)
    assert sorted(found) == sorted(theirs) and all(found[name].equal(tensor) for name, tensor in theirs.items())
    assert {header.file.name for header in read_headers(tmp_path).values()} == {"model.safetensors"}
    (tmp_path / "model.safetensors").unlink()
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True).state_dict()
    assert all(folder.read_tensors(tmp_path)[name].equal(tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"])
def test_saved_buffers_of_rotary_positions_are_passed_over(name: str, tmp_path: Path) -> None:
    save_small_llama(tmp_path, 2)
    path = tmp_path / "model.safetensors"
    wanted = load_file(path)
    save_file({**wanted, name: torch.ones(4)}, path, metadata={"format": "pt"})
    config = config_from_huggingface(folder.read_json(tmp_path, "config.json"))
    assert set(weights_from_huggingface(folder.read_tensors(tmp_path), config)) == set(expected_weights(config))
    assert read_source(tmp_path, "llama") is not None


def save_small_llama(place: Path, seed: int) -> None:
    """Write an untied LLaMA of two layers with random weights into ``place``."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)


def test_a_tied_head_with_other_values_is_refused() -> None:
    config = config_of("t5")
    own = {name: torch.randn(tensor.shape) for name, tensor in expected_weights(config).items()}
    theirs = {**weights_to_huggingface(own, config), "lm_head.weight": torch.randn(29, 16)}
    with pytest.raises(CheckpointError, match="lm_head.weight must equal shared.weight"):
        weights_from_huggingface(theirs, config)


def test_settings_are_the_same_after_there_and_back() -> None:
    for family in ("gpt2", "t5"):
        config = config_of(
            family, hidden_dropout=0.25, attention_dropout=0.25, layernorm_epsilon=3e-6, kv_hidden_size=8
        )
        back = config_from_huggingface(config_to_huggingface(config, "float32"))
        dropouts = {"hidden_dropout": 0.25, "attention_dropout": 0.25, "layernorm_epsilon": 3e-6}
        assert back.model == replace(config.model, max_position_embeddings=back.model.max_position_embeddings)
        assert {name: getattr(back.model, name) for name in dropouts} == dropouts


def test_a_checkpoint_of_something_else_is_named() -> None:
    with pytest.raises(CheckpointError, match="does not describe its model"):
        saved_config({"progress": {}})
