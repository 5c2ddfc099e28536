"""DataConfig: corpora, tokenizer and splits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

from megatron import hub, object_store
from megatron.config.data_paths import join_words, parse_paths, parse_schedule
from megatron.config.option import option

SCRIPT_DATA = "none"
"""Value of --data-path if the script provides its own data; no file is opened."""
MOCK_DATA = "mock"
"""Value of --data-path for random tokens."""
TEXT_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq", ".arrow", ".txt", ".gz", ".zst")
"""File name endings of text in an object store; a local corpus is recognised as a file or folder."""
CPM_SUFFIXES = ("_context", "_target", "_target_offset")
"""Suffixes of the three files of CPM's data sets, whose spans are masked when the files are created."""
PATHS = {
    "data_path": "--data-path",
    "train_data_path": "--train-data-path",
    "valid_data_path": "--valid-data-path",
    "test_data_path": "--test-data-path",
}
"""Field that names corpora -> its flag: ``data_path`` for all splits, the others for one split each."""
SPLIT_PATH_FIELDS = tuple(PATHS)[1:]
TOKENIZERS = (
    "TokenizersJSON", "GPT2BPETokenizer", "SentencePiece", "T5SentencePiece", "BertWordPiece", "BertWordPieceLowerCase",
    "BertWordPieceCase", "CPM1", "CPM2", "NullTokenizer",
)  # fmt: skip
"""Copy of ``megatron.tokenizer.TYPES``, which this package may not import; a test checks that they are equal."""

