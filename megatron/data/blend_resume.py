"""Resume a mixture from a checkpoint whose corpora or weights may have changed.

Corpora are identified by fingerprint, not by name: a corpus that was moved to another path continues at its cursor. A
fingerprint consists of three digests (content, tokenizer, samples) separated by dots, so that an error message can name
the part that differs.
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

_ONE = "the only corpus of the checkpoint"
"""Name of the corpus of a single-corpus checkpoint, which does not store a name."""
SAME_LENGTH = Fraction(1)
CONTENT, TOKENIZER, SAMPLES = "content", "tokenizer", "samples"
_PARTS = (CONTENT, TOKENIZER, SAMPLES)
"""The parts of a fingerprint."""


@dataclass
class _Saved:
    """The state in a checkpoint; the keys are the names that the corpora had when it was saved."""

    fingerprints: dict[str, str]
    cursors: dict[str, int]
    phases: list[tuple[int, dict[str, int], dict[str, int]]]
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)


def fingerprint_of(tokens: str, tokenizer: str | None, samples: str) -> str:
    """Combine the digests of the token file, the tokenizer and the samples into the fingerprint of a corpus."""
    return f"{tokens}.{(tokenizer or 'unknown')[:16]}.{samples}"


def resumed_order(
    order: BlendSchedule, state: Mapping[str, Any] | str, samples_consumed: int, *, allow_change: bool = False,
    ratio: Fraction = SAME_LENGTH, settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[BlendSchedule, list[str]]:  # fmt: skip
    """Return the schedule that continues ``order`` from a checkpoint, and log lines that describe the changes.

    Args:
        state: result of ``BlendSchedule.state``, or only a fingerprint (old checkpoints of a single corpus).
        samples_consumed: samples consumed by the run that saved the checkpoint.
        ratio: tokens per sample of the checkpoint over tokens per sample of this run. If they differ, the run continues
            at the first sample that begins at or after the consumed number of tokens. The cursor of each corpus with
            the same tokens is converted in the same way.
        allow_change: continue even if a corpus is missing or has changed. Unchanged corpora keep their cursors, the
            others start at their first sample.
        settings: part of the fingerprint (``CONTENT``, ``TOKENIZER`` or ``SAMPLES``) -> descriptions of the changed
            settings that affect this part, such as "--split was 9,1,0, now 8,2,0".

    Raises:
        CheckpointError: a corpus in the checkpoint has no match by fingerprint in this run, or ``state`` is damaged.
    """
    saved = _of_one(order, state, samples_consumed) if isinstance(state, str) else _read(state, samples_consumed)
    by_fingerprint = {text: corpus for corpus in order.corpora for text in corpus.other_fingerprints}
    by_fingerprint |= {corpus.fingerprint: corpus for corpus in order.corpora}
    matches = {name: by_fingerprint[text].name for name, text in saved.fingerprints.items() if text in by_fingerprint}
    lost = _differences(order, saved, matches, settings)
    if lost and not allow_change:
        raise CheckpointError(
            f"the data differ from the data of the checkpoint: {'; '.join(lost)}. Samples would be repeated or lost. "
            "Restore the earlier settings and files (to stop reading a corpus, set its weight to 0), or add "
            "--allow-data-change: unchanged corpora continue at their position, the others start at their first sample."
        )

    samples_here, cursors, lines = (
        math.ceil(samples_consumed * ratio),
        saved.cursors,
        [f"data changed: {text}" for text in lost],
    )
    if ratio != SAME_LENGTH:
        matches |= _cut_otherwise(order, saved, matches)
        cursors = {name: math.ceil(cursor * ratio) for name, cursor in cursors.items()}
        continued = {matches[name]: cursor for name, cursor in cursors.items() if name in matches}
        lines += [f"data: {name} continues at its sample {cursor}" for name, cursor in continued.items()]

    def by_number(values: Mapping[str, int]) -> list[int]:
        """Convert saved name -> value to a list in the order of the current corpora, with 0 for new corpora."""
        current = {matches[name]: value for name, value in values.items() if name in matches}
        return [current.get(corpus.name, 0) for corpus in order.corpora]

    is_changed = bool(lost) or ratio != SAME_LENGTH
    history = [] if is_changed else [(start, by_number(w), by_number(c)) for start, w, c in saved.phases]
    result = BlendSchedule(
        order.corpora,
        order.schedule,
        history=history,
        samples_consumed=samples_here,
        cursors=by_number(cursors),
    )
    if not is_changed and by_number(saved.cursors) != list(result.cursors(samples_consumed).values()):
        raise _damaged(f"its cursors are {saved.cursors}, its phases result in {result.cursors(samples_consumed)}")
    added = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    lines += [f"data: {corpus.name} is new and starts at its first sample" for corpus in added]
    if (len(saved.fingerprints) == 1) != (len(order.corpora) == 1):
        redrawn = (corpus for corpus in order.corpora if corpus.is_drawn and corpus not in added)
        lines += [_company_line(corpus, len(order.corpora) == 1) for corpus in redrawn]
    return result, [*lines, *_weight_lines(result, samples_here)] if samples_consumed else []


def _cut_otherwise(order: BlendSchedule, saved: _Saved, matches: Mapping[str, str]) -> dict[str, str]:
    """Return saved name -> current name of corpora with the same content and tokenizer but different samples."""
    unmatched = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    current_names = {tuple(corpus.fingerprint.split(".")[:-1]): corpus.name for corpus in unmatched}
    saved_keys = {
        name: tuple(saved.fingerprints[name].split(".")[:-1]) for name in saved.fingerprints if name not in matches
    }
    return {
        name: current_names[key]
        for name, key in saved_keys.items()
        if len(key) == len(_PARTS) - 1 and key in current_names
    }


def _company_line(corpus: Corpus, is_alone: bool) -> str:
    """Return the log line for a corpus whose random draws change: a single corpus became a mixture, or vice versa."""
    situation = "the only corpus now" if is_alone else "one of several corpora now"
    return f"data: {corpus.name} is {situation}, so the random spans or middles of its samples change from this step on"


def _weight_lines(order: BlendSchedule, samples_consumed: int) -> list[str]:
    if all(phase.start != samples_consumed for phase in order.phases):
        return []
    cursors, weights = order.cursors(samples_consumed), order.weights(samples_consumed)
    shares = ", ".join(f"{weights[name]:.4g} {name} from its sample {cursors[name]}" for name in cursors)
    return [f"data: new weights from sample {samples_consumed} on: {shares}"]


def _differences(
    order: BlendSchedule, saved: _Saved, matches: Mapping[str, str], settings: Mapping[str, Sequence[str]]
) -> list[str]:
    """Describe the differences from the checkpoint, changed settings first; empty if all saved corpora are present.

    Fingerprints are only logged at debug level because they do not help the user.
    """
    lost = [name for name in saved.fingerprints if name not in matches]
    parts: set[str] = set()
    files: list[str] = []
    corpora: list[str] = []
    for name in lost:
        was, successor = saved.fingerprints[name], _successor(order, name, matches)
        candidates = ", ".join(
            f"{corpus.name} {_like(was, corpus)}" for corpus in ([successor] if successor else order.corpora)
        )
        log.debug(f"data: fingerprint {was} of {name} in the checkpoint, now: {candidates}")
        described = f"{name if name == _ONE else f'corpus {name}'} ({saved.cursors.get(name, 0):,} samples read)"
        corpora.append(described)
        if successor is None:
            parts.add(CONTENT)
            files.append(f"{described} is missing; this run has: {', '.join(corpus.name for corpus in order.corpora)}")
            continue
        changed = _changed_parts(was, successor.fingerprint)
        parts.update(changed or _PARTS)
        if CONTENT in changed:
            files.append(
                _content_text(described, saved.sizes.get(name, {}), successor, is_renamed=successor.name != name)
            )
        if TOKENIZER in changed and not settings.get(TOKENIZER):
            files.append(f"{described} was built with a different tokenizer")
    if not lost:
        return []
    # The settings of the samples may have changed, too: a change of content or tokenizer hides this in the fingerprint.
    parts.add(SAMPLES)
    setting_changes = [
        text for part in (SAMPLES, TOKENIZER, CONTENT) if part in parts for text in settings.get(part, ())
    ]
    if not setting_changes and not files:
        files = [f"the split, seed, length or another setting of samples has changed for {', '.join(corpora)}"]
    return [*setting_changes, *files]


def _successor(order: BlendSchedule, name: str, matches: Mapping[str, str]) -> Corpus | None:
    """Return the unmatched corpus of the same name, or the only unmatched corpus; None if there is neither."""
    unmatched = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    candidates = [corpus for corpus in unmatched if corpus.name == name] or (unmatched if len(unmatched) == 1 else [])
    return candidates[0] if candidates else None


def _content_text(who: str, saved: Mapping[str, int], now: Corpus, *, is_renamed: bool) -> str:
    """Describe the change of a corpus's files, with the numbers of documents and tokens if they differ."""
    sizes = {unit: (saved[unit], count) for unit, count in now.sizes.items() if unit in saved}
    changes = [f"{old:,} {unit}, now {new:,}" for unit, (old, new) in sizes.items() if old != new]
    difference = f"had {' and '.join(changes)}" if changes else "has different documents now"
    return f"{who} {difference}{f' (in {now.name})' if is_renamed else ''}"


