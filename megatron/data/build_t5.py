"""The three data sets of a T5 run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.config.data import is_set
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
from megatron.spans import Denoiser, has_modes, raw_length


def build_t5_train_valid_test(
    paths: DataPaths,
    *,
    enc_seq_length: int,
    dec_seq_length: int,
    denoisers: Sequence[Denoiser],
    tokens: T5Tokens,
    seed: int,
    reset_attention_mask: bool = False,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Each corpus is a pair of token files PREFIX.bin and .idx, or where these are not there a set of CPM's three files
    (``span_files``), whose spans are fixed.

    Args:
        enc_seq_length, dec_seq_length, denoisers, seed, reset_attention_mask: as ``T5Samples``.
        tokens: every token id of a text must be below its ``text_vocab_size``.
        tokenizer_identity: compared with the one in the sidecar where there is one.

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

    def open_corpus(prefix: str, cache: Cache) -> Opened:
        shared = {**settings, "cache": cache}
        if is_set(prefix):
            _check_one_kind(prefix, denoisers)
            files = SpanFiles(prefix, tokens.text_vocab_size, reader=paths.data_impl, cache=cache)
            as_they_are = partial(_span_file_samples, files, shared)
            return Opened(files.context, files.fingerprint, as_they_are, enc_seq_length - 1, asked_by, is_drawn=False)
        token_file = TokenFile(prefix, reader=paths.data_impl, cache=cache)
        checks.check_tokenizer(token_file, tokenizer_identity)
        checks.check_token_ids(token_file, tokens.text_vocab_size or tokens.vocab_size, cache)
        drawn = partial(_t5_samples, token_file, {**shared, "denoisers": denoisers})
        sample_tokens = raw_length(enc_seq_length, denoisers)
        return Opened(token_file, token_file.fingerprint, drawn, sample_tokens, asked_by, is_drawn=True)

    return build_splits(paths, needed, open_corpus, tokenizer_identity, _tokens_per_sample)


def _t5_samples(token_file: TokenFile, settings: dict[str, Any], documents: Documents, draws: str) -> T5Samples:
    return T5Samples(token_file, documents=documents, draws=draws, **settings)


def _span_file_samples(files: SpanFiles, settings: dict[str, Any], documents: Documents, _: str) -> SpanFileSamples:
    return SpanFileSamples(files, documents=documents, **settings)


def _tokens_per_sample(parts: Sequence[Any]) -> int:
    """Return the tokens that the model reads of a sample, which must be the same in all corpora."""
    first = parts[0]
    for other in parts:
        if other.dec_seq_length != first.dec_seq_length:
            raise DataError(
                f"targets must be of one length in all corpora, got {first.dec_seq_length} for {_prefix(first)} and "
                f"{other.dec_seq_length} for {_prefix(other)}. Give --dec-seq-length."
            )
    return first.enc_seq_length + first.dec_seq_length


def _prefix(samples: T5Samples | SpanFileSamples) -> str:
    return samples.files.prefix if isinstance(samples, SpanFileSamples) else samples.token_file.prefix


def _check_one_kind(prefix: str, denoisers: Sequence[Denoiser]) -> None:
    if has_modes(denoisers):
        raise DataError(
            f"--denoisers must be one kind for {prefix}, a set in three files whose spans are fixed, got "
            f"{','.join(denoiser.kind for denoiser in denoisers)}. Leave it out, or give ordinary token files."
        )
