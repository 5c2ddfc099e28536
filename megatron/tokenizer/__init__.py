"""A common interface for the tokenizer libraries."""

from megatron.tokenizer.build import TYPES, build, with_gigatoken
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tokenizer.word_starts import word_starts

__all__ = ["TYPES", "Tokenizer", "build", "with_gigatoken", "word_starts"]
