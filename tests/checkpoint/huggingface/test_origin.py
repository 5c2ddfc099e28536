"""The small files of a Hugging Face folder after import and export, with and without training in between."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from megatron.checkpoint.checkpoint_args import read_source
from megatron.checkpoint.huggingface.config import family_by_type, saved_config
from megatron.checkpoint.huggingface.convert import CHAT_TEMPLATE, export, import_folder
from megatron.checkpoint.huggingface.folder import read_tensors
from megatron.checkpoint.huggingface.origin import STATE, config_text, origin_of
from megatron.checkpoint.one_process import open_folder
from megatron.checkpoint.opened_checkpoint import Checkpoint
from tests.helpers.chats import CHATML, LLAMA3, write_tokenizer
from tests.helpers.instruct_folders import read_files, write_instruct_folder

MODEL_TYPES = [
    name
    for name in family_by_type()
    if name in transformers.CONFIG_MAPPING and "text_config" not in transformers.CONFIG_MAPPING[name].sub_configs
]
"""Types whose sizes are in the outer config.json; test_qwen3_5_folders.py tests the others."""
QUICK_TYPES = {"llama"}


def import_and_open(folder: Path, run_dir: Path) -> Checkpoint:
    import_folder(folder, run_dir)
    return open_folder(run_dir)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LLaMA, which no test changes."""
    return write_instruct_folder(tmp_path_factory.mktemp("folders") / "source")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same as a checkpoint of ours."""
    return import_and_open(source, tmp_path_factory.mktemp("runs") / "run")


def published_name(name: str) -> str:
    """Convert a name that transformers saves: dense layers of Kimi Linear have the experts' name there."""
    return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in QUICK_TYPES else pytest.mark.slow) for name in MODEL_TYPES]
)
def test_untrained_round_trip_preserves_every_byte(model_type: str, tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source", model_type)
    export(import_and_open(source, tmp_path / "run"), tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)
    exported_tensors = read_tensors(tmp_path / "back")
    source_tensors = {published_name(name): tensor for name, tensor in read_tensors(source).items()}
    assert all(exported_tensors[name].equal(tensor) for name, tensor in source_tensors.items())
    assert read_source(tmp_path / "back", family_by_type()[model_type]) is not None


def test_transformers_reads_same_tokenizer_and_generation_config(tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source", dtype=torch.bfloat16)
    export(import_and_open(source, tmp_path / "run"), tmp_path / "back")
    folders = (source, tmp_path / "back")
    source_tokenizer, exported_tokenizer = (
        transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "model_max_length", "chat_template"):
        assert (
            getattr(source_tokenizer, name) == getattr(exported_tokenizer, name)
            and getattr(source_tokenizer, name) is not None
        )
    assert set(source_tokenizer.chat_template) == {"default", "tool_use"}
    source_generation, exported_generation = (
        transformers.GenerationConfig.from_pretrained(folder, local_files_only=True) for folder in folders
    )
    assert source_generation.to_dict() == exported_generation.to_dict() and len(source_generation.eos_token_id) == 2


def with_settings(checkpoint: Checkpoint, **sections: dict[str, Any]) -> Checkpoint:
    """Return ``checkpoint`` as a run would have saved it with other settings."""
    config = saved_config(checkpoint.metadata)
    for section, values in sections.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return with_metadata(checkpoint, model=config.identity(), config=config.to_dict())


def with_metadata(checkpoint: Checkpoint, **entries: Any) -> Checkpoint:
    copied = copy.copy(checkpoint)
    copied.metadata = {**checkpoint.metadata, **entries}
    return copied


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_export_replaces_only_changed_settings(tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source", rope_scaling=None, rope_theta=5e5)
    checkpoint = import_and_open(source, tmp_path / "run")
    model = {"rotary_base": 2e6, "max_position_embeddings": 4096, "attention_dropout": 0.25}
    export(with_settings(checkpoint, model=model), tmp_path / "back", dtype="bf16")
    before, after = read_json(source), read_json(tmp_path / "back")
    assert after["max_position_embeddings"] == 4096 and after["dtype"] == "bfloat16"
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert hf_config.rope_parameters["rope_theta"] == 2e6 and hf_config.attention_dropout == 0.25
    changeable_keys = {
        "max_position_embeddings",
        "dtype",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attention_dropout",
    }
    assert {key for key in {*before, *after} if before.get(key) != after.get(key)} <= changeable_keys
    assert read_files(tmp_path / "back")["generation_config.json"] == read_files(source)["generation_config.json"]


def test_exported_dtype_keeps_key_name_of_source(tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source")
    settings = read_json(source)
    settings["torch_dtype"] = settings.pop("dtype")
    (source / "config.json").write_text(json.dumps(settings))
    checkpoint = import_and_open(source, tmp_path / "run")
    export(checkpoint, tmp_path / "back", dtype="bf16")
    assert read_json(tmp_path / "back") == {**settings, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("is_deleted", "layout"),
    [(False, "files"), (True, "files"), (False, "text in settings"), (False, "list in settings")],
)
def test_finetuning_template_replaces_default_template(is_deleted: bool, layout: str, tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source")
    if layout != "files":
        move_templates_into_settings(source, is_list=layout.startswith("list"))
    checkpoint = import_and_open(source, tmp_path / "run")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    checkpoint = with_settings(checkpoint, data={"sft": ("a.jsonl",), "chat_template": str(tmp_path / "chatml.jinja")})
    if is_deleted:
        (tmp_path / "chatml.jinja").unlink()
        checkpoint = with_metadata(checkpoint, **{CHAT_TEMPLATE: CHATML})
    result = export(checkpoint, tmp_path / "back")
    assert result.notes == []
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    if layout == "text in settings":
        assert tokenizer.chat_template == CHATML
    else:
        assert tokenizer.chat_template == {"default": CHATML, "tool_use": "{{ tools }}" + LLAMA3}
    assert tokenizer.model_max_length == 131072 and tokenizer.bos_token == "<|begin_of_text|>"
    turn_end_id, before = tokenizer.convert_tokens_to_ids("<|im_end|>"), read_json(source, "generation_config.json")
    after = read_json(tmp_path / "back", "generation_config.json")
    assert after == {**before, "eos_token_id": [turn_end_id, *before["eos_token_id"]]}
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def move_templates_into_settings(folder: Path, is_list: bool) -> None:
    """Move the templates into tokenizer_config.json, as older folders have them."""
    settings = read_json(folder, "tokenizer_config.json")
    tool_template = folder / "additional_chat_templates" / "tool_use.jinja"
    named_templates = [
        {"name": "default", "template": LLAMA3},
        {"name": "tool_use", "template": tool_template.read_text()},
    ]
    settings["chat_template"] = named_templates if is_list else LLAMA3
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tool_template.unlink()
    tool_template.parent.rmdir()
    (folder / "chat_template.jinja").unlink()


def test_finetuning_with_source_template_preserves_files(source: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = with_settings(checkpoint, data={"sft": ("a.jsonl",)})
    export(checkpoint, tmp_path / "back")
    assert read_files(tmp_path / "back") == read_files(source)


def test_missing_template_is_reported_and_default_is_dropped(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = with_settings(checkpoint, data={"sft": ("a.jsonl",), "chat_template": str(tmp_path / "gone.jinja")})
    result = export(checkpoint, tmp_path / "back")
    assert "chat template" in result.notes[0] and "gone.jinja" in result.notes[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    assert "default" not in (tokenizer.chat_template or {})


def test_export_takes_missing_tokenizer_files_from_checkpoint(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tokenizer_dir = tmp_path / "bare"
    tokenizer_dir.mkdir()
    (tokenizer_dir / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    export(checkpoint, tmp_path / "back", tokenizer_path=tokenizer_dir)
    assert read_files(tmp_path / "back") == read_files(source)


def test_replaced_tokenizer_updates_special_token_ids(checkpoint: Checkpoint, tmp_path: Path) -> None:
    tokenizer_dir = write_tokenizer(tmp_path / "other")
    tokenizer_json = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    replacements = {"<|eot_id|>": "<|end|>"}
    for token in tokenizer_json["added_tokens"]:
        token["content"] = replacements.get(token["content"], token["content"])
    (tokenizer_dir / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    result = export(checkpoint, tmp_path / "back", tokenizer_path=tokenizer_dir)
    assert "the vocabulary differs from the imported folder's" in result.notes[0]
    eos_id = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert read_json(tmp_path / "back")["eos_token_id"] == eos_id
    generation = read_json(tmp_path / "back", "generation_config.json")
    assert generation["eos_token_id"] == eos_id and generation["temperature"] == 0.6
    assert not (tmp_path / "back" / "chat_template.jinja").exists()


def test_changed_model_type_keeps_only_token_ids(source: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = with_settings(checkpoint, model={"window_size": 7})
    result = export(checkpoint, tmp_path / "back")
    assert "no longer fit the model type llama: the export is a mistral" in result.notes[0]
    exported = read_json(tmp_path / "back")
    assert exported["model_type"] == "mistral" and exported["eos_token_id"] == read_json(source)["eos_token_id"]
    assert "company" not in exported


def test_export_drops_auto_map(tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source", auto_map={"AutoConfig": "configuration_acme.AcmeConfig"})
    export(import_and_open(source, tmp_path / "run"), tmp_path / "back")
    expected = read_json(source)
    del expected["auto_map"]
    assert read_json(tmp_path / "back") == expected


def test_long_files_are_stored_compressed_and_restored(tmp_path: Path) -> None:
    source = write_instruct_folder(tmp_path / "source")
    settings = read_json(source, "tokenizer_config.json")
    settings["long"] = [f"é{idx}" for idx in range(9000)]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = import_and_open(source, tmp_path / "run")
    entry = checkpoint.metadata[STATE]["files"]
    assert isinstance(entry["config.json"], str) and len(json.dumps(entry["tokenizer_config.json"])) < 60_000
    origin = origin_of(checkpoint.metadata)
    assert origin is not None
    assert origin.files["tokenizer_config.json"].encode() == (source / "tokenizer_config.json").read_bytes()
    assert config_text(origin, saved_config(checkpoint.metadata), "float32") == (source / "config.json").read_text()
