"""The three data sets of a GPT-2 run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.data import checks
from megatron.data.gpt2_samples import GPT2Samples
from megatron.data.token_file import TokenFile


def build_train_valid_test(
    *,
    data_path: str | None,
    split: str,
    seq_length: int,
    seed: int,
    vocab_size: int,
    needed: tuple[bool, bool, bool] = (True, True, True),
    tokenizer_identity: str | None = None,
    eod_id: int | None = None,
    flags_needing_eod: Sequence[str] = (),
) -> tuple[GPT2Samples | None, GPT2Samples | None, GPT2Samples | None]:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Args:
        vocab_size: of the model's tokenizer; every token id must be below it.
        tokenizer_identity: compared with the one in the sidecar where there is one.
        flags_needing_eod: flags in use that work only where documents end with the end-of-document token.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults.
    """
    token_file = TokenFile(checks.check_given(data_path))
    checks.check_tokenizer(token_file, tokenizer_identity)
    checks.check_token_ids(token_file, vocab_size)
    if flags_needing_eod:
        checks.check_eod(token_file, eod_id, " ".join(flags_needing_eod))
    ranges = checks.split_ranges(token_file, split, needed, seq_length + 1, f"--seq-length {seq_length}")
    train, valid, test = (
        None if documents is None else GPT2Samples(token_file, documents=documents, seq_length=seq_length, seed=seed)
        for documents in ranges
    )
    return train, valid, test