def _changed_parts(was: str, now: str) -> tuple[str, ...]:
    """Return the parts in which two fingerprints differ; () if an old checkpoint only has the samples' fingerprint."""
    saved_parts, current_parts = was.split("."), now.split(".")
    if len(saved_parts) != len(_PARTS) or len(current_parts) != len(_PARTS):
        return ()
    changed = [part for part, old, new in zip(_PARTS, saved_parts, current_parts, strict=True) if old != new]
    if saved_parts[0] != current_parts[0]:
        changed.remove(SAMPLES)  # the digest of the samples depends on the content
    return tuple(changed)


def _of_one(order: BlendSchedule, fingerprint: str, samples_consumed: int) -> _Saved:
    """Return the state for a checkpoint that only contains the fingerprint of a single corpus's samples."""
    matching = [
        corpus
        for corpus in order.corpora
        if fingerprint in (corpus.fingerprint, *corpus.other_fingerprints, _samples(corpus))
    ]
    phases = [(0, {_ONE: 1}, {_ONE: 0})] if samples_consumed else []
    return _Saved({_ONE: matching[0].fingerprint if matching else fingerprint}, {_ONE: samples_consumed}, phases)


def _like(was: str, corpus: Corpus) -> str:
    """Return the fingerprint of ``corpus`` in the format of ``was``: complete, or only the digest of the samples."""
    return corpus.fingerprint if "." in was else _samples(corpus)


def _samples(corpus: Corpus) -> str:
    """Return the digest of the samples from the fingerprint of ``corpus``."""
    return corpus.fingerprint.rsplit(".", 1)[-1]


def _read(state: Mapping[str, Any], samples_consumed: int) -> _Saved:
    """Decode the state in a checkpoint, or raise CheckpointError if it is damaged."""
    try:
        if state["format"] != FORMAT:
            raise _damaged(f"its format is {state['format']!r}, only {FORMAT} is supported")
        if state["samples_consumed"] != samples_consumed:
            raise _damaged(f"it was saved at sample {state['samples_consumed']}, the run at {samples_consumed}")
        phases = [(phase["start"], phase["weights"], phase["cursors"]) for phase in state["phases"]]
        return _Saved(state["fingerprints"], state["cursors"], phases, dict(state.get("sizes", {})))
    except (KeyError, TypeError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"the data order in the checkpoint cannot be used: {what}. Load an older checkpoint, or add --finetune to "
        "start a new run from its weights."
    )
