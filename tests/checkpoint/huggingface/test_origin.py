"""The small files of a Hugging Face folder after import and export, with and without training in between."""

from __future__ import annotations

import copy
import json
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
from tests.helpers.instruct_folders import files_in, write_folder

TYPES = [name for name in family_by_type() if name in transformers.CONFIG_MAPPING]
IN_SHORT_RUN = {"llama"}


def imported(folder: Path, run: Path) -> Checkpoint:
    import_folder(folder, run)
    return open_folder(run)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a LLaMA, which no test changes."""
    return write_folder(tmp_path_factory.mktemp("folders") / "source")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same as a checkpoint of ours."""
    return imported(source, tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in IN_SHORT_RUN else pytest.mark.slow) for name in TYPES]
)
def test_a_round_trip_without_training_changes_no_byte(model_type: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", model_type)
    export(imported(source, tmp_path / "run"), tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(source)
    wanted, found = read_tensors(source), read_tensors(tmp_path / "back")
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    assert read_source(tmp_path / "back", family_by_type()[model_type]) is not None


def test_transformers_reads_the_same_tokens_and_generation_settings_from_both(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", dtype=torch.bfloat16)
    export(imported(source, tmp_path / "run"), tmp_path / "back")
    folders = (source, tmp_path / "back")
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(place, local_files_only=True) for place in folders)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "model_max_length", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name) and getattr(ours, name) is not None
    assert set(ours.chat_template) == {"default", "tool_use"}
    one, other = (transformers.GenerationConfig.from_pretrained(place, local_files_only=True) for place in folders)
    assert one.to_dict() == other.to_dict() and len(one.eos_token_id) == 2


def trained(checkpoint: Checkpoint, **sections: dict[str, Any]) -> Checkpoint:
    """Return ``checkpoint`` as a run would have saved it with other settings."""
    config = saved_config(checkpoint.metadata)
    for section, values in sections.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return with_state(checkpoint, model=config.identity(), config=config.to_dict())


def with_state(checkpoint: Checkpoint, **entries: Any) -> Checkpoint:
    changed = copy.copy(checkpoint)
    changed.metadata = {**checkpoint.metadata, **entries}
    return changed


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_settings_that_a_run_changed_are_replaced_and_no_others(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", rope_scaling=None, rope_theta=5e5)
    checkpoint = imported(source, tmp_path / "run")
    model = {"rotary_base": 2e6, "max_position_embeddings": 4096, "attention_dropout": 0.25}
    export(trained(checkpoint, model=model), tmp_path / "back", dtype="bf16")
    before, after = read(source), read(tmp_path / "back")
    assert after["max_position_embeddings"] == 4096 and after["dtype"] == "bfloat16"
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert theirs.rope_parameters["rope_theta"] == 2e6 and theirs.attention_dropout == 0.25
    changed = {"max_position_embeddings", "dtype", "rope_theta", "rope_scaling", "rope_parameters", "attention_dropout"}
    assert {key for key in {*before, *after} if before.get(key) != after.get(key)} <= changed
    assert files_in(tmp_path / "back")["generation_config.json"] == files_in(source)["generation_config.json"]


def test_the_type_of_weights_is_stated_by_the_name_that_the_folder_has(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    text = read(source)
    text["torch_dtype"] = text.pop("dtype")
    (source / "config.json").write_text(json.dumps(text))
    checkpoint = imported(source, tmp_path / "run")
    export(checkpoint, tmp_path / "back", dtype="bf16")
    assert read(tmp_path / "back") == {**text, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("is_gone", "layout"), [(False, "files"), (True, "files"), (False, "text in settings"), (False, "list in settings")]
)
def test_a_template_given_to_fine_tuning_replaces_the_default_one(is_gone: bool, layout: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    if layout != "files":
        put_templates_into_settings(source, is_list=layout.startswith("list"))
    checkpoint = imported(source, tmp_path / "run")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    checkpoint = trained(checkpoint, data={"sft": ("a.jsonl",), "chat_template": str(tmp_path / "chatml.jinja")})
    if is_gone:
        (tmp_path / "chatml.jinja").unlink()
        checkpoint = with_state(checkpoint, **{CHAT_TEMPLATE: CHATML})
    done = export(checkpoint, tmp_path / "back")
    assert done.notes == []
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    if layout == "text in settings":
        assert ours.chat_template == CHATML
    else:
        assert ours.chat_template == {"default": CHATML, "tool_use": "{{ tools }}" + LLAMA3}
    assert ours.model_max_length == 131072 and ours.bos_token == "<|begin_of_text|>"
    turn, before = ours.convert_tokens_to_ids("<|im_end|>"), read(source, "generation_config.json")
    after = read(tmp_path / "back", "generation_config.json")
    assert after == {**before, "eos_token_id": [turn, *before["eos_token_id"]]}
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def put_templates_into_settings(folder: Path, is_list: bool) -> None:
    """Move the templates into tokenizer_config.json, as older folders have them."""
    settings = read(folder, "tokenizer_config.json")
    tools = folder / "additional_chat_templates" / "tool_use.jinja"
    named = [{"name": "default", "template": LLAMA3}, {"name": "tool_use", "template": tools.read_text()}]
    settings["chat_template"] = named if is_list else LLAMA3
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tools.unlink()
    tools.parent.rmdir()
    (folder / "chat_template.jinja").unlink()


def test_fine_tuning_with_the_template_of_the_folder_changes_nothing(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = trained(checkpoint, data={"sft": ("a.jsonl",)})
    export(checkpoint, tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(source)


def test_a_template_that_is_lost_is_reported_and_the_old_one_is_not_written(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = trained(checkpoint, data={"sft": ("a.jsonl",), "chat_template": str(tmp_path / "gone.jinja")})
    done = export(checkpoint, tmp_path / "back")
    assert "chat template" in done.notes[0] and "gone.jinja" in done.notes[0]
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    assert "default" not in (ours.chat_template or {})


def test_small_files_come_from_the_checkpoint_where_the_tokenizer_has_none(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    export(checkpoint, tmp_path / "back", tokenizer_path=bare)
    assert files_in(tmp_path / "back") == files_in(source)


def test_another_vocabulary_brings_its_own_ids(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other")
    library = json.loads((other / "tokenizer.json").read_text())
    names = {"<|eot_id|>": "<|end|>"}
    for token in library["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    (other / "tokenizer.json").write_text(json.dumps(library))
    done = export(checkpoint, tmp_path / "back", tokenizer_path=other)
    assert "the vocabulary differs from the imported folder's" in done.notes[0]
    end = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert read(tmp_path / "back")["eos_token_id"] == end
    generation = read(tmp_path / "back", "generation_config.json")
    assert generation["eos_token_id"] == end and generation["temperature"] == 0.6
    assert not (tmp_path / "back" / "chat_template.jinja").exists()


def test_settings_that_another_type_has_take_only_the_ids_along(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = trained(checkpoint, model={"window_size": 7})
    done = export(checkpoint, tmp_path / "back")
    assert "no longer fit the model type llama: the export is a mistral" in done.notes[0]
    after = read(tmp_path / "back")
    assert after["model_type"] == "mistral" and after["eos_token_id"] == read(source)["eos_token_id"]
    assert "company" not in after


def test_python_files_of_a_folder_are_not_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", auto_map={"AutoConfig": "configuration_acme.AcmeConfig"})
    export(imported(source, tmp_path / "run"), tmp_path / "back")
    wanted = read(source)
    del wanted["auto_map"]
    assert read(tmp_path / "back") == wanted


def test_long_files_are_compressed_and_come_back(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    settings = read(source, "tokenizer_config.json")
    settings["long"] = [f"é{number}" for number in range(9000)]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = imported(source, tmp_path / "run")
    entry = checkpoint.metadata[STATE]["files"]
    assert isinstance(entry["config.json"], str) and len(json.dumps(entry["tokenizer_config.json"])) < 60_000
    origin = origin_of(checkpoint.metadata)
    assert origin is not None
    assert origin.files["tokenizer_config.json"].encode() == (source / "tokenizer_config.json").read_bytes()
    assert config_text(origin, saved_config(checkpoint.metadata), "float32") == (source / "config.json").read_text()
