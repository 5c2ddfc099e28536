"""The three data sets of a T5 run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.data import checks
from megatron.data.build_splits import Opened, Three, build_splits
from megatron.data.cache import Cache
from megatron.data.control_tokens import T5Tokens
from megatron.data.corpora import DataPaths
from megatron.data.documents import Documents
from megatron.data.span_file_samples import SpanFileSamples
from megatron.data.span_files import SpanFiles
from megatron.data.t5_samples import T5Samples
from megatron.data.token_file import TokenFile
from megatron.errors import DataError
from megatron.spans import Denoiser, has_modes, is_set, raw_length


def build_t5_train_valid_test(
    paths: DataPaths,
    *,
    enc_seq_length: int,
    dec_seq_length: int,
    denoisers: Sequence[Denoiser],
    tokens: T5Tokens,
    seed: int,
    reset_attention_mask: bool = False,
    needed: tuple[bool, bool, bool] = (True, True, True),
    tokenizer_identity: str | None = None,
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Each corpus is a pair of token files PREFIX.bin and .idx, or where these are not there a set of CPM's three files
    (``span_files``), whose spans are fixed.

    Args:
        tokens: every token id of a text must be below its ``text_vocab_size``.
        tokenizer_identity: compared with the one in the sidecar where there is one.
        others: as ``T5Samples``.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults, paths and weights that cannot be used, too few sentinels,
            ``dec_seq_length`` too small, several denoisers for a set of three files.
    """
    asked_by = f"--enc-seq-length {enc_seq_length}"
    settings: dict[str, Any] = {
        "enc_seq_length": enc_seq_length,
        "dec_seq_length": dec_seq_length,
        "tokens": tokens,
        "seed": seed,
        "reset_attention_mask": reset_attention_mask,
    }

    def open_corpus(prefix: str, cache: Cache, is_one_of_several: bool) -> Opened:
        shared = {**settings, "cache": cache}
        if is_set(prefix):
            _check_one_kind(prefix, denoisers)
            files = SpanFiles(prefix, tokens.text_vocab_size, reader=paths.data_impl, cache=cache)
            make = partial(_make, SpanFileSamples, files, shared)
            return Opened(files.context, files.fingerprint, make, enc_seq_length - 1, asked_by)
        token_file = TokenFile(prefix, reader=paths.data_impl, cache=cache)
        checks.check_tokenizer(token_file, tokenizer_identity)
        checks.check_token_ids(token_file, tokens.text_vocab_size or tokens.vocab_size, cache)
        draws = token_file.fingerprint if is_one_of_several else ""
        make = partial(_make, T5Samples, token_file, {**shared, "denoisers": denoisers, "draws": draws})
        return Opened(token_file, token_file.fingerprint, make, raw_length(enc_seq_length, denoisers), asked_by)

    return build_splits(paths, needed, open_corpus, tokenizer_identity, _tokens_per_sample)


def _make(kind: Callable[..., Any], source: Any, settings: dict[str, Any], documents: Documents) -> Any:
    return kind(source, documents=documents, **settings)


def _tokens_per_sample(parts: Sequence[Any]) -> int:
    """Return the tokens that the model reads of a sample, which must be the same in all corpora."""
    lengths = {
        part.files.prefix if isinstance(part, SpanFileSamples) else part.token_file.prefix: part for part in parts
    }
    first, *others = lengths
    for other in others:
        if lengths[other].dec_seq_length != lengths[first].dec_seq_length:
            raise DataError(
                f"targets must be of one length in all corpora, got {lengths[first].dec_seq_length} for {first} and "
                f"{lengths[other].dec_seq_length} for {other}. Give --dec-seq-length."
            )
    return parts[0].enc_seq_length + parts[0].dec_seq_length


def _check_one_kind(prefix: str, denoisers: Sequence[Denoiser]) -> None:
    if has_modes(denoisers):
        raise DataError(
            f"--denoisers must be one kind for {prefix}, a set in three files whose spans are fixed, got "
            f"{','.join(denoiser.kind for denoiser in denoisers)}. Leave it out, or give ordinary token files."
        )