TOKENIZER_SYNONYMS = {
    **dict.fromkeys(("HuggingFaceTokenizer", "PretrainedFromHF", "HFTokenizer"), "TokenizersJSON"),
    **dict.fromkeys(("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), "SentencePiece"),
    "T5SentencePieceTokenizer": "T5SentencePiece",
}
"""Megatron's names -> ours."""

FIM_TOKENS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<PRE>", "<MID>", "<SUF>"),
)
"""Names of the control tokens of --fim-rate (prefix, middle, suffix) in the vocabularies that have them."""

_paths_option = partial(option, None, join=join_words)
_decoder_option = partial(option, family_kind="decoder", elsewhere="it is supported in decoders only; remove it")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files, their split, and the tokenizer that encoded them."""

    data_path: str | None = _paths_option(
        "token files: path without .bin and .idx, or text that is encoded first: a .jsonl, parquet or text file, also "
        ".gz and .zst, or a folder; a blend with weights: 0.7 a 0.3 b; none: the script provides the data; mock: "
        "random tokens",
        short="token files, without .bin and .idx, or text",
    )
    train_data_path: str | None = _paths_option("token files of the training split, instead of --data-path")
    valid_data_path: str | None = _paths_option("token files of the validation split, instead of --data-path")
    test_data_path: str | None = _paths_option("token files of the test split, instead of --data-path")
    sft: str | None = _paths_option(
        "supervised fine-tuning on conversations instead of --data-path: JSON lines or a JSON array in the format "
        "of OpenAI, ShareGPT or Alpaca, also .gz, .zst, parquet and .arrow; the loss covers the assistant's tokens "
        "only; a blend with weights: 0.7 a.jsonl 0.3 b.jsonl",
        family_kind="decoder",
        elsewhere="it is supported in decoders only; remove it",
        short="conversations (JSON lines) for fine-tuning",
    )
    valid_sft: str | None = _paths_option(
        "conversations of the validation split; without it --split divides those of --sft",
        family_kind="decoder",
        elsewhere="it is supported in decoders only; remove it",
    )
    chat_template: str | None = _decoder_option(
        None,
        "file with the chat template (jinja) for --sft",
        shown_default="chat_template.jinja or tokenizer_config.json next to the tokenizer",
    )
    sft_overlong: str = _decoder_option(
        "cut",
        "conversations longer than --seq-length + 1 tokens: cut: truncated at the end, with a note of their "
        "number; refuse: an error that names the first",
        choices=("cut", "refuse"),
    )
    split: str = option(
        "949,50,1", "fractions of documents for training, validation and test", short="train, valid, test"
    )
    split_by: str = option(
        "range",
        "range: each split is a range of documents; hash: the hash of a document's tokens selects its split, so "
        "duplicates share a split and additional documents move none",
        choices=("range", "hash"),
    )
    mixture_schedule: str | None = option(None, 'blend weights by training tokens: "1e9: 0.5 0.5; 2e9: 0.2 0.8"')
    shuffle_window: int = _decoder_option(
        0,
        "shuffle samples within windows of N consecutive samples of the corpus, so that training on text starts once "
        "the first window is encoded; 0: shuffle all documents and samples of an epoch",
        minimum=0,
    )
    json_key: str = option("text", "key of the text in a text corpus (JSON lines, parquet); a.b for a nested one")
    max_bad_lines: int = option(
        0, "bad lines of a text corpus that are skipped; more are an error that lists them", minimum=0
    )
    data_order: str = _decoder_option(
        "native",
        "order of the samples; native: computed without index files, the same for every length of the run; megatron: "
        "the samples of Megatron's GPTDataset in its order, which depends on the length of the run",
        choices=("native", "megatron"),
    )
    mid_level_dataset_surplus: float = _decoder_option(
        0.005,
        "fraction by which --data-order megatron builds more samples of each corpus of a blend than its share",
        minimum=0,
    )
    no_extra_token: bool = _decoder_option(
        False,
        "samples of --seq-length tokens without a label for the last one, as with add_extra_token_to_sequence=False of "
        "Megatron's GPTDatasetConfig; only with --data-order megatron",
    )
    data_impl: str = option(
        "mmap",
        "access to token files: memory-mapped, or read calls (for network file systems)",
        choices=("mmap", "pread"),
        synonyms={"infer": "mmap"},
        constants={"--no-mmap-bin-files": "pread"},
    )
    data_cache_path: str | None = option(
        None,
        "folder on this host for the document order, which is computed once",
        shown_default="in the system's temporary folder",
    )
    object_storage_cache_path: str | None = option(
        None,
        "folder on this host for data from object stores (--data-path s3://...)",
        shown_default="below --data-cache-path",
    )
    object_storage_cache_gb: float = option(
        16.0, "maximum size of this folder in GB; the least recently used blocks are removed", minimum=0
    )
    tokenizer_type: str | None = option(
        None,
        "type of the tokenizer; NullTokenizer: --vocab-size ids without text",
        choices=TOKENIZERS,
        synonyms=TOKENIZER_SYNONYMS,
        shown_default="determined by the tokenizer's files",
    )
    vocab_file: str | None = option(None, "vocabulary file of the tokenizer")
    merge_file: str | None = option(None, "merges file of a GPT-2 BPE tokenizer")
    tokenizer_path: str | None = option(
        None,
        "file or folder of the tokenizer: JSON of `tokenizers`, SentencePiece .model, vocab.txt",
        aliases=("--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-file"),
        short="file or folder of the tokenizer",
    )
    eod_token: str | None = option(
        None,
        "name of the end-of-document token; by-name: the first match in a list of names, as up to version 8c23b9e6",
        shown_default="by the token files and the tokenizer's folder",
    )
    num_workers: int = option(
        0,
        "worker processes that prefetch data, for each rank that reads data (two ranks per pipeline); 0: the rank "
        "reads the data itself, except that one process fetches from an object store",
        minimum=0,
    )
    prefetch_factor: int = option(2, "micro-batches that each worker process prefetches", minimum=1)
    packing: str = _decoder_option(
        "concat",
        "concat: documents are concatenated and split into samples; best-fit: samples are filled with complete "
        "documents, which are kept apart",
        choices=("concat", "best-fit"),
    )
    exclude: str | None = _decoder_option(
        None,
        "text file with documents that get no loss and that no other document attends to; the order of the samples "
        "does not change, so a resumed run may add it. One document, or FIRST-LAST, per line, counted from 0, after "
        "its corpus if there are several",
    )
    fim_rate: float = _decoder_option(
        0.0,
        "fraction of documents whose middle is moved to the end (fill in the middle)",
        minimum=0,
        maximum=1,
    )
    fim_spm_rate: float = _decoder_option(
        0.5,
        "fraction of these documents in the order suffix, prefix, middle; the others are in the order prefix, "
        "suffix, middle",
        minimum=0,
        maximum=1,
    )
    reset_position_ids: bool = option(
        False,
        "restart positions at 0 after each end-of-document token",
    )
    reset_attention_mask: bool = option(
        False,
        "no attention across end-of-document tokens",
    )
    eod_mask_loss: bool = _decoder_option(
        False,
        "no loss on end-of-document tokens",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", self.split.strip("'\""))  # quotes within quotes of published scripts

    @property
    def separates_documents(self) -> bool:
        """True if documents in a sample do not attend to each other."""
        return self.reset_attention_mask or self.exclude is not None or "segments" in self.packed_keys

    @cached_property
    def packed_keys(self) -> tuple[str, ...]:
        """Arrays in a sample in addition to its text: int32, with one entry per token."""
        excluded_keys = () if self.exclude is None else ("excluded",)
        if self.sft is not None:
            return "segments", "loss_mask", *excluded_keys
        if self.no_extra_token:
            return "loss_mask", *excluded_keys
        return ("segments", *excluded_keys) if self.packing == "best-fit" else excluded_keys

    @property
    def has_megatron_order(self) -> bool:
        """True if samples are read, and handed to the replicas, in Megatron's order."""
        return self.data_order == "megatron"

    @property
    def corpora(self) -> dict[str, str | None]:
        """Field of each corpus flag -> its corpora. With --sft, conversation files replace the token files."""
        if self.sft is None:
            return {name: getattr(self, name) for name in PATHS}
        conversations = {"data_path": self.sft}
        if self.valid_sft is not None:
            conversations = {"train_data_path": self.sft, "valid_data_path": self.valid_sft}
        return {name: conversations.get(name) for name in PATHS}

    @property
    def split_shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Document fractions for training, validation and test according to --split; they add up to 1.

        If the splits have separate files, or the script provides the data, each fraction is 1.

        Raises:
            ValueError: --split is invalid.
        """
        if self.is_mock or self.is_script_data or self.corpora["data_path"] is None:
            return Fraction(1), Fraction(1), Fraction(1)
        weights = [Fraction(word.strip()) for word in self.split.replace("/", ",").split(",")]
        train, valid, test = [weight / sum(weights) for weight in (*weights, Fraction(0), Fraction(0))[:3]]
        return train, valid, test

    @property
    def training_path(self) -> str | None:
        """Flag value that names the training corpora."""
        return self.sft or self.train_data_path or self.data_path

    @property
    def num_reading_processes(self) -> int:
        """Number of data-loading processes: ``num_workers``, but at least 1 if training reads from an object store."""
        is_fetched = any(object_store.is_remote(word) for word in str(self.training_path).split())
        return self.num_workers or int(is_fetched)

    @property
    def is_mock(self) -> bool:
        """True if the data are random tokens."""
        return self.data_path == MOCK_DATA

    @property
    def is_script_data(self) -> bool:
        """True if the script provides its own data."""
        return self.data_path == SCRIPT_DATA

    @property
    def flag_of_prefix(self) -> dict[str, str]:
        """Corpus -> the first flag that names it; invalid texts are skipped."""
        flags: dict[str, str] = {}
        for name, flag in PATHS.items():
            text = getattr(self, name)
            try:
                entries = parse_paths(text, flag) if text is not None else ()
            except ValueError:  # reported by problems()
                continue
            flags |= {prefix: flag for _, prefix in entries if prefix not in flags}
        return flags

    @property
    def text_corpora(self) -> tuple[str, ...]:
        """Corpora that are text, which is encoded when the data is opened."""
        if self.sft is not None or self.is_mock or self.is_script_data:
            return ()
        return tuple(path for path in self.flag_of_prefix if is_text_corpus(path))

    @property
    def flag_of_cpm_set(self) -> dict[str, str]:
        """Corpus -> the flag that names it, for CPM's sets of three files with fixed spans."""
        return {prefix: flag for prefix, flag in self.flag_of_prefix.items() if is_cpm_set(prefix)}

    @property
    def has_dynamic_spans(self) -> bool:
        """True if T5's spans are masked during training: at least one corpus is not a CPM set of three files."""
        return not self.flag_of_prefix or len(self.flag_of_cpm_set) < len(self.flag_of_prefix)

    def problems(self) -> Iterator[str]:
        """Yield an error message for each problem: an invalid split, invalid weights, or an unreadable file."""
        yield from self._split_problems()
        yield from self._path_problems()
        yield from self._schedule_problems()
        yield from self._sft_problems()
        yield from self._order_problems()
        yield from self._exclude_problems()
        for flag, path in (
            ("--chat-template", self.chat_template),
            ("--vocab-file", self.vocab_file),
            ("--merge-file", self.merge_file),
            ("--tokenizer-path", self.tokenizer_path),
        ):
            if path is not None and not os.access(path, os.R_OK):
                fix = hub.advice(path) or " Correct the path"
                yield f"{flag} must name a file that can be read, got {path} (looked in {Path.cwd()}).{fix}"

    def _split_problems(self) -> Iterator[str]:
        try:
            shares = [Fraction(word.strip()) for word in self.split.replace("/", ",").split(",")]
        except (ValueError, ZeroDivisionError):
            shares = []
        if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) == 0:
            rule = "must be one to three weights, not negative and not all 0, such as 949,50,1"
            yield f"--split {rule}; got {self.split!r}"

    def _path_problems(self) -> Iterator[str]:
        for name, flag in PATHS.items():
            text = getattr(self, name)
            if text is not None:
                yield from _parse_problems(partial(parse_paths, text, flag))
                yield from _space_problems(text, flag)
        flags = [PATHS[name] for name in SPLIT_PATH_FIELDS if getattr(self, name) is not None]
        if flags and self.data_path is not None:
            yield (
                f"--data-path, which --split divides into three splits, excludes {', '.join(flags)}, got both. Remove "
                "--data-path, or the other flags"
            )

    def _sft_problems(self) -> Iterator[str]:
        for flag, text in (("--sft", self.sft), ("--valid-sft", self.valid_sft)):
            if text is not None:
                yield from _parse_problems(partial(parse_paths, text, flag))
        flags = [flag for name, flag in PATHS.items() if getattr(self, name) is not None]
        if self.sft is not None and flags:
            yield f"--sft reads conversations instead of token files, got {', '.join(flags)} too. Remove one of them"

    def _order_problems(self) -> Iterator[str]:
        """Yield an error message for settings that --data-order megatron does not support, or that require it."""
        settings = {
            f"--packing {self.packing}": self.packing != "concat",
            f"--fim-rate {self.fim_rate:g}": self.fim_rate > 0,
            f"--split-by {self.split_by}": self.split_by != "range",
            "--mixture-schedule": self.mixture_schedule is not None,
            "--sft": self.sft is not None,
            f"--data-path {self.data_path}": self.is_mock or self.is_script_data,
        }
        windowed = {
            f"--packing {self.packing}": self.packing != "concat",
            "--sft": self.sft is not None,
            "--data-order megatron": self.has_megatron_order,
            f"--data-path {self.data_path}": self.is_mock or self.is_script_data,
        }
        unsupported = [flag for flag, is_set in windowed.items() if is_set]
        if self.shuffle_window and unsupported:
            yield (
                f"--shuffle-window {self.shuffle_window} orders the samples of concatenated documents, got "
                f"{', '.join(unsupported)}. Remove --shuffle-window, or use --packing concat and token files or text"
            )
        if self.no_extra_token and not self.has_megatron_order:
            yield "--no-extra-token needs --data-order megatron, got native. Remove it, or add --data-order megatron"
        unsupported = [flag for flag, is_set in settings.items() if is_set]
        if self.has_megatron_order and unsupported:
            yield (
                "--data-order megatron reads token files as Megatron's GPTDataset with constant weights does, got "
                f"{', '.join(unsupported)}. Remove {'them' if len(unsupported) > 1 else 'it'}, or use --data-order "
                "native"
            )

    def _exclude_problems(self) -> Iterator[str]:
        if self.exclude is not None and self.is_mock:
            yield f"--exclude {self.exclude} has no effect on random tokens, got --data-path mock. Remove one of them"

    def _schedule_problems(self) -> Iterator[str]:
        if self.mixture_schedule is None or self.training_path is None:
            return
        try:
            count = len(parse_paths(self.training_path))
        except ValueError:  # reported by _path_problems
            return
        if count == 1:
            yield (
                f"--mixture-schedule needs several corpora, got one: {self.training_path}. Remove it, or list several "
                "corpora with weights, such as 0.7 a 0.3 b"
            )
        else:
            yield from _parse_problems(partial(parse_schedule, self.mixture_schedule, count))

    def missing_files(self, *, reads_span_files: bool = False, on_any_node: bool = False) -> Iterator[str]:
        """Yield an error message for each corpus whose files are missing or unreadable.

        A --data-path that is itself a file or folder is not checked, because the script interprets it. By default, a
        job with several nodes is not checked, because a node whose ranks read no data needs no files.

        Args:
            reads_span_files: a corpus may be a CPM set of three files.
            on_any_node: check this machine even if the job has several nodes.
        """
        is_on_one_node = on_any_node or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        if not is_on_one_node or self.is_script_data or self.is_mock:
            return
        yield from self._missing_conversations()
        if self.exclude is not None and not os.access(self.exclude, os.R_OK):
            yield f"--exclude must name a file that can be read, got {self.exclude} (looked in {Path.cwd()})"
        for prefix, flag in self.flag_of_prefix.items():
            exists = object_store.is_remote(prefix) or os.path.exists(prefix)
            missing = () if exists else _unreadable_files(prefix, reads_span_files)
            if missing:
                yield (
                    f"{flag} must name token files that can be read, got {flag} {prefix}, but cannot read "
                    f"{' and '.join(missing)} (looked in {Path.cwd()}). Correct the path, or create them with "
                    "tools/preprocess_data.py"
                )

    def _missing_conversations(self) -> Iterator[str]:
        for flag, text in (("--sft", self.sft), ("--valid-sft", self.valid_sft)):
            try:
                paths = [path for _, path in parse_paths(text, flag)] if text is not None else []
            except ValueError:  # reported by problems()
                continue
            for path in paths:
                if not os.access(path, os.R_OK) or os.path.isdir(path):
                    yield (
                        f"{flag} must name files of conversations that can be read, got {path} (looked in "
                        f"{Path.cwd()}). Correct the path"
                    )


