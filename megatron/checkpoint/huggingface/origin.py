"""The small files of the Hugging Face folder that a run started from, carried through checkpoints to its exports.

Weights and sizes have settings of ours; most of the other content of such a folder has none: the ids of control tokens
(several end tokens among them), chat templates, generation settings, unknown keys of config.json. A checkpoint keeps
the texts of these files in its manifest, so that they reach every export whatever the layout, the format of the
checkpoint or the place (a disk or an object store) are.

| file | in an export |
|---|---|
| config.json | as it was, except for the keys of the settings that differ from those of the folder |
| generation_config.json | as it was; after --sft the token that ends a turn is added to ``eos_token_id`` |
| tokenizer_config.json, special_tokens_map.json, added_tokens.json | as they were |
| chat_template.jinja, additional_chat_templates/*.jinja | as they were; --chat-template replaces the first |

With another tokenizer than that of the folder, the ids are those of the tokenizer of the run.
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
"""Entry of a checkpoint's state."""
CARRIED = (STATE, "hugging_face_type", "hugging_face_ids")
"""Entries that a run takes over from the checkpoint that it loads; the last two are those of earlier versions."""

_LONGEST_PLAIN = 20_000
_ID = re.compile(r"\w*_token_ids?")
_DROPPED = ("auto_map",)  # names Python files of the folder, which are not carried


@dataclass(frozen=True)
class Origin:
    """The small files of a Hugging Face folder.

    Args:
        files: path in the folder -> text.
        pieces: id of a control token that the folder names -> its text in the folder's tokenizer; empty without one.
    """

    files: Mapping[str, str]
    pieces: Mapping[int, str] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return _object(self.files.get(CONFIG))

    @property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if there is none."""
        return _object(self.files.get(GENERATION))

    @property
    def model_type(self) -> str | None:
        return self.config.get("model_type")

    @property
    def tokenizer_files(self) -> dict[str, str]:
        """Path -> text of the files that belong to the tokenizer."""
        return {name: text for name, text in self.files.items() if name not in (CONFIG, GENERATION)}

    def state(self) -> dict[str, Any]:
        """Return the checkpoint's entry, as JSON can hold it. Long texts are compressed."""
        files = {name: text if len(text) <= _LONGEST_PLAIN else _packed(text) for name, text in self.files.items()}
        return {"files": files, "pieces": {str(token): piece for token, piece in self.pieces.items()}}

    def has_tokens_of(self, piece_of: Callable[[int], str | None] | None, size: int) -> bool:
        """Return True if the ids of the folder's control tokens stand for the same tokens in another vocabulary.

        Args:
            piece_of: the text of an id there; None: unknown.
            size: number of ids there.
        """
        named = set(self.pieces) or {token for ids in _ids(self.config).values() for token in _listed(ids)}
        if any(not 0 <= token < size for token in named):
            return False
        return piece_of is None or all(piece_of(token) == piece for token, piece in self.pieces.items())


def read_origin(folder: Path, pieces_of: Callable[[Iterable[int]], Mapping[int, str]] | None = None) -> Origin:
    """Return the small files of ``folder``, a Hugging Face folder.

    Args:
        pieces_of: the texts of ids in the folder's tokenizer.

    Raises:
        CheckpointError: a file is not UTF-8.
    """
    found = Origin({**_texts(folder, (CONFIG, GENERATION)), **tokenizer_texts(folder)})
    if pieces_of is None:
        return found
    fields = (*_ids(found.config).values(), *_ids(found.generation).values())
    return Origin(found.files, pieces_of(sorted({token for ids in fields for token in _listed(ids)})))


