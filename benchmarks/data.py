"""Benchmark the data pipeline: preprocessing throughput against a reference, and start-up time of a large corpus.

    python benchmarks/data.py --json data.json
    python benchmarks/data.py --parts preprocessing --tokenizers bpe --rounds 3
    python benchmarks/data.py --parts start --documents 1e8 --ranks 2

preprocessing: MB/s of a whole job, from its start to the finished files, for each tokenizer and number of workers. The
reference has the structure of Megatron's tool: a pool that encodes one text at a time, and one writer. Both must write
the same tokens. Contenders take turns; ratios are computed within rounds:

| MB/s of ours over the reference | at least |
|---|---|
| BPE by `tokenizers` | 1.3 |
| BPE by gigatoken | 8 |

start: seconds until every rank has opened a corpus with the given number of documents and read its first 32 samples,
with an empty cache and with the cache of the first start, and the memory that a rank adds. Each start uses new
processes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import numpy as np
import orjson

from benchmarks.turns import Bar, Team, measurement_info, rates_in_turns, ratio_quartiles
from megatron import tokenizer
from megatron.data import IndexedDataset, IndexedDatasetBuilder, preprocess
from megatron.data.cache import IndexCache
from megatron.data.index_format import HEADER, MAGIC, VERSION
from megatron.data.sample_index import SampleIndex
from megatron.data.split import split_documents
from megatron.tokenizer import train

ROOT = Path(__file__).resolve().parents[1]
Encode = Callable[[str], list[int]]
Source = Callable[[random.Random], str]


def documents(num_bytes: int, seed: int) -> Iterator[str]:
    """Yield texts in Chinese, English or code until their UTF-8 bytes reach ``num_bytes``.

    The texts are sentences of the repository. Random words replace 30 % of their words, so that tokenizers cannot cache
    the sentences.
    """
    rng = random.Random(seed)
    sources, written = _sources(), 0
    while written < num_bytes:
        text = rng.choices(sources, (0.4, 0.4, 0.2))[0](rng)
        written += len(text.encode())
        yield text


@functools.cache
def _sources() -> tuple[Source, Source, Source]:
    """Return functions that generate a Chinese text, an English text, and code."""
    import jieba
    import rjieba

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    module_texts = [path.read_text(encoding="utf-8", errors="ignore").replace("\0", "") for path in modules]
    module_texts = [module_text for module_text in module_texts if module_text]

    def paragraphs(language: str) -> list[str]:
        paths = sorted((ROOT / "examples" / "corpus" / language).rglob("*.txt"))
        return [
            paragraph
            for path in paths
            for paragraph in path.read_text(encoding="utf-8").split("\n\n")
            if paragraph.strip()
        ]

    def varied(texts: list[list[str]], words: list[str], totals: list[int] | None) -> Source:
        def text(rng: random.Random) -> str:
            chosen_texts = rng.choices(texts, k=rng.randint(2, 30))
            words_drawn = iter(rng.choices(words, cum_weights=totals, k=sum(map(len, chosen_texts))))
            return "\n\n".join(
                "".join(next(words_drawn) if word.isalpha() and rng.random() < 0.3 else word for word in chosen_text)
                for chosen_text in chosen_texts
            )

        return text

    def code(rng: random.Random) -> str:
        lines = rng.choice(module_texts).splitlines(keepends=True)
        start = rng.randrange(len(lines))
        return "".join(lines[start : start + rng.randint(20, 400)])

    with jieba.dt.get_dict_file() as file:  # a line has a word, its count and its part of speech
        lines = [line.split(b" ", 2) for line in file]
    totals = list(itertools.accumulate(int(line[1]) for line in lines))
    chinese_words = [line[0].decode() for line in lines]
    english_words = sorted({word for module_text in module_texts for word in re.findall(r"[A-Za-z]{2,}", module_text)})
    chinese = varied([rjieba.cut(text) for text in paragraphs("zh")], chinese_words, totals)
    english = varied([re.split(r"(\W+)", text) for text in paragraphs("en")], english_words, None)
    return chinese, english, code


def write_corpus(path: Path, num_bytes: int, seed: int) -> Path:
    """Write ``documents`` as JSON lines and return ``path``."""
    with open(path, "wb") as file:
        for text in documents(num_bytes, seed):
            file.write(orjson.dumps({"text": text}) + b"\n")
    return path


@dataclass(frozen=True)
class Encoder:
    """Encoder of the reference workers; each worker calls ``make`` once to create its tokenizer."""

    make: Callable[[], Encode]
    eod_id: int
    encode_text: ClassVar[Encode]

    def start(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        Encoder.encode_text = staticmethod(self.make())  # type: ignore[assignment]

    def encode(self, line: str) -> list[int]:
        return [*Encoder.encode_text(json.loads(line)["text"]), self.eod_id]


def run_reference(corpus: Path, prefix: Path, encoder: Encoder, num_workers: int, chunk_size: int) -> None:
    """Encode with the reference into ``prefix.bin`` with 16-bit tokens and ``prefix.idx``."""
    lengths = []
    with (
        multiprocessing.get_context("fork").Pool(num_workers, initializer=encoder.start) as pool,
        open(corpus, encoding="utf-8") as lines,
        open(prefix.with_suffix(".bin"), "wb") as out,
    ):
        for ids in pool.imap(encoder.encode, lines, chunk_size):
            out.write(np.array(ids, np.uint16).tobytes())
            lengths.append(len(ids))
    lengths_array = np.array(lengths, np.int64)
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, len(lengths_array), len(lengths_array) + 1))
        file.write(lengths_array.astype("<i4").tobytes())
        file.write(((np.cumsum(lengths_array) - lengths_array) * 2).astype("<i8").tobytes())
        file.write(np.arange(len(lengths_array) + 1, dtype="<i8").tobytes())


BPE, GIGATOKEN = "bpe", "gigatoken"
BARS = {BPE: 1.3, GIGATOKEN: 8.0}
SHARE_OF_CORPUS = {BPE: 1.0, GIGATOKEN: 12.0}
"""Tokenizer -> corpus size relative to --megabytes; gigatoken needs a larger one, because its start-up is slow."""
OURS, REFERENCE = "ours", "reference"


def bpe_encode(path: Path) -> Encode:
    """Return the encoding function of the ``tokenizers`` library, as in Megatron."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: library.encode(text, add_special_tokens=False).ids


