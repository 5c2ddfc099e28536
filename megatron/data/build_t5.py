"""The three data sets of a T5 run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron.data import checks, span_files
from megatron.data.control_tokens import T5Tokens
from megatron.data.span_file_samples import SpanFileSamples
from megatron.data.t5_samples import T5Samples
from megatron.data.token_file import TokenFile
from megatron.errors import DataError
from megatron.spans import Denoiser, has_modes, is_set, raw_length

AnySamples = T5Samples | SpanFileSamples


def build_t5_train_valid_test(
    *,
    data_path: str | None,
    split: str,
    enc_seq_length: int,
    dec_seq_length: int,
    denoisers: Sequence[Denoiser],
    tokens: T5Tokens,
    seed: int,
    reset_attention_mask: bool = False,
    needed: tuple[bool, bool, bool] = (True, True, True),
    tokenizer_identity: str | None = None,
) -> tuple[AnySamples | None, AnySamples | None, AnySamples | None]:
    """Return the samples of train, valid and test; None for a split that is not needed.

    They come from the token files PREFIX.bin and .idx, or where these are not there from a set of CPM's three files
    (``span_files``), whose spans are fixed.

    Args:
        tokens: every token id of a text must be below its ``text_vocab_size``.
        tokenizer_identity: compared with the one in the sidecar where there is one.
        others: as ``T5Samples``.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults, too few sentinels, ``dec_seq_length`` too small, several
            denoisers for a set of three files.
    """
    prefix, asked_by = checks.check_given(data_path), f"--enc-seq-length {enc_seq_length}"
    make: Callable[..., AnySamples]
    if is_set(prefix):
        _check_one_kind(prefix, denoisers)
        files = span_files.SpanFiles(prefix, tokens.text_vocab_size)
        token_file, sample_tokens, make = files.context, enc_seq_length - 1, partial(SpanFileSamples, files)
    else:
        token_file, sample_tokens = TokenFile(prefix), raw_length(enc_seq_length, denoisers)
        make = partial(T5Samples, token_file, denoisers=denoisers)
        checks.check_tokenizer(token_file, tokenizer_identity)
        checks.check_token_ids(token_file, tokens.text_vocab_size or tokens.vocab_size)
    train, valid, test = (
        make(
            documents=documents,
            enc_seq_length=enc_seq_length,
            dec_seq_length=dec_seq_length,
            tokens=tokens,
            seed=seed,
            reset_attention_mask=reset_attention_mask,
        )
        if documents is not None
        else None
        for documents in checks.split_ranges(token_file, split, needed, sample_tokens, asked_by)
    )
    return train, valid, test


def _check_one_kind(prefix: str, denoisers: Sequence[Denoiser]) -> None:
    if has_modes(denoisers):
        raise DataError(
            f"--denoisers must be one kind for {prefix}, a set in three files whose spans are fixed, got "
            f"{','.join(denoiser.kind for denoiser in denoisers)}. Leave it out, or give ordinary token files."
        )
