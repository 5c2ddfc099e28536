"""Helpers for tests of evaluation: lm_eval's base class or a stub of it, and a model without ranks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron.evaluation.all_ranks import GenerationArgs
from megatron.evaluation.scoring import Row, Score
from megatron.generate.text import Prompts
from megatron.tokenizer import Tokenizer

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None


class _CacheHook:
    def add_partial(self, attr: str, req: Any, res: Any) -> None: ...


class _LM:
    """Stub of lm_eval's base class, with the methods that our class uses."""

    def __init__(self) -> None:
        self.cache_hook: Any = _CacheHook()


def import_decoder_lm() -> Any:
    """Import ``megatron.evaluation.lm``, with a stub of lm_eval if lm_eval is not installed, and return the module."""
    if not HAS_LM_EVAL and "lm_eval" not in sys.modules:
        names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
        for name in names:
            sys.modules[name] = ModuleType(name)
        sys.modules[names[-1]].LM = _LM  # type: ignore[attr-defined]
        from megatron.evaluation import lm

        for name in names:
            del sys.modules[name]
        return lm
    from megatron.evaluation import lm

    return lm


@dataclass
class Request:
    """Stub of lm_eval's ``Instance``, with the fields that a model reads."""

    args: tuple[Any, ...]


@dataclass
class FakeModel:
    """Fake model that records its requests.

    The score of a row is minus the sum of its scored token ids; the text generated for a prompt of N tokens is
    "N tokens".
    """

    tokenizer: Tokenizer
    max_length: int = 16
    rows: list[Row] = field(default_factory=list)
    generate_calls: list[tuple[list[int], GenerationArgs]] = field(default_factory=list)

    @property
    def prompts(self) -> Prompts:
        return Prompts(self.tokenizer, None)

    def score(self, rows: Sequence[Row]) -> list[Score]:
        self.rows += rows
        return [Score(-float(sum(row.tokens[-row.num_scored :])), row.num_scored == 1) for row in rows]

    def generate(self, prompts: Sequence[Sequence[int]], generation_args: GenerationArgs) -> list[str]:
        self.generate_calls += [(list(prompt), generation_args) for prompt in prompts]
        return [f"{len(prompt)} tokens" for prompt in prompts]