def measure_preprocessing(
    vocabulary: Path, corpora: Mapping[str, Path], workers: Sequence[int], rounds: int, folder: Path
) -> tuple[dict[str, list[float]], list[Bar]]:
    """Return MB/s of each contender by round, and the required ratios.

    Args:
        corpora: tokenizer -> corpus.

    Raises:
        RuntimeError: a contender failed, or the contenders of a tokenizer wrote different tokens.
    """
    hashes: dict[str, str] = {}

    def turn(name: str, contender: str, num_workers: int) -> float:
        seconds, tokens = run_in_process(
            run_job, vocabulary, name, contender, num_workers, corpora[name], folder / "out"
        )
        if hashes.setdefault(name, tokens) != tokens:
            raise RuntimeError(f"contenders must write the same tokens; {contender} with {name} does not")
        return corpora[name].stat().st_size / 1e6 / seconds

    def label(name: str, contender: str, num_workers: int) -> str:
        return f"{name}, {num_workers} worker{'s' * (num_workers > 1)}, {contender}"

    cases = list(itertools.product(corpora, (OURS, REFERENCE), workers))
    rates = rates_in_turns({label(*case): partial(turn, *case) for case in cases}, rounds)
    bars = []
    for name, count in itertools.product(corpora, workers):
        ours, reference = label(name, OURS, count), label(name, REFERENCE, count)
        bars.append(Bar(f"{ours} / reference", ratio_quartiles(rates[ours], rates[reference]), at_least=BARS[name]))
    return rates, bars


def run_job(
    vocabulary: Path, name: str, contender: str, num_workers: int, corpus: Path, folder: Path
) -> tuple[float, str]:
    """Run one job of our tool or the reference (``contender``); return its seconds and a hash of the tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prefix, make_tokenizer = folder / "tokens", partial(tokenizer.build, tokenizer_path=vocabulary)
    eod_id = make_tokenizer().eod_id
    start = time.perf_counter()
    if contender == OURS:
        preprocess.run(
            preprocess.Job(
                inputs=[corpus],
                output_prefix=str(prefix),
                make_tokenizer=make_tokenizer,
                num_workers=num_workers,
                use_gigatoken=name == GIGATOKEN,
            )
        )
    else:
        run_reference(corpus, prefix, Encoder(partial(bpe_encode, vocabulary), eod_id), num_workers, chunk_size=32)
    seconds = time.perf_counter() - start
    with open(prefix.with_suffix(".bin"), "rb") as file:
        return seconds, hashlib.file_digest(file, "sha256").hexdigest()


class FunctionCall:
    """A function call for a ``Team`` of one process."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], rank: int) -> None:
        self.result = partial(function, *args)


