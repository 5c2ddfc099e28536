"""Resume a mixture from a checkpoint whose corpora or weights may have changed.

Corpora are known by fingerprint, whatever they are called: the same data at another path go on where they stopped.
A fingerprint is three texts with dots between them, so that one can say what differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from megatron import log
from megatron.data.blend_schedule import FORMAT, BlendSchedule, Corpus
from megatron.errors import CheckpointError

_ONE = "the one corpus of the checkpoint"
"""Checkpoints of a single corpus held no name."""
SAME_LENGTH = Fraction(1)
CONTENT, TOKENIZER, SAMPLES = "content", "tokenizer", "samples"
_PARTS = (CONTENT, TOKENIZER, SAMPLES)
"""The parts of a fingerprint."""


@dataclass
class _Saved:
    """What a checkpoint says: each by the name that a corpus had then."""

    fingerprints: dict[str, str]
    cursors: dict[str, int]
    phases: list[tuple[int, dict[str, int], dict[str, int]]]
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)


def fingerprint_of(tokens: str, tokenizer: str | None, samples: str) -> str:
    """Return the fingerprint of a corpus: that of its token file, its tokenizer's identity, that of its samples."""
    return f"{tokens}.{(tokenizer or 'unknown')[:16]}.{samples}"


def resumed_order(
    order: BlendSchedule, state: Mapping[str, Any] | str, samples_consumed: int, *, allow_change: bool = False,
    ratio: Fraction = SAME_LENGTH, settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[BlendSchedule, list[str]]:  # fmt: skip
    """Return ``order`` as it goes on from a checkpoint, and lines for the log about what has changed.

    Args:
        state: what ``BlendSchedule.state`` gave, or the fingerprint alone, which checkpoints of a single corpus used to
            hold.
        samples_consumed: by the run that saved it.
        ratio: tokens of a sample there to those of one here. Where they differ, the run goes on at the first sample
            that begins at or after as many tokens, and so does each corpus of the same tokens with its own.
        allow_change: go on although a corpus has gone or changed; those that agree keep their cursors, the others
            start at their first sample.
        settings: changed settings in words ("--split was 9,1,0, now 8,2,0") by the part of a fingerprint that they
            change: ``CONTENT``, ``TOKENIZER`` or ``SAMPLES``.

    Raises:
        CheckpointError: a corpus of the checkpoint is not here with its fingerprint, or ``state`` is damaged.
    """
    saved = _of_one(order, state, samples_consumed) if isinstance(state, str) else _read(state, samples_consumed)
    now = {text: corpus for corpus in order.corpora for text in corpus.other_fingerprints}
    now |= {corpus.fingerprint: corpus for corpus in order.corpora}
    matches = {name: now[text].name for name, text in saved.fingerprints.items() if text in now}
    lost = _differences(order, saved, matches, settings)
    if lost and not allow_change:
        raise CheckpointError(
            f"the data must be those of the checkpoint, but {'; '.join(lost)}. Samples would be repeated or lost. Give "
            "the former settings and files (to stop reading a corpus, set its weight to 0), or --allow-data-change: "
            "unchanged corpora continue at their position, the others start at their first sample."
        )

    here, cursors, lines = (
        math.ceil(samples_consumed * ratio),
        saved.cursors,
        [f"data changed: {text}" for text in lost],
    )
    if ratio != SAME_LENGTH:
        matches |= _cut_otherwise(order, saved, matches)
        cursors = {name: math.ceil(cursor * ratio) for name, cursor in cursors.items()}
        went_on = {matches[name]: cursor for name, cursor in cursors.items() if name in matches}
        lines += [f"data: {name} goes on at its sample {cursor}" for name, cursor in went_on.items()]

    def by_number(values: Mapping[str, int]) -> list[int]:
        found = {matches[name]: value for name, value in values.items() if name in matches}
        return [found.get(corpus.name, 0) for corpus in order.corpora]

    is_changed = bool(lost) or ratio != SAME_LENGTH
    history = [] if is_changed else [(start, by_number(w), by_number(c)) for start, w, c in saved.phases]
    result = BlendSchedule(
        order.corpora,
        order.schedule,
        history=history,
        samples_consumed=here,
        cursors=by_number(cursors),
    )
    if not is_changed and by_number(saved.cursors) != list(result.cursors(samples_consumed).values()):
        raise _damaged(f"cursors {saved.cursors} where its phases give {result.cursors(samples_consumed)}")
    added = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    lines += [f"data: {corpus.name} is new and starts at its first sample" for corpus in added]
    if (len(saved.fingerprints) == 1) != (len(order.corpora) == 1):
        kept = (corpus for corpus in order.corpora if corpus.is_drawn and corpus not in added)
        lines += [_company_line(corpus, len(order.corpora) == 1) for corpus in kept]
    return result, [*lines, *_weight_lines(result, here)] if samples_consumed else []


def _cut_otherwise(order: BlendSchedule, saved: _Saved, matches: Mapping[str, str]) -> dict[str, str]:
    """Return name there -> name here of corpora whose samples alone differ: same content, same tokenizer."""
    left = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    here = {tuple(corpus.fingerprint.split(".")[:-1]): corpus.name for corpus in left}
    there = {
        name: tuple(saved.fingerprints[name].split(".")[:-1]) for name in saved.fingerprints if name not in matches
    }
    return {name: here[key] for name, key in there.items() if len(key) == len(_PARTS) - 1 and key in here}


def _company_line(corpus: Corpus, is_alone: bool) -> str:
    """Return what becomes of a corpus when others come to it: it is drawn otherwise than alone, as they differ."""
    company = "alone now" if is_alone else "one of several now"
    return f"data: {corpus.name} is {company}, so the spans or middles of its samples are drawn otherwise from here on"


def _weight_lines(order: BlendSchedule, samples_consumed: int) -> list[str]:
    if all(phase.start != samples_consumed for phase in order.phases):
        return []
    cursors, weights = order.cursors(samples_consumed), order.weights(samples_consumed)
    places = ", ".join(f"{weights[name]:.4g} {name} from its sample {cursors[name]}" for name in cursors)
    return [f"data: new weights from sample {samples_consumed} on: {places}"]


def _differences(
    order: BlendSchedule, saved: _Saved, matches: Mapping[str, str], settings: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return what differs from the checkpoint, changed settings first; empty if every corpus of it is here.

    Fingerprints are logged for debugging only: a user can do nothing with them.
    """
    lost = [name for name in saved.fingerprints if name not in matches]
    parts: set[str] = set()
    files: list[str] = []
    whos: list[str] = []
    for name in lost:
        was, now = saved.fingerprints[name], _successor(order, name, matches)
        here = ", ".join(f"{corpus.name} {_like(was, corpus)}" for corpus in ([now] if now else order.corpora))
        log.debug(f"data: fingerprint {was} of {name} in the checkpoint, now: {here}")
        who = f"{name if name == _ONE else f'corpus {name}'} ({saved.cursors.get(name, 0):,} samples of it read)"
        whos.append(who)
        if now is None:
            parts.add(CONTENT)
            files.append(f"{who} is missing; now given: {', '.join(corpus.name for corpus in order.corpora)}")
            continue
        changed = _changed_parts(was, now.fingerprint)
        parts.update(changed or _PARTS)
        if CONTENT in changed:
            files.append(_content_text(who, saved.sizes.get(name, {}), now, is_renamed=now.name != name))
        if TOKENIZER in changed and not settings.get(TOKENIZER):
            files.append(f"{who} was built with another tokenizer")
    if not lost:
        return []
    parts.add(SAMPLES)  # a change of content or tokenizer hides one of samples in the fingerprint
    said = [text for part in (SAMPLES, TOKENIZER, CONTENT) if part in parts for text in settings.get(part, ())]
    if not said and not files:
        files = [f"the split, seed, length or another setting of samples has changed for {', '.join(whos)}"]
    return [*said, *files]


def _successor(order: BlendSchedule, name: str, matches: Mapping[str, str]) -> Corpus | None:
    """Return the corpus here that a corpus of the checkpoint has become: that of its name, or the only one left."""
    left = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    same = [corpus for corpus in left if corpus.name == name] or (left if len(left) == 1 else [])
    return same[0] if same else None


def _content_text(who: str, saved: Mapping[str, int], now: Corpus, *, is_renamed: bool) -> str:
    """Return how the files of a corpus have changed: by numbers of documents and tokens where these differ."""
    sizes = {unit: (saved[unit], number) for unit, number in now.sizes.items() if unit in saved}
    changes = [f"{old:,} {unit}, now {new:,}" for unit, (old, new) in sizes.items() if old != new]
    had = f"had {' and '.join(changes)}" if changes else "has other documents now"
    return f"{who} {had}{f' (in {now.name})' if is_renamed else ''}"


def _changed_parts(was: str, now: str) -> tuple[str, ...]:
    """Return the parts in which two fingerprints differ; none if an old checkpoint has only that of the samples."""
    before, after = was.split("."), now.split(".")
    if len(before) != len(_PARTS) or len(after) != len(_PARTS):
        return ()
    changed = [part for part, old, new in zip(_PARTS, before, after, strict=True) if old != new]
    if before[0] != after[0]:
        changed.remove(SAMPLES)  # the fingerprint of samples contains that of the tokens
    return tuple(changed)


def _of_one(order: BlendSchedule, fingerprint: str, samples_consumed: int) -> _Saved:
    """Return what a checkpoint means that holds the fingerprint of a single corpus's samples and nothing else."""
    found = [
        corpus
        for corpus in order.corpora
        if fingerprint in (corpus.fingerprint, *corpus.other_fingerprints, _samples(corpus))
    ]
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
        return _Saved(state["fingerprints"], state["cursors"], phases, dict(state.get("sizes", {})))
    except (KeyError, TypeError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"the order of the data in the checkpoint cannot be used: {what}. Take an older checkpoint, or --finetune to "
        "start anew from its weights."
    )