def origin_of(state: Mapping[str, Any]) -> Origin | None:
    """Return the origin that a checkpoint's ``state`` keeps; None for a run that started from scratch.

    Raises:
        CheckpointError: the entry is damaged.
    """
    entry = state.get(STATE)
    if entry is None:
        return None
    try:
        files = {name: text if isinstance(text, str) else _unpacked(text) for name, text in entry["files"].items()}
        return Origin(files, {int(token): piece for token, piece in entry["pieces"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise CheckpointError(f"the checkpoint's entry {STATE!r} cannot be read: {error!r}") from error


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """Return path -> text of the small files of the tokenizer in ``folder``.

    Raises:
        CheckpointError: a file is not UTF-8.
    """
    templates = sorted(path.name for path in (folder / TEMPLATES).glob("*.jinja"))
    return _texts(folder, (*TOKENIZER_TEXTS, *(f"{TEMPLATES}/{name}" for name in templates)))


def with_template(files: Mapping[str, str], text: str | None) -> dict[str, str]:
    """Return tokenizer ``files`` with ``text`` as the default chat template; templates of other names stay.

    Args:
        text: None: without a default template.
    """
    changed = {name: content for name, content in files.items() if name not in (TEMPLATE, "chat_template.json")}
    settings = _object(changed.get(SETTINGS))
    templates = settings.pop("chat_template", None)
    if templates is not None:
        changed[SETTINGS] = as_json(settings)
    for one in templates if isinstance(templates, list) else ():
        if one.get("name") != "default":
            changed[f"{TEMPLATES}/{one['name']}.jinja"] = one["template"]
    return changed if text is None else {**changed, TEMPLATE: text}


def as_json(content: Mapping[str, Any]) -> str:
    """Return the text of a JSON file as transformers writes it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


# config.json and generation_config.json of an export.


def config_text(
    origin: Origin, config: Config, dtype: str, ids: Mapping[str, Any] | None = None, model_type: str | None = None
) -> str:
    """Return config.json of ``config``: the folder's text, with the settings that differ from the folder's replaced.

    Args:
        dtype: type of the weights, as config.json names it.
        ids: replace the ids of control tokens; None: the folder's are kept.
        model_type: of the export. Of another type than the folder's only ids are carried.

    Raises:
        CheckpointError: the model has no Hugging Face form.
    """
    now, theirs = config_to_huggingface(config, dtype, model_type), origin.config
    if now["model_type"] != theirs.get("model_type"):
        return as_json({**now, **(_ids(theirs) if ids is None else ids)})
    merged = _merged(theirs, now, config, model_type)
    merged = {key: value for key, value in merged.items() if key not in _DROPPED}
    if ids is not None:
        merged = {**{key: value for key, value in merged.items() if not _ID.fullmatch(key)}, **ids}
    return origin.files[CONFIG] if merged == theirs else as_json(merged)


def _merged(theirs: dict[str, Any], now: dict[str, Any], config: Config, model_type: str | None) -> dict[str, Any]:
    """Return ``theirs`` with the keys replaced whose settings differ in ``now``."""
    stated = theirs.get("dtype") or theirs.get("torch_dtype") or "float32"
    then = config_to_huggingface(config_from_huggingface(theirs), stated, now["model_type"])
    changed = {key for key in {*then, *now} if key not in then or key not in now or then[key] != now[key]}
    for group in format_of(config, model_type).groups:
        changed |= group if changed & group else set()
    new = {key: now[key] for key in changed if key in now}
    if "dtype" in new and "torch_dtype" in theirs:
        new["torch_dtype"] = new["dtype"] if "dtype" in theirs else new.pop("dtype")
    kept = {key: new.get(key, value) for key, value in theirs.items() if key not in changed or key in new}
    wanted = config_from_huggingface(now)
    for candidate in ({**kept, **new}, {**theirs, **now}):
        try:
            if _is_same(config_from_huggingface(candidate), wanted):
                return candidate
        except CheckpointError:
            continue
    return {**now, **_ids(theirs)}


def _is_same(one: Config, other: Config) -> bool:
    return bool((one.model, one.own) == (other.model, other.own))


def generation_text(origin: Origin, stop_id: int | None, ids: Mapping[str, Any] | None = None) -> str | None:
    """Return generation_config.json of an export; None where the folder has none and config.json says the same.

    Args:
        stop_id: the token that ends a turn of the conversations that the run was trained on.
        ids: replace the ids of control tokens, the end of a turn included; None: the folder's are kept.
    """
    theirs = origin.generation
    if ids is not None:
        kept = {key: value for key, value in theirs.items() if not _ID.fullmatch(key)}
        return as_json({**(kept or {"_from_model_config": False}), **ids})
    ends = _listed(theirs.get("eos_token_id", origin.config.get("eos_token_id")))
    if stop_id is None or stop_id in ends:
        return origin.files.get(GENERATION)
    base = theirs or {"_from_model_config": False, **_ids(origin.config)}
    return as_json({**base, "eos_token_id": [stop_id, *ends] if ends else stop_id})


def _ids(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that hold ids of tokens."""
    return {key: value for key, value in content.items() if _ID.fullmatch(key)}


def _listed(ids: Any) -> list[int]:
    found = ids if isinstance(ids, list) else [ids]
    return [token for token in found if isinstance(token, int) and not isinstance(token, bool)]


def _texts(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return dict(_read(folder, names))


def _read(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            # bytes, since reading as text would change line ends
            yield name, (folder / name).read_bytes().decode("utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{folder / name} must be a text in UTF-8 that can be read: {error}") from error


def _object(text: str | None) -> dict[str, Any]:
    """Return the JSON object in ``text``; empty where there is none."""
    try:
        content = json.loads(text or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _packed(text: str) -> dict[str, str]:
    return {"zlib": base64.b64encode(zlib.compress(text.encode(), 9)).decode()}


def _unpacked(entry: Mapping[str, str]) -> str:
    return zlib.decompress(base64.b64decode(entry["zlib"])).decode()
