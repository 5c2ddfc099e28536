"""Going on from a checkpoint with the mixture of now: what agrees, what has changed, and what that means.

Corpora are known by fingerprint, whatever they are called: the same data at another path go on where they stopped.
A fingerprint is three texts with dots between them, so that one can say what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.data.mixture import FORMAT, Corpus, SampleOrder
from megatron.errors import CheckpointError

_ONE = "the one corpus of the checkpoint"
"""Checkpoints of a single corpus held no name."""
_PARTS = ("content", "tokenizer", "split, seed, length or other setting of samples")


@dataclass
class _Saved:
    """What a checkpoint says: each by the name that a corpus had then."""

    fingerprints: dict[str, str]
    cursors: dict[str, int]
    phases: list[tuple[int, dict[str, int], dict[str, int]]]


def fingerprint_of(tokens: str, tokenizer: str | None, samples: str) -> str:
    """Return the fingerprint of a corpus: that of its token file, its tokenizer's identity, that of its samples."""
    return f"{tokens}.{(tokenizer or 'unknown')[:16]}.{samples}"


def resumed_order(
    order: SampleOrder, state: Mapping[str, Any] | str, samples_consumed: int, *, allow_change: bool = False
) -> tuple[SampleOrder, list[str]]:
    """Return ``order`` as it goes on from a checkpoint, and lines for the log about what has changed.

    Args:
        state: what ``SampleOrder.state`` gave, or the fingerprint alone, which checkpoints of a single corpus used to
            hold.
        allow_change: go on although a corpus has gone or changed; those that agree keep their cursors, the others
            start at their first sample.

    Raises:
        CheckpointError: a corpus of the checkpoint is not here with its fingerprint, or ``state`` is damaged.
    """
    saved = _of_one(order, state, samples_consumed) if isinstance(state, str) else _read(state, samples_consumed)
    now = {corpus.fingerprint: corpus for corpus in order.corpora}
    matches = {name: now[text].name for name, text in saved.fingerprints.items() if text in now}
    lost = [_difference(order, saved, name, matches) for name in saved.fingerprints if name not in matches]
    if lost and not allow_change:
        raise CheckpointError(
            f"the data must be those of the checkpoint, but {'; '.join(lost)}: samples would be repeated or lost. Give "
            "the same paths, --split, --seed and lengths (a corpus that is to give nothing more stays, with weight "
            "0), or --allow-data-change: what agrees goes on where it was, the rest starts at its first sample."
        )

    def by_number(values: Mapping[str, int]) -> list[int]:
        found = {matches[name]: value for name, value in values.items() if name in matches}
        return [found.get(corpus.name, 0) for corpus in order.corpora]

    history = [] if lost else [(start, by_number(w), by_number(c)) for start, w, c in saved.phases]
    result = SampleOrder(
        order.corpora,
        order.schedule,
        history=history,
        samples_consumed=samples_consumed,
        cursors=by_number(saved.cursors),
    )
    if not lost and by_number(saved.cursors) != list(result.cursors(samples_consumed).values()):
        raise _damaged(f"cursors {saved.cursors} where its phases give {result.cursors(samples_consumed)}")
    added = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    lines = [f"data changed: {text}" for text in lost]
    lines += [f"data: {corpus.name} is new and starts at its first sample" for corpus in added]
    if (len(saved.fingerprints) == 1) != (len(order.corpora) == 1):
        kept = (corpus for corpus in order.corpora if corpus.is_drawn and corpus not in added)
        lines += [_company_line(corpus, len(order.corpora) == 1) for corpus in kept]
    return result, [*lines, *_weight_lines(result, samples_consumed)] if samples_consumed else []


def _company_line(corpus: Corpus, is_alone: bool) -> str:
    """Return what becomes of a corpus when others come to it: it is drawn otherwise than alone, as they differ."""
    company = "alone now" if is_alone else "one of several now"
    return f"data: {corpus.name} is {company}, so the spans or middles of its samples are drawn otherwise from here on"


def _weight_lines(order: SampleOrder, samples_consumed: int) -> list[str]:
    if all(phase.start != samples_consumed for phase in order.phases):
        return []
    cursors, weights = order.cursors(samples_consumed), order.weights(samples_consumed)
    places = ", ".join(f"{weights[name]:.4g} {name} from its sample {cursors[name]}" for name in cursors)
    return [f"data: new weights from sample {samples_consumed} on: {places}"]


def _difference(order: SampleOrder, saved: _Saved, name: str, matches: Mapping[str, str]) -> str:
    """Return what has become of a corpus of the checkpoint that is not here with its fingerprint."""
    was = saved.fingerprints[name]
    who, number = name if name == _ONE else f"corpus {name}", saved.cursors.get(name, 0)
    text = f"{who}, {number} samples of it read, has fingerprint {was} there"
    left = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    same = [corpus for corpus in left if corpus.name == name] or (left if len(left) == 1 else [])
    if not same:
        here = ", ".join(f"{corpus.name} {_like(was, corpus)}" for corpus in order.corpora)
        return f"{text} and is not among those here: {here}"
    now = same[0]
    return f"{text} and {now.name} has {_like(was, now)} here{_changed_parts(was, now.fingerprint)}"


def _changed_parts(was: str, now: str) -> str:
    before, after = was.split("."), now.split(".")
    if len(before) != len(_PARTS) or len(after) != len(_PARTS):
        return ""
    changed = [part for part, old, new in zip(_PARTS, before, after, strict=True) if old != new]
    if before[0] != after[0]:
        changed.remove(_PARTS[-1])  # the fingerprint of samples contains that of the tokens
    return f" (another {' and another '.join(changed)})"


def _of_one(order: SampleOrder, fingerprint: str, samples_consumed: int) -> _Saved:
    """Return what a checkpoint means that holds the fingerprint of a single corpus's samples and nothing else."""
    found = [corpus for corpus in order.corpora if fingerprint in (corpus.fingerprint, _samples(corpus))]
    phases = [(0, {_ONE: 1}, {_ONE: 0})] if samples_consumed else []
    return _Saved({_ONE: found[0].fingerprint if found else fingerprint}, {_ONE: samples_consumed}, phases)


def _like(was: str, corpus: Corpus) -> str:
    """Return what compares with ``was``: the fingerprint of a corpus, or that of its samples alone."""
    return corpus.fingerprint if "." in was else _samples(corpus)


def _samples(corpus: Corpus) -> str:
    return corpus.fingerprint.rsplit(".", 1)[-1]


def _read(state: Mapping[str, Any], samples_consumed: int) -> _Saved:
    try:
        if state["format"] != FORMAT:
            raise _damaged(f"its format is {state['format']!r}, {FORMAT} can be read")
        if state["samples_consumed"] != samples_consumed:
            raise _damaged(f"it was left at sample {state['samples_consumed']}, the run at {samples_consumed}")
        phases = [(phase["start"], phase["weights"], phase["cursors"]) for phase in state["phases"]]
        return _Saved(state["fingerprints"], state["cursors"], phases)
    except (KeyError, TypeError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"the order of the data in the checkpoint cannot be used: {what}. Take an older checkpoint, or --finetune to "
        "start anew from its weights."
    )