def is_text_corpus(path: str) -> bool:
    """Return True if ``path`` names text and not the prefix of token files."""
    if object_store.is_remote(path):
        return path.lower().endswith(TEXT_SUFFIXES)
    return os.path.exists(path) and not os.path.exists(f"{path}.idx") and not is_cpm_set(path)


def is_cpm_set(prefix: str) -> bool:
    """Return True if ``prefix`` names a set of CPM's files: at least one exists, but no ordinary token file does."""
    exists = any(os.path.exists(f"{prefix}{suffix}.idx") for suffix in CPM_SUFFIXES)
    return exists and not os.path.exists(f"{prefix}.idx")


def _space_problems(text: str, flag: str) -> Iterator[str]:
    """Yield an error message if ``text`` is parsed as a weight and a path, but is itself the path of a corpus."""
    if len(text.split()) == 2 and (os.path.exists(f"{text}.idx") or is_cpm_set(text)):
        weight, path = text.split()
        yield (
            f"{flag} {text} is parsed as the weight {weight} and the path {path}, but token files {text} exist. Write "
            f"{flag} \"1 '{text}'\" to use them, or remove the weight to use {path}"
        )


def _unreadable_files(prefix: str, reads_span_files: bool) -> list[str]:
    infixes = CPM_SUFFIXES if reads_span_files and is_cpm_set(prefix) else ("",)
    names = [prefix + infix + suffix for infix in infixes for suffix in (".idx", ".bin")]
    return [name for name in names if not os.access(name, os.R_OK)]


def _parse_problems(parse: Callable[[], object]) -> Iterator[str]:
    try:
        parse()
    except ValueError as error:
        yield str(error)
