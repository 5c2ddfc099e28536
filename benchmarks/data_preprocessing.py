"""Part ``preprocessing`` of ``data.py``: MB/s of a whole job, ours and the reference's, by tokenizer and processes.

Each turn is a fresh process that measures itself, from the start of the job with its tokenizers to the finished files;
imports come before. All contenders of a tokenizer must write the same tokens.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson

from benchmarks.turns import Bar, Team, rates_in_turns, ratio_quartiles
from megatron import tokenizer
from megatron.data import preprocess
from megatron.data.index_format import HEADER, MAGIC, VERSION
from megatron.tokenizer import Tokenizer, train

# What is preprocessed: JSON lines of mixed Chinese, English and code, the same for the same seed and size.
#
# Chinese and English are the repository's own sentences with part of their words replaced: by words of jieba's
# dictionary as often as these occur, by words of the standard library's sources. So sentences are new throughout, and
# what tokenizers remember of words helps them as with a corpus of that size, not as with a small text repeated. Code is
# pages of the standard library.

ROOT = Path(__file__).resolve().parents[1]
REPLACED = 0.3
SHARES = {"zh": 0.4, "en": 0.4, "code": 0.2}
_PARAGRAPHS = (2, 30)
_PAGE_LINES = (20, 400)
_MODULES = 80

Source = Callable[[random.Random], str]


def documents(num_bytes: int, seed: int) -> Iterator[str]:
    """Yield texts of one kind each, until their UTF-8 bytes reach ``num_bytes``."""
    rng = random.Random(seed)
    sources = [_chinese(), _english(), _code()]
    written = 0
    while written < num_bytes:
        text = rng.choices(sources, list(SHARES.values()))[0](rng)
        written += len(text.encode())
        yield text


def write(path: Path, num_bytes: int, seed: int) -> int:
    """Write such a corpus to ``path`` and return its bytes."""
    with open(path, "wb") as file:
        for text in documents(num_bytes, seed):
            file.write(orjson.dumps({"text": text}) + b"\n")
    return path.stat().st_size


@functools.cache
def _chinese() -> Source:
    import jieba
    import rjieba

    with jieba.dt.get_dict_file() as file:  # a line is: word, count, kind
        lines = [line.split(b" ", 2) for line in file]
    words = b"\n".join(line[0] for line in lines).decode().split("\n")
    totals = list(itertools.accumulate(int(line[1]) for line in lines))
    return _varied([rjieba.cut(text) for text in _paragraphs("zh")], words, totals)


@functools.cache
def _english() -> Source:
    found = sorted({word for page in _modules() for word in re.findall(r"[A-Za-z]{2,}", page)})
    return _varied([re.split(r"(\W+)", text) for text in _paragraphs("en")], found, None)


def _varied(paragraphs: list[list[str]], words: list[str], totals: list[int] | None) -> Source:
    """Return a source of paragraphs in which part of the words is drawn from ``words``, with weights or evenly."""

    def text(rng: random.Random) -> str:
        chosen = rng.choices(paragraphs, k=rng.randint(*_PARAGRAPHS))
        drawn = iter(rng.choices(words, cum_weights=totals, k=sum(map(len, chosen))))
        return "\n\n".join("".join(_replaced(rng, word, drawn) for word in part) for part in chosen)

    return text


def _replaced(rng: random.Random, word: str, drawn: Iterator[str]) -> str:
    return next(drawn) if word.isalpha() and rng.random() < REPLACED else word


@functools.cache
def _code() -> Source:
    pages = [page.splitlines(keepends=True) for page in _modules()]

    def text(rng: random.Random) -> str:
        page = rng.choice(pages)
        start = rng.randrange(len(page))
        return "".join(page[start : start + rng.randint(*_PAGE_LINES)])

    return text


@functools.cache
def _modules() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))[:_MODULES]
    return [text for path in paths if (text := path.read_text(encoding="utf-8", errors="ignore").replace("\0", ""))]


def _paragraphs(language: str) -> list[str]:
    paths = sorted((ROOT / "examples/corpus" / language).rglob("*.txt"))
    return [part for path in paths for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]


# The reference: the structure of Megatron's preprocessing in our own few lines, a pool that encodes and one writer.
#
# Each worker reads the JSON of a line, encodes its text alone and sends a Python list of ids back; the parent makes an
# array of each list and appends it to the file. Chunks of ``imap`` are those of the published tools: 32 lines, in that
# of 2020 and in CPM's 25.

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Encoder:
    """What a worker does; ``make`` is called once in each."""

    make: Callable[[], Encode]
    eod_id: int
    encode_text: ClassVar[Encode]

    def start(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        Encoder.encode_text = staticmethod(self.make())  # type: ignore[assignment]

    def encode(self, line: str) -> list[int]:
        ids = Encoder.encode_text(json.loads(line)["text"])
        ids.append(self.eod_id)
        return ids


def run_reference(corpus: Path, prefix: Path, encoder: Encoder, num_workers: int, chunk_size: int) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``, tokens as u16."""
    sizes = []
    with (
        multiprocessing.get_context("fork").Pool(num_workers, initializer=encoder.start) as pool,
        open(corpus, encoding="utf-8") as lines,
        open(prefix.with_suffix(".bin"), "wb") as out,
    ):
        for ids in pool.imap(encoder.encode, lines, chunk_size):
            out.write(np.array(ids, np.uint16).tobytes())
            sizes.append(len(ids))
    _write_index(prefix.with_suffix(".idx"), np.array(sizes, np.int64))


