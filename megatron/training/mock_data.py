"""Random token data and the tokenizer that fits it (``--data-path mock``)."""

from __future__ import annotations

from typing import Any

from megatron.config import Config
from megatron.data.mock_dataset import MockTokenizer, MockTokens, RandomDocuments
from megatron.models.registry import data_parts
from megatron.training.vocabulary import tokens_of


def mock_tokenizer(config: Config) -> MockTokenizer:
    """Return a tokenizer whose text, with what its family appends, fills the vocabulary: 0 where a script has none."""
    one = MockTokenizer(1)
    appended = tokens_of(one, config).vocab_size - one.vocab_size
    return MockTokenizer((config.model.vocab_size or 0) - appended)


def random_data(config: Config, seed: int | None = None, tokenizer: Any = None) -> Any:
    """Return a data set of random samples for the model of ``config``.

    Args:
        seed: None: that of the run.
        tokenizer: whose ids they are; None: of a vocabulary of which nothing else is known.
    """
    tokenizer = tokenizer or mock_tokenizer(config)
    seed = config.run.seed if seed is None else seed
    data = data_parts(config.family)
    if data is None:
        return MockTokens(tokenizer.vocab_size, config.batch.seq_length, seed)
    texts = RandomDocuments(tokenizer.vocab_size, seed)
    return data.random_dataset(config, texts, data.special_tokens(tokenizer, config), seed)
