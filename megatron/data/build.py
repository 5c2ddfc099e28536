"""The three data sets of a GPT-2 run, with every check that can be made before training starts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.data import checks
from megatron.data.build_splits import Opened, Three, build_splits
from megatron.data.cache import Cache
from megatron.data.corpora import DataPaths
from megatron.data.documents import Documents
from megatron.data.fim import Fim
from megatron.data.gpt2_samples import GPT2Samples
from megatron.data.token_file import TokenFile

_SHORTEST_PACKED = 2
"""Tokens of a document that gives one label; best-fit packing pads what is left of its sample."""


def build_train_valid_test(
    paths: DataPaths,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
    eod_id: int | None = None,
    flags_needing_eod: Sequence[str] = (),
    packing: str = "concat",
    fim: Fim | None = None,
) -> Three:
    """Return the samples of train, valid and test; None for a split that is not needed.

    Args:
        vocab_size: of the model's tokenizer; every token id must be below it.
        tokenizer_identity: compared with the one in the sidecar where there is one.
        flags_needing_eod: flags in use that work only where documents end with the end-of-document token.
        packing, fim: as ``GPT2Samples``.

    Raises:
        DataError: rows D02 and D09-D14 of the list of faults; paths and weights that cannot be used.
    """

    def open_corpus(prefix: str, cache: Cache) -> Opened:
        token_file = TokenFile(prefix, reader=paths.data_impl, cache=cache)
        checks.check_tokenizer(token_file, tokenizer_identity)
        checks.check_token_ids(token_file, vocab_size, cache)
        if flags_needing_eod:
            checks.check_eod(token_file, eod_id, " ".join(flags_needing_eod))

        def make(documents: Documents, draws: str) -> GPT2Samples:
            return GPT2Samples(
                token_file,
                documents=documents,
                seq_length=seq_length,
                seed=seed,
                packing=packing,
                fim=fim,
                cache=cache,
                draws=draws,
            )

        sample_tokens = _SHORTEST_PACKED if packing == "best-fit" else seq_length + 1
        asked_by = f"--seq-length {seq_length}"
        return Opened(token_file, token_file.fingerprint, make, sample_tokens, asked_by, is_drawn=fim is not None)

    return build_splits(paths, needed, open_corpus, tokenizer_identity, lambda parts: seq_length)
