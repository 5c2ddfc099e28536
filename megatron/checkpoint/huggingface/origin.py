"""Small files of the Hugging Face folder that a run started from. Checkpoints store them, and exports restore them.

Our settings cover the weights and sizes of such a folder, but not most of its other content: ids of control tokens
(such as several end tokens), chat templates, generation settings, unknown keys of config.json. A checkpoint therefore
stores the texts of these files in its manifest. Exports can read them there, independent of the layout, format and
location (disk or object store) of the checkpoint.

| file | in an export |
|---|---|
| config.json | unchanged, except for settings that the run has changed |
| generation_config.json | unchanged; after --sft the token that ends a turn is added to ``eos_token_id`` |
| tokenizer_config.json, special_tokens_map.json, added_tokens.json | unchanged |
| chat_template.jinja, additional_chat_templates/*.jinja | unchanged; --chat-template replaces the first |

If the run has another tokenizer than the folder, control tokens get the ids of the run's tokenizer.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.huggingface.config import (
    CONFIG,
    config_from_huggingface,
    config_to_huggingface,
    format_of,
)
from megatron.config import Config
from megatron.errors import CheckpointError

GENERATION = "generation_config.json"
SETTINGS, TEMPLATE, TEMPLATES = "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates"
TOKENIZER_TEXTS = (SETTINGS, "special_tokens_map.json", "added_tokens.json", TEMPLATE, "chat_template.json")
STATE = "hugging_face"
"""Key of the metadata entry with these files."""
COPIED_ENTRIES = (STATE, "hugging_face_type", "hugging_face_ids")
"""Metadata entries that a run copies from the loaded checkpoint; earlier versions wrote the last two entries."""

_MAX_UNCOMPRESSED_CHARS = 20_000
_ID = re.compile(r"\w*_token_ids?")
_DROPPED = ("auto_map",)  # refers to Python files in the folder, which are not stored


@dataclass(frozen=True)
class Origin:
    """The small files of a Hugging Face folder.

    Args:
        files: path in the folder -> text.
        token_texts: control token id in the folder's settings -> text in the folder's tokenizer; empty
            without a tokenizer.
    """

    files: Mapping[str, str]
    token_texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        return _parse_object(self.files.get(CONFIG))

    @property
    def generation(self) -> dict[str, Any]:
        """Content of generation_config.json; empty without this file."""
        return _parse_object(self.files.get(GENERATION))

    @property
    def model_type(self) -> str | None:
        return self.config.get("model_type")

    @property
    def tokenizer_files(self) -> dict[str, str]:
        """Path -> text of the tokenizer's files."""
        return {name: text for name, text in self.files.items() if name not in (CONFIG, GENERATION)}

    def state(self) -> dict[str, Any]:
        """Build the metadata entry as JSON-serializable data. Long texts are compressed."""
        files = {
            name: text if len(text) <= _MAX_UNCOMPRESSED_CHARS else _compress(text) for name, text in self.files.items()
        }
        return {"files": files, "pieces": {str(token): token_text for token, token_text in self.token_texts.items()}}

    def has_same_tokens(self, text_of: Callable[[int], str | None] | None, size: int) -> bool:
        """Check if the folder's control token ids have the same texts in another vocabulary.

        Args:
            text_of: returns the text of an id in the other vocabulary; None if the texts are unknown.
            size: size of the other vocabulary.
        """
        control_ids = set(self.token_texts) or {
            token for ids in _token_id_fields(self.config).values() for token in _to_id_list(ids)
        }
        if any(not 0 <= token < size for token in control_ids):
            return False
        return text_of is None or all(text_of(token) == token_text for token, token_text in self.token_texts.items())


def read_origin(folder: Path, get_token_texts: Callable[[Iterable[int]], Mapping[int, str]] | None = None) -> Origin:
    """Read the small files of the Hugging Face folder ``folder``.

    Args:
        get_token_texts: returns the texts of ids in the folder's tokenizer.

    Raises:
        CheckpointError: a file is not UTF-8.
    """
    origin = Origin({**_read_texts(folder, (CONFIG, GENERATION)), **tokenizer_texts(folder)})
    if get_token_texts is None:
        return origin
    id_fields = (*_token_id_fields(origin.config).values(), *_token_id_fields(origin.generation).values())
    return Origin(origin.files, get_token_texts(sorted({token for ids in id_fields for token in _to_id_list(ids)})))


