"""The tables of the pages, made of results: what was seen on which GPU, and how fast a step was there.

Texts are English and Chinese, by the key "en" or "zh". Results are the contents of the files of
``benchmarks/gpu/results.py``; those of a dry run are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED
from benchmarks.gpu.wording import WORDS

PARTS = ("tests", "train", "layouts", "faults", "speed")
"""That show something; the pictures show the others."""
GIB = 2**30
CONTENDERS = ("ours", "ours-compiled", "hf", "plain")
IN_README = {"devices": 2, "models": 3}
"""Most lines there; the whole is on the page about accelerators."""


def page(seen: Sequence[Mapping[str, Any]], language: str) -> str:
    """Return what the page about accelerators says of results, newest first."""
    words = WORDS[language]
    if not seen:
        return words["nothing on the page"]
    parts = [seen_table(seen, language)]
    for content in with_speeds(seen):
        products = f"{_products(content) / 1e12:.0f} TFLOP/s"
        about = {key: content[key] for key in ("device", "date")} | {"commit": commit_of(content)}
        parts += [words["explained"].format(**about, products=products), speeds_table(content, language)]
    return "\n\n".join(parts)


def front(seen: Sequence[Mapping[str, Any]], language: str) -> str:
    """Return what the README says of results, newest first, in a few lines."""
    words = WORDS[language]
    if not seen:
        return words["nothing in front"]
    lines = [words["in front"].format(what=_describe(content, language)) for content in seen[: IN_README["devices"]]]
    fast = with_speeds(seen)
    return "\n\n".join(["  \n".join(lines), *(short_table(content, language) for content in fast[:1])])


def seen_table(seen: Sequence[Mapping[str, Any]], language: str) -> str:
    """Return a row for each run: device, date, commit, versions, and how many cases of each part ended how."""
    rows = [
        (
            f"{content['num_devices']} x {content['device']}, {content['memory_bytes'] / GIB:.0f} GiB",
            content["date"],
            commit_of(content),
            _versions(content),
            *(counts(content, part, language) for part in PARTS),
        )
        for content in seen
    ]
    return table((*WORDS[language]["seen"], *PARTS), rows)


def speeds_table(content: Mapping[str, Any], language: str) -> str:
    """Return a row for each contender of each case that passed."""
    names = WORDS[language]["names"]
    rows = [
        (
            figures["title"] + layers_of(figures),
            f"{figures['seq_length']} x {figures['batch_size']}",
            names.get(name, name),
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.3f}",
            number(row["mfu_sheet"]),
            f"{row['allocated_bytes'] / GIB:.1f}, {row['reserved_bytes'] / GIB:.1f}",
            number(row.get("memory_ratio"), 2),
            number(row.get("planner_ratio"), 2),
        )
        for figures in timed(content)
        for name, row in figures["contenders"].items()
    ]
    return table(WORDS[language]["speeds"], rows)


def short_table(content: Mapping[str, Any], language: str) -> str:
    """Return the MFU of the first case of each model, a column for each contender."""
    first, *heads = WORDS[language]["short"]
    found: dict[str, Mapping[str, Any]] = {}
    for figures in timed(content):
        found.setdefault(figures["title"], figures)
    rows = [
        (
            f"{title}, {figures['seq_length']} x {figures['batch_size']}",
            *(number(figures["contenders"].get(name, {}).get("mfu")) for name in CONTENDERS),
        )
        for title, figures in list(found.items())[: IN_README["models"]]
    ]
    return table((f"{first} {content['device']}", *heads), rows)


def timed(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the figures of all models that were timed, in the order of their cases."""
    cases = content["parts"].get("speed", {"cases": {}})["cases"].values()
    return [case["figures"] for case in cases if case["status"] == PASSED and "contenders" in case["figures"]]


def with_speeds(seen: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return of each device the first results that have times."""
    found: dict[str, Mapping[str, Any]] = {}
    for content in seen:
        if timed(content):
            found.setdefault(content["device"], content)
    return list(found.values())


def counts(content: Mapping[str, Any], part: str, language: str) -> str:
    """Return how many cases of a part passed, failed, were skipped or not run; "-" where it was not started."""
    cases = content["parts"].get(part, {"cases": {}})["cases"].values()
    ends = [case["status"] for case in cases]
    words = WORDS[language]
    told = [f"{ends.count(end)} {words[end]}" for end in (PASSED, FAILED, SKIPPED, NOT_RUN) if end in ends]
    return ", ".join(told) or "-"


def commit_of(content: Mapping[str, Any]) -> str:
    """Return the commit, short."""
    commit, *more = (content["commit"] or "-").split(maxsplit=1)
    return " ".join([commit[:7], *more])


def layers_of(figures: Mapping[str, Any]) -> str:
    """Return in words how much of a model a slice has."""
    return f" ({figures['sizes']['num_layers']}/32)" if figures["family"] == "llama" else ""


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for a cell, "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def _describe(content: Mapping[str, Any], language: str) -> str:
    parts = "; ".join(_of_parts(content, language))
    about = f"{content['device']} ({content['date']}, {commit_of(content)}, torch {_versions(content)})"
    return f"{about}: {parts}"


def _of_parts(content: Mapping[str, Any], language: str) -> Iterator[str]:
    for part in PARTS:
        told = counts(content, part, language)
        if told != "-":
            yield f"{part} {told}"


def _versions(content: Mapping[str, Any]) -> str:
    return f"{content['versions']['torch']}, {content['cuda'] or '-'}"


def _products(content: Mapping[str, Any]) -> float:
    """Return the best rate of matrix products of the cases."""
    return max(figures["product_flops"] for figures in timed(content))
