"""BlendedDataset: which corpus a sample comes from, cursors and phases; going on from a checkpoint with another
blend.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from megatron import log
from megatron.errors import CheckpointError, DataError, SampleError

# Which of several corpora each sample of a mixture comes from, by weights alone: exact, and known for any sample.
#
# Two corpora with weights a and b: sample k of a corpus of share w falls at time (k + 1/2) / w, and samples follow one
# another by time, a tie by rank. So among the first n samples are round(n a / (a + b)) of the first corpus, which is
# all the arithmetic there is. More corpora are put together two by two, the two lightest first (a Huffman tree), until
# two groups are left, and the same rule chooses at each branch. Nothing is stored but the weights, whole numbers of any
# size: sample n is found in as many steps as it has branches, and no count ever drifts.
#
# After n samples a corpus of share w has given n w of them, off by less than one with up to three corpora and by less
# than 1.7 with any number (1.3 was the most in 3,000 random mixtures). For a branch adds at most 1/2 and hands on what
# the one above it was off by in the ratio of their weights, and these grow as Fibonacci's numbers towards the root.
# Merging all corpora by their times in one go would be off by 12 with weights 50, 1, 1, ... (50 ones): all the ones
# have the same times, so they would come in a row.
#
# Source of the tree: Huffman 1952, "A method for the construction of minimum-redundancy codes".


@dataclass(frozen=True)
class _Branch:
    """Two groups of corpora; ``weight`` of ``total`` goes to ``left``, which holds the lowest rank."""

    left: _Branch | int
    right: _Branch | int
    weight: int
    total: int

    def given_left(self, num_samples: int) -> int:
        """Return how many of the first samples went left: num_samples * weight / total, a half rounded up."""
        return (2 * num_samples * self.weight + self.total) // (2 * self.total)


class BlendIndex:
    """The order of samples of corpora 0, 1, 2, ... by weights.

    Args:
        weights: whole numbers >= 0, not all 0.
        ranks: which corpus goes first at equal times or weights: that of the lowest rank. Ranks differ.
    """

    def __init__(self, weights: Sequence[int], ranks: Sequence[int] | None = None) -> None:
        self.weights = tuple(weights)
        self._root = _tree(self.weights, range(len(self.weights)) if ranks is None else ranks)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (corpus, index within the corpus) of sample ``index``."""
        node = self._root
        while isinstance(node, _Branch):
            before = node.given_left(index)
            if node.given_left(index + 1) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first ``num_samples`` each corpus gives."""
        counts = [0] * len(self.weights)
        waiting = [(self._root, num_samples)]
        while waiting:
            node, number = waiting.pop()
            if isinstance(node, _Branch):
                left = node.given_left(number)
                waiting += [(node.left, left), (node.right, number - left)]
            else:
                counts[node] = number
        return tuple(counts)


def _tree(weights: Sequence[int], ranks: Sequence[int]) -> _Branch | int:
    heap: list[tuple[int, int, _Branch | int]] = [
        (weight, rank, number) for number, (weight, rank) in enumerate(zip(weights, ranks, strict=True)) if weight
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        pair = heapq.heappop(heap), heapq.heappop(heap)
        (weight, rank, left), (other, _, right) = sorted(pair, key=lambda entry: entry[1])
        heapq.heappush(heap, (weight + other, rank, _Branch(left, right, weight, weight + other)))
    return heap[0][2]


# Which sample of which corpus is sample i of a run: a function of i and of what the checkpoint says, without a file.
#
# A run is cut into phases. In each, ``BlendIndex`` says by weights which corpus a sample comes from, and each corpus
# goes on at its cursor: how many of its samples all phases before have given. So however weights change and corpora
# come in addition, each corpus gives its samples 0, 1, 2, ... without a gap and without one twice.
#
# A new phase starts where a schedule says so, and where a run is resumed with other weights than it was left with.

FORMAT = 1
_LARGEST_TOTAL = 1 << 48


@dataclass(frozen=True)
class Corpus:
    """What an order must know of a corpus: ``fingerprint`` changes with all that changes its samples.

    ``is_drawn``: its samples are made by random draws (spans, fill-in-the-middle), which company changes.
    ``num_documents``, ``num_tokens``: of its files, for messages; None where they are unknown.
    ``other_fingerprints``: names of the same corpus in runs of other versions, or with a copy of the tokenizer.
    """

    name: str
    fingerprint: str
    samples_per_epoch: int
    is_drawn: bool = False
    num_documents: int | None = None
    num_tokens: int | None = None
    other_fingerprints: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of documents and tokens, as far as they are known."""
        known = {"documents": self.num_documents, "tokens": self.num_tokens}
        return {name: number for name, number in known.items() if number is not None}