def origin_of(state: Mapping[str, Any]) -> Origin | None:
    """Restore the origin in a checkpoint's ``state``; None if the run did not start from a Hugging Face folder.

    Raises:
        CheckpointError: the entry is damaged.
    """
    entry = state.get(STATE)
    if entry is None:
        return None
    try:
        files = {name: text if isinstance(text, str) else _decompress(text) for name, text in entry["files"].items()}
        return Origin(files, {int(token): token_text for token, token_text in entry["pieces"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise CheckpointError(f"the checkpoint's entry {STATE!r} cannot be read: {error!r}") from error


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """Read the small tokenizer files in ``folder`` as path -> text.

    Raises:
        CheckpointError: a file is not UTF-8.
    """
    templates = sorted(path.name for path in (folder / TEMPLATES).glob("*.jinja"))
    return _read_texts(folder, (*TOKENIZER_TEXTS, *(f"{TEMPLATES}/{name}" for name in templates)))


def with_template(files: Mapping[str, str], text: str | None) -> dict[str, str]:
    """Return tokenizer ``files`` with ``text`` as the default chat template; named templates are kept.

    Args:
        text: the template; None removes the default template.
    """
    changed = {name: content for name, content in files.items() if name not in (TEMPLATE, "chat_template.json")}
    settings = _parse_object(changed.get(SETTINGS))
    templates = settings.pop("chat_template", None)
    if templates is not None:
        changed[SETTINGS] = to_json_text(settings)
    for template in templates if isinstance(templates, list) else ():
        if template.get("name") != "default":
            changed[f"{TEMPLATES}/{template['name']}.jinja"] = template["template"]
    return changed if text is None else {**changed, TEMPLATE: text}


def to_json_text(content: Mapping[str, Any]) -> str:
    """Format ``content`` as the text of a JSON file, in the same style as transformers."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


# config.json and generation_config.json of an export.


def config_text(
    origin: Origin, config: Config, dtype: str, ids: Mapping[str, Any] | None = None, model_type: str | None = None
) -> str:
    """Format an export's config.json: the folder's config.json with the changed settings replaced.

    Args:
        dtype: weight type, as config.json names it.
        ids: replacements for control token ids; None keeps the folder's.
        model_type: the export's model type. If it differs from the folder's, only ids are taken from the folder.

    Raises:
        CheckpointError: no Hugging Face format fits the model.
    """
    current, folder_config = config_to_huggingface(config, dtype, model_type), origin.config
    if current["model_type"] != folder_config.get("model_type"):
        return to_json_text({**current, **(_token_id_fields(folder_config) if ids is None else ids)})
    merged = _merge_config(folder_config, current, config, model_type)
    merged = {key: value for key, value in merged.items() if key not in _DROPPED}
    if ids is not None:
        merged = {**{key: value for key, value in merged.items() if not _ID.fullmatch(key)}, **ids}
    return origin.files[CONFIG] if merged == folder_config else to_json_text(merged)


def _merge_config(
    folder_config: dict[str, Any], current: dict[str, Any], config: Config, model_type: str | None
) -> dict[str, Any]:
    """Return the folder's config.json (``folder_config``), updated with the run's settings that differ."""
    folder_dtype = folder_config.get("dtype") or folder_config.get("torch_dtype") or "float32"
    folder_fields = config_to_huggingface(config_from_huggingface(folder_config), folder_dtype, current["model_type"])
    changed = {
        key
        for key in {*folder_fields, *current}
        if key not in folder_fields or key not in current or folder_fields[key] != current[key]
    }
    for group in format_of(config, model_type).key_groups:
        changed |= group if changed & group else set()
    replacements = {key: current[key] for key in changed if key in current}
    if "dtype" in replacements and "torch_dtype" in folder_config:
        replacements["torch_dtype"] = replacements["dtype"] if "dtype" in folder_config else replacements.pop("dtype")
    base = {
        key: replacements.get(key, value)
        for key, value in folder_config.items()
        if key not in changed or key in replacements
    }
    expected_config = config_from_huggingface(current)
    for candidate in ({**base, **replacements}, {**folder_config, **current}):
        try:
            if _is_same_model(config_from_huggingface(candidate), expected_config):
                return candidate
        except CheckpointError:
            continue
    return {**current, **_token_id_fields(folder_config)}


def _is_same_model(first: Config, second: Config) -> bool:
    return bool((first.model, first.family_config) == (second.model, second.family_config))


def generation_text(origin: Origin, stop_id: int | None, ids: Mapping[str, Any] | None = None) -> str | None:
    """Format an export's generation_config.json; None if the export needs no such file.

    Args:
        stop_id: the token that ends a turn in the run's training conversations.
        ids: replacements for control token ids, including the end of a turn; None keeps the folder's.
    """
    folder_settings = origin.generation
    if ids is not None:
        other_settings = {key: value for key, value in folder_settings.items() if not _ID.fullmatch(key)}
        return to_json_text({**(other_settings or {"_from_model_config": False}), **ids})
    end_ids = _to_id_list(folder_settings.get("eos_token_id", origin.config.get("eos_token_id")))
    if stop_id is None or stop_id in end_ids:
        return origin.files.get(GENERATION)
    base = folder_settings or {"_from_model_config": False, **_token_id_fields(origin.config)}
    return to_json_text({**base, "eos_token_id": [stop_id, *end_ids] if end_ids else stop_id})


def _token_id_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Select the entries whose values are token ids."""
    return {key: value for key, value in content.items() if _ID.fullmatch(key)}


def _to_id_list(ids: Any) -> list[int]:
    id_list = ids if isinstance(ids, list) else [ids]
    return [token for token in id_list if isinstance(token, int) and not isinstance(token, bool)]


def _read_texts(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return dict(_iter_texts(folder, names))


def _iter_texts(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            # read as bytes, since text mode would convert line endings
            yield name, (folder / name).read_bytes().decode("utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder / name} must be a readable UTF-8 text file: {error}") from error


def _parse_object(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; an empty dictionary if ``text`` is not a JSON object."""
    try:
        content = json.loads(text or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _compress(text: str) -> dict[str, str]:
    return {"zlib": base64.b64encode(zlib.compress(text.encode(), 9)).decode()}


def _decompress(entry: Mapping[str, str]) -> str:
    return zlib.decompress(base64.b64decode(entry["zlib"])).decode()
