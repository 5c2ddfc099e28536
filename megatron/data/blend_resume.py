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

_UNNAMED_CORPUS = "the only corpus of the checkpoint"
"""Name of the corpus of a single-corpus checkpoint, which does not store a name."""
SAME_LENGTH = Fraction(1)
CONTENT, TOKENIZER, SAMPLES = "content", "tokenizer", "samples"
_FINGERPRINT_FIELDS = (CONTENT, TOKENIZER, SAMPLES)
"""The parts of a fingerprint."""


@dataclass
class _SavedState:
    """State in a checkpoint; the keys are the corpora's names when it was saved."""

    fingerprints: dict[str, str]
    cursors: dict[str, int]
    phases: list[tuple[int, dict[str, int], dict[str, int]]]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


def make_fingerprint(tokens: str, tokenizer: str | None, samples: str) -> str:
    """Combine the token file, tokenizer and sample digests into a corpus fingerprint."""
    return f"{tokens}.{(tokenizer or 'unknown')[:16]}.{samples}"


def resumed_order(
    order: BlendSchedule, state: Mapping[str, Any] | str, samples_consumed: int, *, allow_change: bool = False,
    ratio: Fraction = SAME_LENGTH, settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[BlendSchedule, list[str]]:  # fmt: skip
    """Return the schedule that continues ``order`` from a checkpoint, and log lines that describe the changes.

    Args:
        state: result of ``BlendSchedule.state``, or only a fingerprint (old single-corpus checkpoints).
        samples_consumed: samples that the saved run consumed.
        ratio: tokens per sample in the checkpoint over tokens per sample in this run. If they differ, the run continues
            at the first sample that begins at or after the consumed tokens. The cursor of each corpus with
            the same tokens is converted in the same way.
        allow_change: continue even if a corpus is missing or has changed. Unchanged corpora keep their cursors; all
            other corpora start at their first sample.
        settings: fingerprint part (``CONTENT``, ``TOKENIZER`` or ``SAMPLES``) -> descriptions of the changed
            settings that affect this part, such as "--split was 9,1,0, now 8,2,0".

    Raises:
        CheckpointError: a corpus in the checkpoint has no match by fingerprint in this run, or ``state`` is damaged.
    """
    saved = (
        _single_corpus_state(order, state, samples_consumed)
        if isinstance(state, str)
        else _decode_state(state, samples_consumed)
    )
    by_fingerprint = {text: corpus for corpus in order.corpora for text in corpus.other_fingerprints}
    by_fingerprint |= {corpus.fingerprint: corpus for corpus in order.corpora}
    matches = {name: by_fingerprint[text].name for name, text in saved.fingerprints.items() if text in by_fingerprint}
    differences = _describe_differences(order, saved, matches, settings)
    if differences and not allow_change:
        raise CheckpointError(
            f"the data differ from the data of the checkpoint: {'; '.join(differences)}. Samples would be repeated or "
            "lost. Restore the earlier settings and files (to stop reading a corpus, set its weight to 0), or add "
            "--allow-data-change: unchanged corpora continue at their position, the others start at their first sample."
        )

    new_samples_consumed, cursors, lines = (
        math.ceil(samples_consumed * ratio),
        saved.cursors,
        [f"data changed: {text}" for text in differences],
    )
    if ratio != SAME_LENGTH:
        matches |= _match_resampled_corpora(order, saved, matches)
        cursors = {name: math.ceil(cursor * ratio) for name, cursor in cursors.items()}
        continued = {matches[name]: cursor for name, cursor in cursors.items() if name in matches}
        lines += [f"data: {name} continues at its sample {cursor}" for name, cursor in continued.items()]

    def in_current_order(values: Mapping[str, int]) -> list[int]:
        """Convert saved name -> value to a list in the current corpus order, with 0 for new corpora."""
        current_values = {matches[name]: value for name, value in values.items() if name in matches}
        return [current_values.get(corpus.name, 0) for corpus in order.corpora]

    is_changed = bool(differences) or ratio != SAME_LENGTH
    history = (
        []
        if is_changed
        else [
            (start, in_current_order(phase_weights), in_current_order(phase_cursors))
            for start, phase_weights, phase_cursors in saved.phases
        ]
    )
    resumed = BlendSchedule(
        order.corpora,
        order.schedule,
        history=history,
        samples_consumed=new_samples_consumed,
        cursors=in_current_order(cursors),
    )
    if not is_changed and in_current_order(saved.cursors) != list(resumed.cursors(samples_consumed).values()):
        raise _damaged_error(
            f"its cursors are {saved.cursors}, but its phases result in {resumed.cursors(samples_consumed)}"
        )
    added = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    lines += [f"data: {corpus.name} is new and starts at its first sample" for corpus in added]
    if (len(saved.fingerprints) == 1) != (len(order.corpora) == 1):
        redrawn = (corpus for corpus in order.corpora if corpus.has_random_draws and corpus not in added)
        lines += [_redraw_message(corpus, len(order.corpora) == 1) for corpus in redrawn]
    return resumed, [*lines, *_describe_weights(resumed, new_samples_consumed)] if samples_consumed else []


def _match_resampled_corpora(order: BlendSchedule, saved: _SavedState, matches: Mapping[str, str]) -> dict[str, str]:
    """Match corpora with the same content and tokenizer but different samples: saved name -> current name."""
    unmatched = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    current_names = {tuple(corpus.fingerprint.split(".")[:-1]): corpus.name for corpus in unmatched}
    saved_keys = {
        name: tuple(saved.fingerprints[name].split(".")[:-1]) for name in saved.fingerprints if name not in matches
    }
    return {
        name: current_names[key]
        for name, key in saved_keys.items()
        if len(key) == len(_FINGERPRINT_FIELDS) - 1 and key in current_names
    }


def _redraw_message(corpus: Corpus, is_single_corpus: bool) -> str:
    """Format a log line: the random draws of ``corpus`` change, because one corpus became a mixture or vice versa."""
    situation = "the only corpus now" if is_single_corpus else "one of several corpora now"
    return (
        f"data: {corpus.name} is {situation}, so the random spans or fill-in-the-middle splits of its samples change "
        "from this step on"
    )


def _describe_weights(order: BlendSchedule, samples_consumed: int) -> list[str]:
    if all(phase.start != samples_consumed for phase in order.phases):
        return []
    cursors, weights = order.cursors(samples_consumed), order.weights(samples_consumed)
    shares = ", ".join(f"{weights[name]:.4g} {name} from its sample {cursors[name]}" for name in cursors)
    return [f"data: new weights from sample {samples_consumed} on: {shares}"]


def _describe_differences(
    order: BlendSchedule, saved: _SavedState, matches: Mapping[str, str], settings: Mapping[str, Sequence[str]]
) -> list[str]:
    """Describe the differences from the checkpoint, changed settings first; empty if all saved corpora are present.

    Fingerprints are only logged at debug level because they do not help the user.
    """
    unmatched_names = [name for name in saved.fingerprints if name not in matches]
    changed_fields: set[str] = set()
    content_changes: list[str] = []
    corpus_descriptions: list[str] = []
    for name in unmatched_names:
        saved_fingerprint, successor = saved.fingerprints[name], _find_successor(order, name, matches)
        candidates = ", ".join(
            f"{corpus.name} {_comparable_fingerprint(saved_fingerprint, corpus)}"
            for corpus in ([successor] if successor else order.corpora)
        )
        log.debug(f"data: fingerprint {saved_fingerprint} of {name} in the checkpoint, now: {candidates}")
        description = (
            f"{name if name == _UNNAMED_CORPUS else f'corpus {name}'} ({saved.cursors.get(name, 0):,} samples read)"
        )
        corpus_descriptions.append(description)
        if successor is None:
            changed_fields.add(CONTENT)
            content_changes.append(
                f"{description} is missing; this run has: {', '.join(corpus.name for corpus in order.corpora)}"
            )
            continue
        changed = _find_changed_fields(saved_fingerprint, successor.fingerprint)
        changed_fields.update(changed or _FINGERPRINT_FIELDS)
        if CONTENT in changed:
            content_changes.append(
                _describe_content_change(
                    description, saved.counts.get(name, {}), successor, is_renamed=successor.name != name
                )
            )
        if TOKENIZER in changed and not settings.get(TOKENIZER):
            content_changes.append(f"{description} was built with a different tokenizer")
    if not unmatched_names:
        return []
    # The sample settings may have changed, too: changed content or a changed tokenizer hides this in the fingerprint.
    changed_fields.add(SAMPLES)
    setting_changes = [
        text
        for field_name in (SAMPLES, TOKENIZER, CONTENT)
        if field_name in changed_fields
        for text in settings.get(field_name, ())
    ]
    if not setting_changes and not content_changes:
        content_changes = [
            f"the split, seed, length or another setting of samples has changed for {', '.join(corpus_descriptions)}"
        ]
    return [*setting_changes, *content_changes]


def _find_successor(order: BlendSchedule, name: str, matches: Mapping[str, str]) -> Corpus | None:
    """Find the unmatched corpus with the same name, or the only unmatched corpus; None if there is neither."""
    unmatched = [corpus for corpus in order.corpora if corpus.name not in matches.values()]
    candidates = [corpus for corpus in unmatched if corpus.name == name] or (unmatched if len(unmatched) == 1 else [])
    return candidates[0] if candidates else None


def _describe_content_change(
    description: str, saved_counts: Mapping[str, int], current_corpus: Corpus, *, is_renamed: bool
) -> str:
    """Describe the change in a corpus's files, with document and token counts if they differ."""
    counts_by_unit = {
        unit: (saved_counts[unit], count) for unit, count in current_corpus.counts.items() if unit in saved_counts
    }
    changes = [f"{old:,} {unit}, now {new:,}" for unit, (old, new) in counts_by_unit.items() if old != new]
    difference = f"had {' and '.join(changes)}" if changes else "has different documents now"
    return f"{description} {difference}{f' (in {current_corpus.name})' if is_renamed else ''}"


def _find_changed_fields(saved_fingerprint: str, current_fingerprint: str) -> tuple[str, ...]:
    """Find the parts in which two fingerprints differ; () if an old checkpoint only has the samples' fingerprint."""
    saved_digests, current_digests = saved_fingerprint.split("."), current_fingerprint.split(".")
    if len(saved_digests) != len(_FINGERPRINT_FIELDS) or len(current_digests) != len(_FINGERPRINT_FIELDS):
        return ()
    changed = [
        field_name
        for field_name, old, new in zip(_FINGERPRINT_FIELDS, saved_digests, current_digests, strict=True)
        if old != new
    ]
    if saved_digests[0] != current_digests[0]:
        changed.remove(SAMPLES)  # the sample digest depends on the content
    return tuple(changed)


def _single_corpus_state(order: BlendSchedule, fingerprint: str, samples_consumed: int) -> _SavedState:
    """Build the state for a checkpoint that only contains the samples' fingerprint for a single corpus."""
    matching = [
        corpus
        for corpus in order.corpora
        if fingerprint in (corpus.fingerprint, *corpus.other_fingerprints, _samples_digest(corpus))
    ]
    phases = [(0, {_UNNAMED_CORPUS: 1}, {_UNNAMED_CORPUS: 0})] if samples_consumed else []
    return _SavedState(
        {_UNNAMED_CORPUS: matching[0].fingerprint if matching else fingerprint},
        {_UNNAMED_CORPUS: samples_consumed},
        phases,
    )


def _comparable_fingerprint(saved_fingerprint: str, corpus: Corpus) -> str:
    """Convert the fingerprint of ``corpus`` to the saved format: complete, or only the sample digest."""
    return corpus.fingerprint if "." in saved_fingerprint else _samples_digest(corpus)


def _samples_digest(corpus: Corpus) -> str:
    return corpus.fingerprint.rsplit(".", 1)[-1]


def _decode_state(state: Mapping[str, Any], samples_consumed: int) -> _SavedState:
    """Decode the state in a checkpoint, or raise CheckpointError if it is damaged."""
    try:
        if state["format"] != FORMAT:
            raise _damaged_error(f"its format is {state['format']!r}, only {FORMAT} is supported")
        if state["samples_consumed"] != samples_consumed:
            raise _damaged_error(f"it is for sample {state['samples_consumed']}, but the run is at {samples_consumed}")
        # The state of another order has no phases. Its fingerprints match no corpus of this order.
        saved_phases = [] if "order" in state else state["phases"]
        phases = [(phase["start"], phase["weights"], phase["cursors"]) for phase in saved_phases]
        return _SavedState(state["fingerprints"], state["cursors"], phases, dict(state.get("sizes", {})))
    except (KeyError, TypeError) as error:
        raise _damaged_error(f"{type(error).__name__}: {error}") from error


def _damaged_error(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the data order in the checkpoint cannot be used: {reason}. Load an older checkpoint, or add --finetune to "
        "start a new run from its weights."
    )
