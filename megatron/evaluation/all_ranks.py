"""ModelOfAllRanks: rank 0 requests scores and texts, and all ranks compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import JobError, StopRequest
from megatron.evaluation.scoring import MAX_TOKENS, Row, Score, batches_by_length, longest_row, score_rows
from megatron.generate.decode import generate_gpt2
from megatron.generate.sampling import Sampling, keys_of
from megatron.generate.text import Prompts
from megatron.models.common.generation import ModelStage
from megatron.mpu.groups import SINGLE, Group

# Only rank 0 loads tasks and datasets, imports their libraries, and computes metrics. Its requests to the model are
# broadcast, and all ranks compute them together.
#
# | rank 0 | other ranks |
# |---|---|
# | ``lead(do)`` calls ``do()`` | ``lead(do)`` waits for requests until rank 0 returns from ``do`` |
# | ``score``, ``write``: broadcasts a few batches at a time | computes its share of each broadcast |
#
# After each request, all ranks check whether any of them was asked to stop.

BATCHES_AT_ONCE = 8
"""Batches per replica in one request; ranks can stop between requests."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Writing:
    """Parameters of generated texts.

    Args:
        max_new_tokens: maximum per text.
        stops: strings that end a text; they are not part of it.
        sampling: None: choose the most likely token each time.
        end_id: token that ends a text in addition to the end-of-document token, such as the end-of-turn token.
    """

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    sampling: Sampling | None = None
    end_id: int | None = None


class ModelOfAllRanks:
    """A decoder distributed over all ranks.

    Args:
        part: this rank's stage of the model.
        prompts: the model's tokenizer.
        data: the replicas, among which rows are distributed.
        world: all ranks, communicating over the CPU.
        max_length: maximum number of tokens in a forward pass.
        max_tokens: maximum number of tokens in a batch.
        is_stopping: returns True if this rank was asked to stop.
    """

    def __init__(
        self, part: ModelStage, prompts: Prompts, *, data: Group = SINGLE, world: Group = SINGLE, max_length: int,
        max_tokens: int = MAX_TOKENS, is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.part, self.prompts, self.data, self.world = part, prompts, data, world
        self.max_length = longest_row(part, max_length)
        self.max_tokens = max_tokens
        self._is_stopping = is_stopping
        self.on_rows: Callable[[int], None] | None = None
        self._has_failed_together = False

    def lead(self, do: Callable[[], Result]) -> Result | None:
        """Return the result of ``do()`` on rank 0; other ranks process its requests and return None. Collective.

        Raises:
            JobError: ``do`` raised it; all ranks raise the same error. If ``do`` raises an error of another type, the
                other ranks raise a RuntimeError.
            StopRequest: a rank was asked to stop; raised on all ranks.
        """
        if self.world.rank:
            self._follow()
            return None
        try:
            result = do()
        except Exception as error:
            if not self._has_failed_together:  # otherwise all ranks have raised it
                # other errors may not be picklable
                sent: Exception = RuntimeError(f"rank 0: {type(error).__name__}: {error}")
                if isinstance(error, JobError):
                    error.is_of_this_rank, sent = False, error
                self.world.broadcast_object(("raise", (sent,)))
            raise
        self.world.broadcast_object(("end", ()))
        return result

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Return the score of each row. Called only on rank 0, within ``lead``."""
        return self._in_portions("_score", rows, [len(row.tokens) - 1 for row in rows])

    def write(self, prompts: Sequence[Sequence[int]], how: Writing) -> list[str]:
        """Return the generated continuation of each prompt, without control tokens.

        Called only on rank 0, within ``lead``.
        """
        lengths = [len(row) + how.max_new_tokens for row in prompts]
        return self._in_portions("_write", list(zip(prompts, keys_of(prompts), strict=True)), lengths, how)

    def _follow(self) -> None:
        while True:
            request: tuple[str, tuple[Any, ...]] = ("", ())
            name, args = self.world.broadcast_object(request)
            if name == "end":
                return
            if name == "raise":
                raise args[0]
            self._do(name, *args)

    def _in_portions(self, name: str, requests: Sequence[Any], lengths: Sequence[int], *more: Any) -> list[Any]:
        """Compute ``requests`` on all ranks, a few batches at a time, and return the results in order.

        Raises:
            StopRequest: a rank was asked to stop.
        """
        results_by_idx: dict[int, Any] = {}
        batches, num_at_once = list(batches_by_length(lengths, self.max_tokens)), BATCHES_AT_ONCE * self.data.size
        for first in range(0, len(batches), num_at_once):
            indices = [idx for batch in batches[first : first + num_at_once] for idx in batch]
            selected = [requests[idx] for idx in indices]
            self.world.broadcast_object((name, (selected, *more)))
            try:
                results, is_stopping = self._do(name, selected, *more)
            except Exception:
                self._has_failed_together = True
                raise
            if is_stopping:
                raise StopRequest("asked to stop during the evaluation")
            results_by_idx.update(zip(indices, results, strict=True))
        return [results_by_idx[idx] for idx in range(len(requests))]

    def _do(self, name: str, *args: Any) -> tuple[list[Any], bool]:
        """Call method ``name``; return (its result, True if any rank was asked to stop). Collective."""
        results = getattr(self, name)(*args)
        return results, any(self.world.gather_objects(self._is_stopping()))

    def _score(self, rows: Sequence[Row]) -> list[Score]:
        return score_rows(self.part, rows, data=self.data, max_tokens=self.max_tokens, on_rows=self.on_rows)

    def _write(self, prompts: Sequence[tuple[Sequence[int], bytes]], how: Writing) -> list[str]:
        control_ids, texts_by_idx = set(self.prompts.tokenizer.control_tokens.values()), dict[int, str]()
        batches = batches_by_length([len(row) + how.max_new_tokens for row, _ in prompts], self.max_tokens)
        for batch_idx, batch in enumerate(batches):
            if batch_idx % self.data.size != self.data.rank:
                continue
            rows, keys = zip(*(prompts[idx] for idx in batch), strict=True)
            outputs = generate_gpt2(
                self.part,
                rows,
                max_new_tokens=how.max_new_tokens,
                eos_id=self.prompts.eos_id,
                sampling=how.sampling,
                keys=keys,
                ends=lambda row, tokens: tokens[-1] == how.end_id or self._is_stopped(tokens, how.stops),
            )
            for idx, prompt, tokens in zip(batch, rows, outputs, strict=True):
                text_ids = [token for token in tokens if token not in control_ids]
                texts_by_idx[idx] = before_stop(self.prompts.decode(text_ids, behind=prompt), how.stops)
            if self.on_rows is not None:
                self.on_rows(len(rows))
        all_texts = {
            idx: text for texts_of_rank in self.data.gather_objects(texts_by_idx) for idx, text in texts_of_rank.items()
        }
        return [all_texts[idx] for idx in range(len(prompts))]

    def _is_stopped(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """Return True if the end of ``tokens`` contains a stop string.

        Each token has at least one byte, so the length of the longest stop string limits the tokens to decode.
        """
        if not stops:
            return False
        text = self.prompts.decode(tokens[-max(len(stop.encode()) for stop in stops) - 2 :])
        return any(stop in text for stop in stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first occurrence of any of ``stops``."""
    for stop in stops:
        text = text.split(stop, 1)[0] if stop else text
    return text
