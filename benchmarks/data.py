"""Measure the path of the data: preprocessing, reading, T5's spans; each against a reference in the same run.

    python benchmarks/data.py --json data.json
    python benchmarks/data.py --parts preprocessing --tokenizers cpm --rounds 3

Contenders take turns, the order rotates, medians over rounds are reported and ratios within rounds. Bars:

| part | what | at least |
|---|---|---|
| preprocessing | MB/s of CPM-1, one worker, over jieba + SentencePiece in the structure of Megatron's tool | 3 |
| preprocessing | MB/s of BPE by `tokenizers` over that structure with the same library | 1.3 |
| preprocessing | MB/s of BPE by gigatoken over the same | 8 |
| reading | samples/s over ten times what a step of the default run consumes | 1 |
| spans | T5 samples/s over the usual Python loop | 10 |
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import re
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import data_preprocessing, data_reading
from benchmarks.machine import surroundings
from benchmarks.turns import Bar
from megatron import device

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


PARTS = ("preprocessing", "reading", "spans")
PARTS_OF_CORPUS = {data_preprocessing.CPM: 0.25, data_preprocessing.GIGATOKEN: 12.0}
"""How much of --megabytes, where not all: jieba takes ten times as long, and what gigatoken does at the start is small
only beside a job of seconds."""
TRAINED_ON_BYTES = 2 << 20
SMOKE = "--rounds 1 --megabytes 0.05 --vocab-size 2000 --read-tokens 40000 --samples 16 --workers 1"
SMOKE_VOCABULARY_BYTES = 60_000


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--tokenizers", nargs="+", choices=data_preprocessing.KINDS, default=list(data_preprocessing.KINDS)
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="processes that encode (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument(
        "--megabytes", type=float, default=8.0, help="of text; gigatoken 12 times, CPM a quarter of it (default: 8)"
    )
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--read-tokens", type=int, default=50_000_000, help="of the file that is read")
    parser.add_argument("--samples", type=int, default=4096, help="read in a turn (default: 4096)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the step that consumes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of that step (all cores)")
    parser.add_argument("--seed", type=int, default=1234, help="of the corpus")
    parser.add_argument("--smoke", action="store_true", help=f"a run of seconds that says nothing: {SMOKE}")
    parser.add_argument("--json", type=Path, help="write the result here too")
    words = list(sys.argv[1:] if argv is None else argv)
    return parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)


def run(args: argparse.Namespace, folder: Path, start_method: str) -> dict[str, Any]:
    """Return the numbers of the parts that are asked for."""
    rates: dict[str, dict[str, list[float]]] = {}
    bars: list[Bar] = []
    facts: dict[str, Any] = {}
    if "preprocessing" in args.parts:
        kinds = data_preprocessing.kinds(folder, args.tokenizers, texts(args), args.vocab_size)
        corpora = {
            name: write_corpus(folder, args.megabytes * PARTS_OF_CORPUS.get(name, 1.0), args.seed) for name in kinds
        }
        rates["preprocessing, MB/s"], found = data_preprocessing.measure(
            kinds, corpora, args.workers, args.rounds, folder
        )
        bars += found
        facts["corpus_bytes"] = {name: path.stat().st_size for name, path in corpora.items()}
    if "reading" in args.parts:
        kind = device.choose(args.device)
        rates["reading, samples/s"], found, consumed = data_reading.measure_reading(
            folder, args.read_tokens, args.samples, args.rounds, args.threads, kind, start_method
        )
        bars += found
        facts |= consumed
    if "spans" in args.parts:
        rates["T5 spans, samples/s"], found = data_reading.measure_spans(args.samples // 8, args.rounds)
        bars += found
    return {"rates": rates, "bars": bars, "facts": facts}


def texts(args: argparse.Namespace) -> list[str]:
    """Return what vocabularies are trained on: texts of another seed than those that are encoded."""
    num_bytes = SMOKE_VOCABULARY_BYTES if args.smoke else TRAINED_ON_BYTES
    return list(documents(num_bytes, args.seed + 1))


def write_corpus(folder: Path, megabytes: float, seed: int) -> Path:
    """Return a corpus of that size, written where it is not there yet."""
    path = folder / f"corpus-{megabytes:g}.jsonl"
    if not path.exists():
        write(path, int(megabytes * 1e6), seed)
    return path


def table(result: dict[str, Any]) -> str:
    """Return the result as lines of text: medians of all contenders, what a step takes, then the bars."""
    lines = []
    for title, rates in result["rates"].items():
        lines.append(title)
        for name, values in rates.items():
            shown = f"{statistics.median(values):,.2f}" if "MB" in title else f"{statistics.median(values):,.0f}"
            lines.append(f"  {name:46}{shown:>12}")
    for family, needed in result["facts"].get("needed_samples_per_s", {}).items():
        taken, tokens = result["facts"]["tokens_per_s_of_a_step"][family], data_reading.TOKENS_PER_SAMPLE[family]
        lines.append(f"{family}: 10 x {taken:,.0f} tokens/s of a step / {tokens} tokens of a sample = {needed:,.0f}")
    return "\n".join([*lines, *(bar.text for bar in result["bars"])])


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result with the bars as plain values."""
    bars = [
        {
            "name": bar.name,
            "at_least": bar.at_least,
            "quartiles": bar.quartiles,
            "by_cpu": bar.by_cpu,
            "met": bar.is_met,
        }
        for bar in result["bars"]
    ]
    return {**result, "bars": bars}


def main(argv: Sequence[str] | None = None, start_method: str = "spawn") -> dict[str, Any]:
    """Run the parts, print the table, write the JSON."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatron-benchmark-") as folder:
        result = run(args, Path(folder), start_method)
    print(table(result))
    told = surroundings() | {"options": {name: str(value) for name, value in vars(args).items()}} | as_json(result)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
