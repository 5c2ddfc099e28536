"""The three data sets of a BERT run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron import log
from megatron.data import checks
from megatron.data.bert_control import BertTokens
from megatron.data.bert_samples import BertSamples, text_length
from megatron.data.build_splits import Opened, Three, build_splits
from megatron.data.cache import Cache
from megatron.data.corpora import DataPaths
from megatron.data.documents import Documents
from megatron.data.token_file import TokenFile

FEW = 0.25
"""Share of pairs from elsewhere below which the start tells: half of what it should be."""


def build_bert_train_valid_test(
    paths: DataPaths,
    *,
    seq_length: int,
    tokens: BertTokens,
    seed: int,
    has_pairs: bool = True,
    mask_prob: float = 0.15,
    short_seq_prob: float = 0.1,
    word_starts: np.ndarray | None = None,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Args:
        seq_length, seed, has_pairs, mask_prob, short_seq_prob, word_starts: as ``BertSamples``.
        tokens: every token id of a text must be below its ``text_vocab_size``.
        tokenizer_identity: compared with the one in the sidecar where there is one.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults; paths and weights that cannot be used; a split of one
            document, for pairs.
    """

    def open_corpus(prefix: str, cache: Cache) -> Opened:
        token_file = TokenFile(prefix, reader=paths.data_impl, cache=cache)
        checks.check_tokenizer(token_file, tokenizer_identity)
        checks.check_token_ids(token_file, tokens.text_vocab_size, cache)

        def make(documents: Documents, draws: str) -> BertSamples:
            samples = BertSamples(
                token_file,
                documents=documents,
                seq_length=seq_length,
                tokens=tokens,
                seed=seed,
                has_pairs=has_pairs,
                mask_prob=mask_prob,
                short_seq_prob=short_seq_prob,
                word_starts=word_starts,
                cache=cache,
                draws=draws,
            )
            if has_pairs and samples.share_of_random < FEW:
                log.info(
                    f"warning: {prefix}: nearly all text of a split is of one document, so that only about "
                    f"{samples.share_of_random:.0%} of its pairs are of two. Give it more documents, or use "
                    "--bert-no-binary-head"
                )
            return samples

        sample_tokens, asked_by = text_length(seq_length, has_pairs), f"--seq-length {seq_length}"
        return Opened(token_file, token_file.fingerprint, make, sample_tokens, asked_by, is_drawn=True)

    return build_splits(paths, needed, open_corpus, tokenizer_identity, lambda parts: seq_length)