def _write_index(path: Path, sizes: np.ndarray) -> None:
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, len(sizes), len(sizes) + 1))
        file.write(sizes.astype("<i4").tobytes())
        file.write(((np.cumsum(sizes) - sizes) * 2).astype("<i8").tobytes())
        file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())


# The vocabularies, trained on a part of the corpus, and how each kind is used by both sides.

BPE, GIGATOKEN, SENTENCE_PIECE, CPM = "bpe", "gigatoken", "sentencepiece", "cpm"
KINDS = (BPE, GIGATOKEN, SENTENCE_PIECE, CPM)
EOD = "<eod>"
_CPM_MARKS = str.maketrans(" \n", "\u2582\u2583")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How ours makes the tokenizer, and how the reference encodes one text with the same file.

    Args:
        chunk_size: lines that the reference sends to a worker at once.
        bar: how many times as fast ours must be, None where nothing is asked.
        bar_workers: with which numbers of processes that is asked.
    """

    make_tokenizer: Callable[[], Tokenizer]
    make_encode: Callable[[], Encode]
    chunk_size: int = 32
    use_gigatoken: bool = False
    bar: float | None = None
    bar_workers: Sequence[int] = (1, 2)


def kinds(folder: Path, names: Sequence[str], texts: Sequence[str], vocab_size: int) -> dict[str, Kind]:
    """Train what ``names`` need into ``folder`` and return the kinds."""
    bpe, unigram, cpm = folder / "bpe.json", folder / "unigram.model", folder / "cpm.model"
    if BPE in names or GIGATOKEN in names:
        bpe.write_bytes(train.train_bpe(texts, vocab_size))
    if SENTENCE_PIECE in names:
        unigram.write_bytes(train.train_unigram(texts, vocab_size))
    if CPM in names:
        cpm.write_bytes(train_cpm(texts, vocab_size))
    of_bpe = partial(tokenizer.build, tokenizer_path=bpe)
    every = {
        BPE: Kind(make_tokenizer=of_bpe, make_encode=partial(bpe_encode, bpe), bar=1.3),
        GIGATOKEN: Kind(make_tokenizer=of_bpe, make_encode=partial(bpe_encode, bpe), use_gigatoken=True, bar=8.0),
        SENTENCE_PIECE: Kind(
            make_tokenizer=partial(tokenizer.build, tokenizer_path=unigram),
            make_encode=partial(unigram_encode, unigram),
        ),
        CPM: Kind(
            make_tokenizer=partial(tokenizer.build, "CPM1", tokenizer_path=cpm),
            make_encode=partial(cpm_encode, cpm),
            chunk_size=25,
            bar=3.0,
            bar_workers=(1,),
        ),
    }
    return {name: every[name] for name in names}


def bpe_encode(path: Path) -> Encode:
    """Return how Megatron encodes a text with a BPE of the ``tokenizers`` library."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: library.encode(text, add_special_tokens=False).ids


def unigram_encode(path: Path) -> Encode:
    """Return how Megatron encodes a text with SentencePiece."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode


def cpm_encode(path: Path) -> Encode:
    """Return how CPM encodes a text: jieba's words, marks for spaces and line ends, SentencePiece."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return lambda text: library.encode(cpm_words(text))


def cpm_words(text: str) -> str:
    """Return the words of a text with spaces between them, as CPM's SentencePiece reads it."""
    import jieba

    jieba.setLogLevel("ERROR")
    return " ".join(word.translate(_CPM_MARKS) for word in jieba.cut(text))


