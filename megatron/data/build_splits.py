"""From the corpora that flags name to the samples of training, validation and test: what both models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron.data import checks
from megatron.data.cache import Cache
from megatron.data.corpora import DataPaths, WeightedPath, short_names
from megatron.data.documents import Documents
from megatron.data.mixed_samples import CorpusSamples, MixedSamples
from megatron.data.mixture import Corpus, SampleOrder
from megatron.data.mixture_resume import fingerprint_of
from megatron.data.split import split_by_hash, split_documents
from megatron.data.token_file import TokenFile

Three = tuple[MixedSamples | None, MixedSamples | None, MixedSamples | None]


@dataclass(frozen=True)
class Opened:
    """A corpus whose files are open and checked.

    ``content`` is the fingerprint of its files. ``make`` returns the samples of some of its documents; its second
    argument are the ``draws`` of ``T5Samples``, "" for a corpus that is alone. A sample takes ``sample_tokens`` tokens
    of ``token_file``, as ``asked_by`` (a flag with its value) wants it. ``is_drawn`` as in ``Corpus``.
    """

    token_file: TokenFile
    content: str
    make: Callable[[Documents, str], CorpusSamples]
    sample_tokens: int
    asked_by: str
    is_drawn: bool


def build_splits(
    paths: DataPaths,
    needed: Sequence[bool],
    open_corpus: Callable[[str, Cache], Opened],
    tokenizer_identity: str | None,
    tokens_per_sample: Callable[[Sequence[CorpusSamples]], int],
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    A corpus of weight 0 is left out of an evaluation. In training it stays: its cursor goes on, and a schedule or a
    resumed run may give it weight.

    Args:
        open_corpus: from a prefix, and what keeps its order for the other processes of this host.
        tokens_per_sample: those that a schedule of the mixture counts, from the samples of the corpora.

    Raises:
        DataError: a corpus cannot be opened, is listed twice, or holds less than one sample in a needed split.
    """
    train, *evaluated = paths.corpora(needed)
    wanted, cache = [train, *map(_with_weight, evaluated)], Cache(paths.cache_path)
    opened = {
        prefix: open_corpus(prefix, cache)
        for prefix in dict.fromkeys(prefix for corpora in wanted for _, prefix in corpora or ())
    }
    documents = {
        prefix: _documents(corpus, paths, [prefix in map(itemgetter(1), corpora or ()) for corpora in wanted], cache)
        for prefix, corpus in opened.items()
    }

    def split(number: int) -> MixedSamples | None:
        corpora = wanted[number]
        if corpora is None:
            return None
        files = [opened[prefix] for _, prefix in corpora]
        parts = [
            corpus.make(documents[prefix][number], corpus.content if len(corpora) > 1 else "")
            for corpus, (_, prefix) in zip(files, corpora, strict=True)
        ]
        length = tokens_per_sample(parts)
        schedule = paths.schedule(length) if number == 0 else [(0, tuple(weight for weight, _ in corpora))]
        return _mixed(corpora, files, parts, schedule, tokenizer_identity)

    return split(0), split(1), split(2)


def _with_weight(corpora: tuple[WeightedPath, ...] | None) -> tuple[WeightedPath, ...] | None:
    return corpora and tuple((weight, prefix) for weight, prefix in corpora if weight)


def _documents(corpus: Opened, paths: DataPaths, needed: Sequence[bool], cache: Cache) -> list[Documents]:
    """Return the documents of the three splits; ``needed`` are those that read this corpus."""
    token_file = corpus.token_file
    checks.check_one_sample(token_file, corpus.sample_tokens, corpus.asked_by)
    if paths.are_apart:
        return [(0, token_file.num_documents)] * 3
    flags, documents = f"--split {paths.split}", list[Documents]()
    if paths.split_by == "hash":
        flags += " --split-by hash"
        documents += split_by_hash(token_file, paths.split, cache)
    else:
        documents += split_documents(token_file.num_documents, paths.split)
    checks.check_splits(token_file, documents, needed, flags, corpus.sample_tokens, corpus.asked_by)
    return documents


def _mixed(
    corpora: Sequence[WeightedPath],
    opened: Sequence[Opened],
    parts: Sequence[CorpusSamples],
    schedule: Sequence[tuple[int, tuple[float, ...]]],
    tokenizer_identity: str | None,
) -> MixedSamples:
    names = short_names([prefix for _, prefix in corpora])
    known = [
        Corpus(
            name,
            fingerprint_of(corpus.content, _tokenizer(corpus, tokenizer_identity), part.fingerprint),
            part.samples_per_epoch,
            corpus.is_drawn,
        )
        for name, corpus, part in zip(names, opened, parts, strict=True)
    ]
    return MixedSamples(dict(zip(names, parts, strict=True)), SampleOrder(known, schedule))


def _tokenizer(corpus: Opened, given: str | None) -> str | None:
    sidecar = corpus.token_file.sidecar
    return given or (sidecar.tokenizer if sidecar else None)
