"""Build the training, validation and test datasets from corpora."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron.data.blend_paths import BlendPaths, WeightedPath, short_names
from megatron.data.blend_resume import fingerprint_of
from megatron.data.blend_schedule import BlendSchedule, Corpus
from megatron.data.blended_dataset import BlendedDataset, MegatronDataset
from megatron.data.cache import IndexCache
from megatron.data.dataset_checks import check_one_sample, check_splits
from megatron.data.documents import Documents
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.split import split_by_hash, split_documents
from megatron.tokenizer.identity import parts

Three = tuple[BlendedDataset | None, BlendedDataset | None, BlendedDataset | None]


@dataclass(frozen=True)
class OpenCorpus:
    """A corpus whose files are open and checked.

    Args:
        content: fingerprint of the files.
        make: (documents, draws) -> the dataset of these documents; ``draws`` is as in ``GPTDataset``, and "" if the
            split has only one corpus.
        sample_tokens: tokens of ``token_file`` that one sample needs.
        asked_by: the flag and value that determine ``sample_tokens``, for error messages.
        is_drawn: see ``Corpus``.
    """

    token_file: IndexedDataset
    content: str
    make: Callable[[Documents, str], MegatronDataset]
    sample_tokens: int
    asked_by: str
    is_drawn: bool


def build_datasets(
    paths: BlendPaths,
    needed: Sequence[bool],
    open_corpus: Callable[[str, IndexCache], OpenCorpus],
    tokenizer_identity: str | None,
    tokens_per_sample: Callable[[Sequence[MegatronDataset]], int],
) -> Three:
    """Return the training, validation and test datasets; None for a split that is not needed.

    Evaluation splits skip corpora of weight 0. The training split retains them, together with their cursors, because
    a mixture schedule or a resumed run may assign them a weight later.

    Args:
        open_corpus: (prefix, cache) -> the opened corpus; ``cache`` shares the corpus's index with the other processes
            of this host.
        tokens_per_sample: computes the tokens per sample from the datasets of the corpora; a mixture schedule, which
            is given in tokens, is converted to samples with it.

    Raises:
        DataError: a corpus cannot be opened, is listed twice, or has less than one sample in a needed split.
    """
    train, *evaluated = paths.corpora(needed)
    wanted, cache = (
        [train, *map(_with_weight, evaluated)],
        IndexCache(paths.cache_path, paths.objects_path, paths.objects_bytes),
    )
    opened = {
        prefix: open_corpus(prefix, cache)
        for prefix in dict.fromkeys(prefix for corpora in wanted for _, prefix in corpora or ())
    }
    documents = {
        prefix: _documents(corpus, paths, [prefix in map(itemgetter(1), corpora or ()) for corpora in wanted], cache)
        for prefix, corpus in opened.items()
    }

    def split(number: int) -> BlendedDataset | None:
        corpora = wanted[number]
        if corpora is None:
            return None
        open_corpora = [opened[prefix] for _, prefix in corpora]
        parts = [
            corpus.make(documents[prefix][number], corpus.content if len(corpora) > 1 else "")
            for corpus, (_, prefix) in zip(open_corpora, corpora, strict=True)
        ]
        length = tokens_per_sample(parts)
        schedule = paths.schedule(length) if number == 0 else [(0, tuple(weight for weight, _ in corpora))]
        return _mixed(corpora, open_corpora, parts, schedule, tokenizer_identity)

    return split(0), split(1), split(2)


def _with_weight(corpora: tuple[WeightedPath, ...] | None) -> tuple[WeightedPath, ...] | None:
    return corpora and tuple((weight, prefix) for weight, prefix in corpora if weight)


def _documents(corpus: OpenCorpus, paths: BlendPaths, needed: Sequence[bool], cache: IndexCache) -> list[Documents]:
    """Return the documents of the three splits; ``needed`` marks the splits that read this corpus."""
    token_file = corpus.token_file
    check_one_sample(token_file, corpus.sample_tokens, corpus.asked_by)
    if paths.are_apart:
        return [(0, token_file.num_documents)] * 3
    flags, documents = f"--split {paths.split}", list[Documents]()
    if paths.split_by == "hash":
        flags += " --split-by hash"
        documents += split_by_hash(token_file, paths.split, cache)
    else:
        documents += split_documents(token_file.num_documents, paths.split)
    check_splits(token_file, documents, needed, flags, corpus.sample_tokens, corpus.asked_by)
    return documents


def _mixed(
    corpora: Sequence[WeightedPath],
    opened: Sequence[OpenCorpus],
    parts: Sequence[MegatronDataset],
    schedule: Sequence[tuple[int, tuple[float, ...]]],
    tokenizer_identity: str | None,
) -> BlendedDataset:
    names = short_names([prefix for _, prefix in corpora])
    blend_corpora = [
        Corpus(
            name,
            fingerprint_of(corpus.content, _tokenizer(corpus, tokenizer_identity), part.fingerprint),
            part.samples_per_epoch,
            corpus.is_drawn,
            corpus.token_file.num_documents,
            corpus.token_file.num_tokens,
            tuple(
                fingerprint_of(corpus.content, identity, part.fingerprint)
                for identity in _tokenizer_parts(corpus, tokenizer_identity)
            ),
        )
        for name, corpus, part in zip(names, opened, parts, strict=True)
    ]
    return BlendedDataset(dict(zip(names, parts, strict=True)), BlendSchedule(blend_corpora, schedule))


def _tokenizer(corpus: OpenCorpus, given: str | None) -> str | None:
    sidecar = corpus.token_file.sidecar
    return given or (sidecar.tokenizer if sidecar else None)


def _tokenizer_parts(corpus: OpenCorpus, given: str | None) -> list[str]:
    """Return the digests that may identify the corpus's tokenizer in a checkpoint."""
    sidecar = corpus.token_file.sidecar
    identities = (given, sidecar.tokenizer if sidecar else None)
    return [part for identity in identities if identity for part in parts(identity)]