def train_cpm(texts: Sequence[str], vocab_size: int) -> bytes:
    """Return a small SentencePiece unigram of the kind that CPM-1 has."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(cpm_words(line) for text in texts for line in text.splitlines(keepends=True)),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        control_symbols=[EOD],
        character_coverage=0.9995,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


OURS, REFERENCE = "ours", "reference"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""What ``os.times`` counts in."""


@dataclass(frozen=True)
class Contender:
    """Who encodes a corpus, with which tokenizer, and in how many processes."""

    kind: str
    who: str
    num_workers: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.num_workers} worker{'s' * (self.num_workers > 1)}, {self.who}"


@dataclass(frozen=True)
class Done:
    """What one turn took, processes that it started included, and a hash of the tokens that it wrote.

    Processor time is counted in clock ticks: ``cpu_s`` is one at least, so that a rate can be taken of it.
    """

    seconds: float
    cpu_s: float
    tokens: str


def measure(
    kinds: Mapping[str, Kind], corpora: Mapping[str, Path], workers: Sequence[int], rounds: int, folder: Path
) -> tuple[dict[str, list[float]], list[Bar]]:
    """Return MB/s of each contender in each round by its name, and the bars.

    Args:
        corpora: the file for each kind.
        folder: where outputs are written; each is deleted before the next.

    Raises:
        RuntimeError: a contender failed, or wrote other tokens than the reference.
    """
    contenders = [Contender(kind, who, count) for kind in kinds for count in workers for who in (OURS, REFERENCE)]
    by_cpu: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    tokens: dict[str, tuple[str, str]] = {}

    def turn(contender: Contender) -> float:
        corpus = corpora[contender.kind]
        done = in_process(job, kinds[contender.kind], contender, corpus, folder / "out")
        first, expected = tokens.setdefault(contender.kind, (contender.name, done.tokens))
        if done.tokens != expected:
            raise RuntimeError(f"contenders must write the same tokens; {contender.name} and {first} do not")
        megabytes = corpus.stat().st_size / 1e6
        by_cpu[contender.name].append(megabytes / done.cpu_s)
        return megabytes / done.seconds

    rates = rates_in_turns({contender.name: partial(turn, contender) for contender in contenders}, rounds)
    return rates, [
        bar_of(kind.bar, rates, by_cpu, Contender(name, OURS, count), Contender(name, REFERENCE, count))
        for name, kind in kinds.items()
        for count in workers
        if kind.bar is not None and count in kind.bar_workers
    ]


def bar_of(
    at_least: float,
    rates: Mapping[str, list[float]],
    by_cpu: Mapping[str, list[float]],
    ours: Contender,
    theirs: Contender,
) -> Bar:
    """Return how many times as fast ``ours`` is, by the clock and by processor time."""
    ratio = ratio_quartiles(rates[ours.name], rates[theirs.name])
    cpu_ratio = ratio_quartiles(by_cpu[ours.name], by_cpu[theirs.name])[1]
    return Bar(f"{ours.name} / reference", at_least, ratio, cpu_ratio)


def job(kind: Kind, contender: Contender, corpus: Path, folder: Path) -> Done:
    """Do one job and return what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prefix = folder / "tokens"
    eod_id = kind.make_tokenizer().eod_id
    started, cpu_started = time.perf_counter(), _cpu_s()
    if contender.who == OURS:
        preprocess.run(
            preprocess.Job(
                inputs=[corpus],
                output_prefix=str(prefix),
                make_tokenizer=kind.make_tokenizer,
                num_workers=contender.num_workers,
                use_gigatoken=kind.use_gigatoken,
            )
        )
    else:
        encoder = Encoder(kind.make_encode, eod_id)
        run_reference(corpus, prefix, encoder, contender.num_workers, kind.chunk_size)
    seconds, cpu_s = time.perf_counter() - started, max(_cpu_s() - cpu_started, TICK_S)
    with open(prefix.with_suffix(".bin"), "rb") as file:
        return Done(seconds, cpu_s, hashlib.file_digest(file, "sha256").hexdigest())


def _cpu_s() -> float:
    """Return processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, run in a process of its own: nothing that one turn has loaded serves the next.

    Raises:
        RuntimeError: it failed; its traceback is the message.
    """
    with closing(Team(function.__name__, Call, (function, args))) as team:
        team.ready()
        return team.ask("result")[0]


class Call:
    """A function that is called when it is asked for its result."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> None:
        self.result = partial(function, *args)
