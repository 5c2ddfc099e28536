"""Random token data and a matching tokenizer (``--data-path mock``)."""

from __future__ import annotations

from typing import Any

from megatron.config import Config
from megatron.data.mock_dataset import MockTokenizer, MockTokens, RandomDocuments
from megatron.models.registry import data_parts
from megatron.training.vocabulary import family_vocabulary


def mock_tokenizer(config: Config) -> MockTokenizer:
    """Make a tokenizer whose ids, together with the family's special tokens, fill the model's vocabulary."""
    probe = MockTokenizer(1)
    num_special_tokens = family_vocabulary(probe, config).vocab_size - probe.vocab_size
    return MockTokenizer((config.model.vocab_size or 0) - num_special_tokens)


def random_data(config: Config, seed: int | None = None, tokenizer: Any = None) -> Any:
    """Make a data set with random samples for the model in ``config``.

    Args:
        seed: sample seed; None: the run's seed.
        tokenizer: tokenizer that the token ids belong to; None: a mock tokenizer for the model's vocabulary size.
    """
    tokenizer = tokenizer or mock_tokenizer(config)
    seed = config.run.seed if seed is None else seed
    data = data_parts(config.family)
    if data is None:
        return MockTokens(tokenizer.vocab_size, config.batch.seq_length, seed)
    texts = RandomDocuments(tokenizer.vocab_size, seed)
    return data.random_dataset(config, texts, data.special_tokens(tokenizer, config), seed)
