"""A model of any layout as one function: inputs in, the likeliest next tokens out, on every rank of the replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import NumericsError
from megatron.generate.likeliest import NONE, likeliest

Inputs = tuple[torch.Tensor | None, ...]


class Replica:
    """One replica of a model.

    Args:
        model: a single-stage module (GPT2Model, T5Model); or the engine that trains a model, with a pipeline or without
            (``megatron.training``'s, or DeepSpeed's or ``tds``'s within it).

    Attributes:
        sizes: those of the model.
        needs_segments: segment ids must be among the inputs, as they cross the stages.
        takes_segments: they may be among them.

    Raises:
        TypeError: something else.
    """

    def __init__(self, model: Any) -> None:
        engine = getattr(model, "engine", model)
        self.engine = engine if hasattr(engine, "eval_batch") else None  # the tds engine of a pipeline
        self.module = getattr(engine, "module", engine)
        if not hasattr(self.module, "sizes") or not hasattr(self.module, "place"):
            raise TypeError(
                f"the model must be a GPT2Model, a T5Model, or the engine that trains one, got {type(model).__name__}. "
                "A model of your own needs the attributes sizes and place."
            )
        self.sizes, self.place = self.module.sizes, self.module.place
        self.device = next(self.module.parameters()).device if self.engine is None else torch.device(self.engine.device)
        self.needs_segments = self.engine is not None and bool(getattr(self.module, "has_segments", False))
        self.takes_segments = self.engine is None or self.needs_segments

    @torch.no_grad()
    def next_tokens(self, inputs: Inputs, last: torch.Tensor) -> list[int]:
        """Return the likeliest token after position ``last`` of each row. Collective over the replica.

        Args:
            inputs: what the model's forward takes, the same on every rank of the replica.
            last: [b], an index into the logits' positions for each row.

        Raises:
            NumericsError: a logit is not a number; on every rank.
        """
        inputs = tuple(None if each is None else each.to(self.device) for each in inputs)
        with self._evaluating():
            logits = self.module(*inputs) if self.engine is None else _from_last_stage(self.engine, inputs)
        tokens = torch.full_like(last, NONE, device=self.device)
        if logits is not None:  # [s, b, v/t]
            tokens = self._likeliest(logits[last.to(self.device), torch.arange(len(last), device=self.device)])
        tokens = self._told_by_last_stage(tokens)
        if (tokens == NONE).any():
            raise NumericsError("logits must be numbers, got NaN. Are the weights finite? Load another checkpoint.")
        return tokens.tolist()

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        sizes, group = self.sizes, self.place.group
        return likeliest(
            logits, vocab_size=sizes.vocab_size, divisible_by=sizes.make_vocab_size_divisible_by, group=group
        )

    def _told_by_last_stage(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last stage's ``tokens`` on all stages."""
        if self.engine is not None and self.engine.num_stages > 1:
            grid = self.engine.grid
            source = grid.stage_to_global(self.engine.num_stages - 1)
            dist.broadcast(tokens, src=source, group=grid.get_pipe_parallel_group())
        return tokens

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch dropout off, and the batch function, which would read training's batches; put both back."""
        was_training = self.module.training
        batch_fn = getattr(self.engine, "batch_fn", None)
        self.module.eval()
        if self.engine is not None:
            self.engine.set_batch_fn(None)
        try:
            yield
        finally:
            self.module.train(was_training)
            if self.engine is not None:
                self.engine.set_batch_fn(batch_fn)


def _from_last_stage(engine: Any, inputs: Inputs) -> torch.Tensor | None:
    """Return the logits of a pipeline on its last stage, None elsewhere."""
    given = tuple(each for each in inputs if each is not None)
    outputs = engine.eval_batch(iter([(given, ())]), compute_loss=False, reduce_output=None, num_micro_batches=1)
    return None if outputs is None else outputs[0]