@dataclass(frozen=True)
class Phase:
    """From sample ``start`` on ``weights`` hold; corpus c had given ``cursors[c]`` samples before.

    ``ranks`` decide between corpora of one weight: the place by fingerprint, so that an order in which corpora are
    listed, or one more of them, changes nothing for the others.
    """

    start: int
    weights: tuple[int, ...]
    cursors: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def interleaving(self) -> BlendIndex:
        return BlendIndex(self.weights, self.ranks)

    def cursors_at(self, samples_consumed: int) -> tuple[int, ...]:
        """Return how many samples each corpus has given; ``samples_consumed`` lies in this phase or at its end."""
        counts = self.interleaving.counts(samples_consumed - self.start)
        return tuple(cursor + count for cursor, count in zip(self.cursors, counts, strict=True))


class BlendSchedule:
    """The order of the samples of a run; picklable, and equal on all ranks that make it from the same.

    Args:
        corpora: told apart by name and by fingerprint.
        schedule: (first sample, weight of each corpus) by rising samples, the first from sample 0 on. A weight is >= 0.
        history: (start, weights, cursors) of each phase that the run has been in; the last goes on while its weights
            hold.
        samples_consumed: where the history ends.
        cursors: samples that each corpus has given by then, where no history tells it.

    Raises:
        DataError: no corpus, two of one name or with the same samples, or weights that cannot be used.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        schedule: Sequence[tuple[int, Sequence[float]]],
        *,
        history: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
        samples_consumed: int = 0,
        cursors: Sequence[int] | None = None,
    ) -> None:
        self.corpora, self.schedule = tuple(corpora), tuple((start, tuple(weights)) for start, weights in schedule)
        self._check()
        in_order = sorted(corpus.fingerprint for corpus in self.corpora)
        self._ranks = tuple(in_order.index(corpus.fingerprint) for corpus in self.corpora)
        self.phases = [Phase(start, tuple(w), tuple(c), self._ranks) for start, w, c in history]
        wanted = [(start, whole_weights(weights)) for start, weights in self.schedule]
        now = bisect_right(wanted, samples_consumed, key=lambda step: step[0]) - 1
        for start, weights in [(samples_consumed, wanted[now][1]), *wanted[now + 1 :]]:
            self._go_on(start, weights, cursors)
        self._starts = [phase.start for phase in self.phases]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (number of the corpus, index within the corpus) of sample ``index`` of the run."""
        phase = self._phase(index)
        corpus, place = phase.interleaving.locate(index - phase.start)
        return corpus, phase.cursors[corpus] + place

    def cursors(self, samples_consumed: int) -> dict[str, int]:
        """Return how many samples each corpus has given."""
        return self._by_name(self._before(samples_consumed).cursors_at(samples_consumed))

    def epochs(self, samples_consumed: int) -> dict[str, float]:
        """Return how often each corpus has been read."""
        cursors = self.cursors(samples_consumed)
        return {corpus.name: cursors[corpus.name] / corpus.samples_per_epoch for corpus in self.corpora}

    def weights(self, samples_consumed: int) -> dict[str, float]:
        """Return each corpus's share of the samples that follow; they add up to 1."""
        weights = self._phase(samples_consumed).weights
        return self._by_name(tuple(weight / sum(weights) for weight in weights))

    def state(self, samples_consumed: int) -> dict[str, Any]:
        """Return what a checkpoint must hold so that ``resumed_order`` can go on; JSON can carry it."""
        used = [phase for phase in self.phases if phase.start < samples_consumed]
        return {
            "format": FORMAT,
            "samples_consumed": samples_consumed,
            "fingerprints": {corpus.name: corpus.fingerprint for corpus in self.corpora},
            **({"sizes": sizes} if (sizes := {each.name: each.sizes for each in self.corpora if each.sizes}) else {}),
            "cursors": self.cursors(samples_consumed),
            "phases": [
                {
                    "start": phase.start,
                    "weights": self._by_name(phase.weights),
                    "cursors": self._by_name(phase.cursors),
                }
                for phase in used
            ],
        }

    def _go_on(self, start: int, weights: tuple[int, ...], cursors: Sequence[int] | None) -> None:
        """Add a phase, unless the weights stay what they are; ``cursors`` are those before the first phase."""
        if not self.phases:
            self.phases.append(Phase(start, weights, tuple(cursors or (0,) * len(self.corpora)), self._ranks))
        elif self.phases[-1].weights != weights:
            self.phases.append(Phase(start, weights, self.phases[-1].cursors_at(start), self._ranks))

    def _phase(self, index: int) -> Phase:
        place = bisect_right(self._starts, index) - 1
        if place < 0:
            raise IndexError(f"samples of this order count from {self._starts[0]}, got {index}")
        return self.phases[place]

    def _before(self, samples_consumed: int) -> Phase:
        """Return the phase that the last sample before ``samples_consumed`` lies in, or the first."""
        return self._phase(max(samples_consumed - 1, self._starts[0]))

    def _by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        return {corpus.name: value for corpus, value in zip(self.corpora, values, strict=True)}

    def _check(self) -> None:
        for what in ("name", "fingerprint"):
            seen: dict[str, Corpus] = {}
            for corpus in self.corpora:
                other = seen.setdefault(getattr(corpus, what), corpus)
                if other is not corpus:
                    raise DataError(
                        f"each corpus of a mixture must stand there once, got {other.name} and {corpus.name} with the "
                        f"same {what} {getattr(corpus, what)}. Give one of them the sum of the weights."
                    )
        if not self.schedule or self.schedule[0][0] > 0:
            raise DataError("a mixture must have weights from its first sample on")


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of ``weights`` as they print: 0.7 and 0.3 are 7 and 3.

    Where their sum would pass 2^48 they are rounded to it; none that is above 0 becomes 0.

    Raises:
        DataError: negative, not finite, or all 0.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise DataError(f"weights of corpora must be finite, at least 0 and not all 0, got {list(weights)}")
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact, Fraction(0))
    scale = min(Fraction(math.lcm(*(weight.denominator for weight in exact))), _LARGEST_TOTAL / total)
    whole = [max(round(weight * scale), 1) if weight else 0 for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


# Going on from a checkpoint with the mixture of now: what agrees, what has changed, and what that means.
#
# Corpora are known by fingerprint, whatever they are called: the same data at another path go on where they stopped.
# A fingerprint is three texts with dots between them, so that one can say what differs.

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


# The samples of one split of a run: those of one corpus, or of several in the order of a mixture.


class MegatronDataset(Protocol):
    """The samples of one corpus: ``GPTDataset``, ``T5Dataset``, ``SpanFilesDataset``."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def samples_per_epoch(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class BlendedDataset:
    """Sample i, for any i >= 0, is the one that ``order`` says; with one corpus that corpus's sample i.

    ``parts`` are the samples of each corpus by its name, for what is to be told of each apart.
    """

    def __init__(self, parts: Mapping[str, MegatronDataset], order: BlendSchedule) -> None:
        self.parts = dict(parts)
        self.use_order(order)

    def use_order(self, order: BlendSchedule) -> None:
        """Read in this order from now on; it must be one of these corpora.

        Raises:
            ValueError: it is one of others.
        """
        names = [corpus.name for corpus in order.corpora]
        if names != list(self.parts):
            raise ValueError(f"an order of {list(self.parts)} is needed, got one of {names}")
        self.order, self._by_number = order, list(self.parts.items())

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes when the samples of a corpus do, or one comes or goes; weights do not matter."""
        prints = [part.fingerprint for part in self.parts.values()]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256(":".join(sorted(prints)).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``.

        Raises:
            SampleError: it cannot be read; names its place in the run, in the corpus and in the file.
        """
        number, place = self.order.locate(index)
        name, part = self._by_number[number]
        try:
            return part[place]
        except DataError as error:
            if len(self.parts) == 1 and place == index:
                raise
            raise SampleError(f"sample {index} of the run is sample {place} of corpus {name}: {error}") from error


# Which data sets say what order their samples come in and which corpora these are of.
#
# A data set of a user's own may have attributes of the same names that mean something else, so all that asks goes
# through here.


class Ordered(Protocol):
    """``BlendedDataset``, or a data set of a user's own that passes on what one has."""

    @property
    def order(self) -> BlendSchedule: ...

    @property
    def parts(self) -> Mapping[str, MegatronDataset]: ...

    def use_order(self, order: BlendSchedule) -> None: ...


def as_ordered(dataset: object) -> Ordered | None:
    """Return ``dataset`` if it has an order, the corpora of that order, and can take another; else None."""
    order, parts = getattr(dataset, "order", None), getattr(dataset, "parts", None)
    if not isinstance(order, BlendSchedule) or not isinstance(parts, Mapping):
        return None
    if list(parts) != [corpus.name for corpus in order.corpora] or not callable(getattr(dataset, "use_order", None)):
        return None
    return dataset  # type: ignore[return-value]