def run_in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` from a new process, so that nothing is cached between turns."""
    with closing(Team(function.__name__, FunctionCall, (function, args))) as team:
        team.ready()
        return team.ask("result")[0]


SEQ_LENGTH, NUM_SAMPLES = 1024, 32


def write_tokens(prefix: Path, num_documents: int) -> None:
    """Write documents of 1 to 999 random 16-bit ids."""
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, vocab_size=8192) as writer:
        for first in range(0, num_documents, 100_000):
            document_lengths = rng.integers(1, 1000, min(100_000, num_documents - first))
            writer.add(rng.integers(0, 8192, int(document_lengths.sum())), document_lengths)


class StartRank:
    """A rank that opens the corpus and reads its first samples."""

    def __init__(self, prefix: Path, cache: Path, rank: int) -> None:
        self.prefix, self.cache, self.rank = prefix, cache, rank

    def run(self) -> tuple[float, int]:
        """Open the corpus and read samples; return the seconds and the bytes of private memory that this added."""
        before, start = _private_bytes(), time.perf_counter()
        cache = IndexCache(self.cache)
        file = IndexedDataset(self.prefix, cache=cache)
        documents = split_documents(file.num_documents, "949,50,1")[0]
        samples = SampleIndex(
            file, documents=documents, length=SEQ_LENGTH, overlap=1, seed=1234,
            length_flag=f"--seq-length {SEQ_LENGTH}", cache=cache,
        )  # fmt: skip
        for idx in range(NUM_SAMPLES * self.rank, NUM_SAMPLES * (self.rank + 1)):
            samples[idx]
        return time.perf_counter() - start, _private_bytes() - before


def _private_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def measure_start(folder: Path, num_documents: int, num_ranks: int) -> dict[str, tuple[float, int]]:
    """Start with an empty cache, then again with that cache.

    Returns:
        Name of a start -> (seconds of the slowest rank, largest number of bytes added by a rank).
    """
    write_tokens(folder / "corpus", num_documents)
    results = {}
    for name in ("empty cache", "cache of the first start"):
        with closing(Team(name, StartRank, (folder / "corpus", folder / "cache"), size=num_ranks)) as team:
            team.ready()
            answers = team.ask("run")
        results[name] = (max(seconds for seconds, _ in answers), max(added for _, added in answers))
    return results


PARTS = ("preprocessing", "start")
SMOKE = "--rounds 1 --megabytes 0.05 --vocab-size 2000 --workers 1 --documents 2000"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--tokenizers", nargs="+", choices=BARS, default=list(BARS), help="default: all")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="worker processes (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--megabytes", type=float, default=8.0, help="size of the BPE corpus (default: 8)")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--documents", type=float, default=1e6, help="documents in the opened corpus (default: 1e6)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that open the corpus (default: 2)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the text corpus (default: 1234)")
    parser.add_argument("--smoke", action="store_true", help=f"tiny sizes, to test the benchmark: {SMOKE}")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    words = list(sys.argv[1:] if argv is None else argv)
    return parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the parts, print the table and write the JSON file."""
    args = parse_args(argv)
    result: dict[str, Any] = {**measurement_info(), "options": {name: str(value) for name, value in vars(args).items()}}
    with tempfile.TemporaryDirectory(prefix="megatron-benchmark-") as temporary:
        folder = Path(temporary)
        if "preprocessing" in args.parts:
            # The vocabulary is trained on other texts than the contenders encode.
            texts = list(documents(60_000 if args.smoke else 2 << 20, args.seed + 1))
            vocabulary = folder / "bpe.json"
            vocabulary.write_bytes(train.train_bpe(texts, args.vocab_size))
            corpora = {}
            for name in args.tokenizers:
                num_bytes = int(args.megabytes * 1e6 * SHARE_OF_CORPUS[name])
                corpora[name] = write_corpus(folder / f"{name}.jsonl", num_bytes, args.seed)
            rates, bars = measure_preprocessing(vocabulary, corpora, args.workers, args.rounds, folder)
            print("preprocessing, MB/s")
            for label, values in rates.items():
                print(f"  {label:46}{statistics.median(values):12.2f}")
            print(*(bar.text for bar in bars), sep="\n")
            result["preprocessing"] = {"megabytes_per_s": rates, "bars": [vars(b) | {"met": b.is_met} for b in bars]}
        if "start" in args.parts:
            starts = measure_start(folder, int(args.documents), args.ranks)
            print(f"start of {args.ranks} ranks, {int(args.documents):,} documents")
            for label, (seconds, added) in starts.items():
                print(f"  {label:46}{seconds:10.3f} s{added / 1e6:10.1f} MB")
            result["start"] = starts
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
