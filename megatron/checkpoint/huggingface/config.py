"""config.json and tokenizer files from our Config and back."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from megatron import files
from megatron.arguments.flag_values import all_options, config_from_values
from megatron.arguments.validate import model_problems
from megatron.checkpoint import former
from megatron.checkpoint.huggingface.folder import write_json
from megatron.config import Config
from megatron.config.option import Option, is_derived
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.models.common.huggingface import HFFormat
from megatron.models.registry import FAMILIES, has_part, is_common_decoder, load
from megatron.models.t5.data import T5Tokens
from megatron.tokenizer import Tokenizer, build
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer, T5SentencePieceTokenizer

# Tokenizer files of a Hugging Face folder, and the ids of its control tokens.
#
# | our tokenizer | files |
# |---|---|
# | one that the `tokenizers` library runs | tokenizer.json; of GPT2BPETokenizer vocab.json and merges.txt too |
# | T5SentencePiece, or SentencePiece of a T5, that cuts as T5's does | spiece.model |
# | any other SentencePiece | spiece.model, which no class of theirs reads exactly as it is |
# | CPM1, CPM2 | none: words are cut before pieces are |
#
# ``tokenizer_config.json`` names class and control tokens in the first two cases. On the way back a ``vocab.txt`` is
# read too, where there is no ``tokenizer.json``: as BertWordPiece, lower case as ``tokenizer_config.json`` says.

JSON, SPIECE, VOCAB, MERGES, SETTINGS = (
    "tokenizer.json", "spiece.model", "vocab.json", "merges.txt", "tokenizer_config.json",
)  # fmt: skip
VOCAB_TEXT = "vocab.txt"  # of BERT
_COPIED = (JSON, VOCAB_TEXT, SPIECE, VOCAB, MERGES, SETTINGS, "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True)
class Vocabulary:
    """A run's tokenizer, and for T5 where its control tokens lie."""

    tokenizer: Tokenizer
    t5: T5Tokens | None

    def ids(self) -> dict[str, int | None]:
        """Return the ids that config.json and generation_config.json name."""
        if self.t5 is not None:
            t5 = self.t5
            return {"eos_token_id": t5.eos_id, "pad_token_id": t5.pad_id, "decoder_start_token_id": t5.start_id}
        eod = self.tokenizer.eod_id if self.tokenizer.has_eod else None
        return {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": self.tokenizer.pad_id}


def unknown_ids(config: Config) -> dict[str, int | None]:
    """Return what stands for ``Vocabulary.ids`` where there is no tokenizer: left out, theirs would count."""
    first = "decoder_start_token_id" if config.own.is_encoder_decoder else "bos_token_id"
    return {first: None, "eos_token_id": None, "pad_token_id": None}


def vocabulary_of(config: Config, tokenizer_path: Path | None) -> Vocabulary | None:
    """Return the tokenizer of the run, or that of ``tokenizer_path``; None where neither is named.

    Raises:
        DataError: it cannot be read.
        ConfigError: it has more tokens than the model.
    """
    named = config.data
    if tokenizer_path is not None:
        named = replace(named, tokenizer_path=str(tokenizer_path), vocab_file=None, merge_file=None)
        if named.tokenizer_type == "GPT2BPETokenizer" or tokenizer_path.suffix == ".json":
            named = replace(named, tokenizer_type=None)
    if not (named.tokenizer_path or named.vocab_file):
        return None
    tokenizer = build(
        named.tokenizer_type,
        vocab_file=named.vocab_file,
        merge_file=named.merge_file,
        tokenizer_path=named.tokenizer_path,
    )
    has_more = config.own.is_encoder_decoder
    t5 = load(config.family, "data").special_tokens(tokenizer, config) if has_more else None
    size, rows = max(tokenizer.vocab_size, t5.vocab_size if t5 else 0), config.model.vocab_size or 0
    if size > rows:
        raise ConfigError(
            f"the tokenizer must not have more tokens than the model, got {size} in {tokenizer.paths[0]} and {rows} "
            "rows. Name the run's own with --tokenizer-path"
        )
    return Vocabulary(tokenizer, t5)


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> str | None:
    """Write the files of the table above; return why there is less than a tokenizer, None where it is whole."""
    tokenizer, t5 = vocabulary.tokenizer, vocabulary.t5
    if isinstance(tokenizer, LibraryTokenizer):
        return _write_library(folder, tokenizer, vocabulary)
    if type(tokenizer) not in (SentencePieceTokenizer, T5SentencePieceTokenizer):
        return "its words are cut before they become pieces, for which Hugging Face has no files"
    _copy(tokenizer.paths[0], folder / SPIECE)
    if t5 is None:
        return f"{SPIECE} is there, but no class of Hugging Face reads it as a GPT-2's: use the sentencepiece library"
    if t5.modes:
        return f"{SPIECE} is there, but T5Tokenizer has no mode tokens of several --denoisers"
    if not _cuts_as_t5(tokenizer.paths[0]):
        return f"{SPIECE} is there, but T5Tokenizer would cut text into other pieces: use the sentencepiece library"
    names = [f"<extra_id_{number}>" for number in range(len(t5.sentinels))]
    added = sum(SentencePieceTokenizer.token_to_id(tokenizer, name) is None for name in names)  # type: ignore[arg-type]
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": added}
    write_json(folder / SETTINGS, {**settings, **_names(vocabulary)})
    return None


def _cuts_as_t5(model: Path) -> bool:
    """Return whether a word gets a blank before it, several blanks are one, and no bytes stand for characters."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    has_bytes = any(library.is_byte(token) for token in range(library.get_piece_size()))
    return not has_bytes and "".join(library.encode("a  a", out_type=str)) == "\u2581a\u2581a"


def _write_library(folder: Path, tokenizer: LibraryTokenizer, vocabulary: Vocabulary) -> str | None:
    library = tokenizers.Tokenizer.from_str(tokenizer.description)
    added = {} if vocabulary.t5 is None else _appended(tokenizer, vocabulary.t5)
    library.add_special_tokens(list(added))
    if not added and [path.suffix for path in tokenizer.paths] == [".json"]:
        _copy(tokenizer.paths[0], folder / JSON)  # byte for byte: token files know their tokenizer by its bytes
    else:
        files.write_bytes(folder / JSON, library.to_str(pretty=True).encode())
    if [path.suffix for path in tokenizer.paths] == [".json", ".txt"]:
        for path, name in zip(tokenizer.paths, (VOCAB, MERGES), strict=True):
            _copy(path, folder / name)
    write_json(folder / SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", **_names(vocabulary)})
    if any(library.token_to_id(name) != token for name, token in added.items()):
        return f"the ids of {JSON} have gaps, so that sentinels and modes have other ids there than in the run"
    return None


def _appended(tokenizer: Tokenizer, t5: T5Tokens) -> dict[str, int]:
    """Return the ids that the run put behind the vocabulary by a name for each, in their order."""
    names = {token: f"<extra_id_{number}>" for number, token in enumerate(t5.sentinels)}
    names.update({token: f"<mode_{kind}>" for kind, token in t5.modes.items()})
    return {names[token]: token for token in sorted(names) if token >= tokenizer.vocab_size}


def _names(vocabulary: Vocabulary) -> dict[str, str]:
    """Return the control tokens of ``tokenizer_config.json`` by name."""
    by_id = {token: name for name, token in reversed(vocabulary.tokenizer.control_tokens.items())}
    ids = {**vocabulary.ids(), "unk_token_id": vocabulary.tokenizer.unk_id}
    ids.pop("decoder_start_token_id", None)
    return {
        kind.removesuffix("_id"): by_id[token] for kind, token in ids.items() if token is not None and token in by_id
    }


def _copy(source: Path, target: Path) -> None:
    try:
        files.write_bytes(target, source.read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{source} is gone: {error}") from error


def copy_files(source: Path, target: Path) -> bool:
    """Copy the tokenizer's files of the folder ``source`` into ``target``; return whether there are any."""
    found = [name for name in _COPIED if (source / name).is_file()]
    if not ({JSON, VOCAB_TEXT, SPIECE} & {*found} or {VOCAB, MERGES} <= {*found}):
        return False
    files.make_folder(target)
    for name in found:
        shutil.copyfile(source / name, target / name)
    return True


def fields_of(folder: Path, place: Path) -> dict[str, Any]:
    """Return the tokenizer's fields of our configuration for the files in ``folder``, which will be ``place``."""
    if (folder / JSON).exists():
        return {"tokenizer_type": "TokenizersJSON", "tokenizer_path": str(place)}
    if (folder / VOCAB_TEXT).exists():
        return {"tokenizer_type": "BertWordPiece", "tokenizer_path": str(place)}
    if (folder / SPIECE).exists():
        return {"tokenizer_type": "T5SentencePiece", "tokenizer_path": str(place)}
    pair = {"vocab_file": str(place / VOCAB), "merge_file": str(place / MERGES)}
    return {"tokenizer_type": "GPT2BPETokenizer", **pair}


def tokenizer_difference(source: Path, config: Config) -> str | None:
    """Return how the tokenizer of the run differs from that of the folder ``source``, None where ids mean the same.

    Raises:
        DataError: one of the two is not there, or cannot be read.
    """
    theirs, ours = _tokenizer_in(source), vocabulary_of(config, None)
    if ours is None:
        raise DataError("the run names no tokenizer")
    pairs = [
        (ours.tokenizer.piece(token), theirs.piece(token))
        for token in range(min(ours.tokenizer.vocab_size, theirs.vocab_size))
    ]
    other = [pair for pair in pairs if None not in pair and pair[0] != pair[1]]
    if other:
        one, another = other[0]
        return (
            f"{len(other)} of {len(pairs)} ids stand for other tokens, the first for {one!r} and there for {another!r}"
        )
    if ours.tokenizer.vocab_size != theirs.vocab_size:
        return f"it has {ours.tokenizer.vocab_size} tokens, and that of the folder {theirs.vocab_size}"
    return None


def _tokenizer_in(source: Path) -> Tokenizer:
    if not any((source / name).is_file() for name in (JSON, VOCAB_TEXT, SPIECE, VOCAB)):
        raise DataError(f"{source} holds none of {JSON}, {SPIECE}, {VOCAB} and {VOCAB_TEXT}")
    named = fields_of(source, source)
    return build(named.pop("tokenizer_type"), **named)


# The Hugging Face formats of the families.


def formats_of(family: str) -> tuple[HFFormat, ...]:
    """Return the formats of ``family`` there: its FORMAT, or its FORMATS, one for each model type.

    Raises:
        CheckpointError: it has none.
    """
    known = families_with_format()
    if family not in known:
        title = FAMILIES[family].title if family in FAMILIES else family
        have = ", ".join(FAMILIES[name].title for name in known)
        raise CheckpointError(f"{title} has no Hugging Face form here; {have} have one")
    part = load(family, "huggingface")
    if hasattr(part, "FORMATS"):
        return tuple(part.FORMATS)
    if not hasattr(part, "FORMAT"):
        warnings.warn(f"{part.__name__}.FORM is called FORMAT now", DeprecationWarning, stacklevel=2)
    return (getattr(part, "FORMAT", None) or part.FORM,)


def format_of(config: Config, model_type: str | None = None) -> HFFormat:
    """Return the format there that holds the model of ``config``.

    It is the first of its family that holds all of its settings; where none does, and it is the common decoder, the
    first of the other decoders. So a run of pretrain_gpt2.py with the settings of a Qwen 3 is a Qwen 3 there.

    Args:
        model_type: the one to take; None: the first that fits.

    Raises:
        CheckpointError: none fits; it says what stands against the nearest.
    """
    known = [one for family in _relatives(config.family) for one in formats_of(family)]
    if model_type is not None:
        known = [one for one in known if model_type in one.model_types]
        if not known:
            raise CheckpointError(
                f"--model-type must be one that a model of this family can have, got {model_type!r}. Use one of "
                f"{', '.join(kind for family in _relatives(config.family) for kind in types_of(family))}"
            )
    against: dict[str, list[str]] = {}
    for one in known:
        problems = list(one.problems(config))
        if not problems:
            return one
        against[one.model_types[0]] = problems
    fewest = min(len(problems) for problems in against.values())
    nearest = [f"{kind}: {'; '.join(problems)}" for kind, problems in against.items() if len(problems) == fewest]
    raise CheckpointError(f"this model has no Hugging Face form; the nearest is {', or '.join(nearest)}")


def _relatives(family: str) -> list[str]:
    """Return the families whose formats may hold a model of ``family``: itself, and of the common decoder the others.

    Raises:
        CheckpointError: there is none.
    """
    if not is_common_decoder(family):
        return [family] if formats_of(family) else []
    own = [family] if has_part(family, "huggingface") else []
    return own + [name for name in families_with_format() if name != family and is_common_decoder(name)]


def types_of(family: str) -> list[str]:
    """Return the values of ``model_type`` that a model of ``family`` is read from and may be written as."""
    return [kind for one in formats_of(family) for kind in one.model_types]


def families_with_format() -> list[str]:
    """Return the families that have a format there."""
    return [family for family in FAMILIES if has_part(family, "huggingface")]


def family_by_type() -> dict[str, str]:
    """Return their model_type -> our family."""
    return {kind: family for family in families_with_format() for kind in types_of(family)}


# ``config.json`` of a Hugging Face folder from our configuration, and back.
#
# What the fields are stands in the file of each family: ``forms`` lists them.

_TOKENIZER = ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file")


def saved_config(state: Mapping[str, Any]) -> Config:
    """Return the configuration that a checkpoint's ``state`` keeps: what says what the model is, and the tokenizer.

    Raises:
        CheckpointError: there is none, or it is of a family that this program does not know.
    """
    try:
        saved, sizes = former.settings(state["config"]), state["model"]
        sections = ("model", saved["family"], "data")
        values = {key: value for name in sections for key, value in saved.get(name, {}).items()}
        known = {option.name for _, option in all_options()}
        values = {key: value for key, value in values.items() if key in known}
        config = config_from_values(values, family=saved["family"])
        return replace(config, model=replace(config.model, vocab_size=sizes["vocab_size"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint does not say which model it holds ({type(error).__name__}: {error}); only those of "
            f"{', '.join(FAMILIES[family].title for family in families_with_format())} that the pretraining scripts "
            "save can be converted"
        ) from error


def config_to_huggingface(config: Config, dtype: str, model_type: str | None = None) -> dict[str, Any]:
    """Return the fields of ``config.json``, ids of control tokens left out.

    Args:
        model_type: as of ``format_of``.

    Raises:
        CheckpointError: listing everything of the model that has no form there.
    """
    return {**format_of(config, model_type).fields(config), "dtype": dtype}


def config_from_huggingface(theirs: Mapping[str, Any]) -> Config:
    """Return our configuration of the model that ``config.json`` describes.

    Raises:
        CheckpointError: another architecture, a setting that our models do not have, a size that is missing; or listing
            every value that no flag would take.
    """
    kind, families = theirs.get("model_type"), family_by_type()
    if kind is None or kind not in families:
        raise CheckpointError(f"model_type must be one of {', '.join(families)}, got {kind!r}: another architecture")
    try:
        (hf_format,) = (one for one in formats_of(families[kind]) if kind in one.model_types)
        values = _with_whole_numbers(hf_format.values(dict(theirs)))
        found = list(_out_of_range(values))
        config = Config() if found else config_from_values(values, family=families[kind])
        found = found or list(model_problems(replace(config, given=tuple(values))))
    except KeyError as error:
        raise CheckpointError(f"config.json must hold {error} for a {kind}; it is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json does not describe a {kind}: {error}") from error
    if found:
        raise CheckpointError(f"config.json does not describe a {kind} that we have: {'; '.join(found)}")
    return config


def _with_whole_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with 16.0 as 16 where a whole number is wanted."""
    whole = {option.name for _, option in all_options() if option.kind == "int"}
    return {
        name: int(value) if name in whole and isinstance(value, float) and value.is_integer() else value
        for name, value in values.items()
    }


def _out_of_range(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no flag would take."""
    for _, option in all_options():
        value = values.get(option.name)
        problem = option.problem(value, option.flag or option.name) if value is not None else None
        if problem and not is_derived(option, value):
            yield problem


def flags_of(config: Config) -> list[str]:
    """Return the flags with which a pretraining script builds the model of ``config`` and reads its tokenizer."""
    files = {name: getattr(config.data, name) for name in _TOKENIZER}
    beside = {name: getattr(config.model, name) for name in ("max_position_embeddings", "layernorm_epsilon")}
    given, usual = {**config.identity(), **beside, **files}, dict(config.own.DEFAULTS)
    usual["num_query_groups"] = config.model.num_attention_heads
    words: list[str] = []
    for _, option in all_options():
        value = given.get(option.name)
        if value is not None and value != usual.get(option.name, option.default):
            words += _words(option, value)
    return words


def _words(option: Option, value: Any) -> list[str]:
    """Return how a command line says ``value``."""
    if value is True and option.flag:
        return [option.flag]
    if isinstance(value, bool):
        return [flag for flag, constant in option.constants.items() if constant is value][:1]
    return [option.flag, str(value)]
