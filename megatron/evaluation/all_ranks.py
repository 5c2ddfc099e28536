"""DistributedModel: rank 0 requests scores and texts, and all ranks compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import JobError, StopRequest
from megatron.evaluation.scoring import MAX_TOKENS, Row, Score, batches_by_length, max_row_length, score_rows
from megatron.generate.decode import generate_gpt2
from megatron.generate.sampling import Sampling, keys_of
from megatron.generate.text import Prompts
from megatron.models.common.generation import ModelStage
from megatron.mpu.groups import SINGLE, Group

# Only rank 0 loads tasks and datasets, imports their libraries, and computes metrics. Its requests to the model are
# broadcast, and all ranks process them together.
#
# | rank 0 | other ranks |
# |---|---|
# | ``run_from_rank_0(f)`` calls ``f()`` | ``run_from_rank_0(f)`` waits for requests until rank 0 returns from ``f`` |
# | ``score``, ``generate``: broadcasts a few batches at a time | computes its share of each broadcast |
#
# After each request, all ranks check whether any of them was asked to stop.

BATCHES_PER_REQUEST = 8
"""Batches per replica in one request; ranks can stop between requests."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class GenerationArgs:
    """Parameters for text generation.

    Args:
        max_new_tokens: maximum per text.
        stops: strings that end a text; they are not part of it.
        sampling: sampling parameters; None chooses the most likely token each time.
        end_id: token that ends a text in addition to the end-of-document token, such as the end-of-turn token.
    """

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    sampling: Sampling | None = None
    end_id: int | None = None


class DistributedModel:
    """A decoder distributed over all ranks.

    Args:
        stage: this rank's model stage.
        prompts: the model's tokenizer.
        data: the replicas, among which rows are distributed.
        world: all ranks, communicating over the CPU.
        max_length: maximum tokens in a forward pass.
        max_tokens: maximum tokens in a batch.
        is_stopping: returns True if this rank was asked to stop.
    """

    def __init__(
        self, stage: ModelStage, prompts: Prompts, *, data: Group = SINGLE, world: Group = SINGLE, max_length: int,
        max_tokens: int = MAX_TOKENS, is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.stage, self.prompts, self.data, self.world = stage, prompts, data, world
        self.max_length = max_row_length(stage, max_length)
        self.max_tokens = max_tokens
        self._is_stopping = is_stopping
        self.on_rows: Callable[[int], None] | None = None
        self._has_failed_on_all_ranks = False

    def run_from_rank_0(self, function: Callable[[], Result]) -> Result | None:
        """Call ``function()`` on rank 0; other ranks process its requests and return None. Collective.

        Raises:
            JobError: ``function`` raised it; all ranks raise the same error. If ``function`` raises an error of another
                type, the other ranks raise a RuntimeError.
            StopRequest: a rank was asked to stop; raised on all ranks.
        """
        if self.world.rank:
            self._serve_requests()
            return None
        try:
            result = function()
        except Exception as error:
            if not self._has_failed_on_all_ranks:  # otherwise all ranks have raised it
                # other errors may not be picklable
                sent_error: Exception = RuntimeError(f"rank 0: {type(error).__name__}: {error}")
                if isinstance(error, JobError):
                    error.is_of_this_rank, sent_error = False, error
                self.world.broadcast_object(("raise", (sent_error,)))
            raise
        self.world.broadcast_object(("end", ()))
        return result

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Score the rows. Called only on rank 0, within ``run_from_rank_0``."""
        return self._run_in_portions("_score", rows, [len(row.tokens) - 1 for row in rows])

    def generate(self, prompts: Sequence[Sequence[int]], generation_args: GenerationArgs) -> list[str]:
        """Generate a continuation for each prompt, without control tokens.

        Called only on rank 0, within ``run_from_rank_0``.
        """
        lengths = [len(row) + generation_args.max_new_tokens for row in prompts]
        return self._run_in_portions(
            "_write", list(zip(prompts, keys_of(prompts), strict=True)), lengths, generation_args
        )

    def _serve_requests(self) -> None:
        while True:
            request: tuple[str, tuple[Any, ...]] = ("", ())
            name, args = self.world.broadcast_object(request)
            if name == "end":
                return
            if name == "raise":
                raise args[0]
            self._run_request(name, *args)

    def _run_in_portions(
        self, name: str, requests: Sequence[Any], lengths: Sequence[int], *extra_args: Any
    ) -> list[Any]:
        """Compute ``requests`` on all ranks, a few batches at a time, with results in order.

        Raises:
            StopRequest: a rank was asked to stop.
        """
        results_by_idx: dict[int, Any] = {}
        batches, num_per_request = (
            list(batches_by_length(lengths, self.max_tokens)),
            BATCHES_PER_REQUEST * self.data.size,
        )
        for first in range(0, len(batches), num_per_request):
            indices = [idx for batch in batches[first : first + num_per_request] for idx in batch]
            selected = [requests[idx] for idx in indices]
            self.world.broadcast_object((name, (selected, *extra_args)))
            try:
                results, is_stopping = self._run_request(name, selected, *extra_args)
            except Exception:
                self._has_failed_on_all_ranks = True
                raise
            if is_stopping:
                raise StopRequest("asked to stop during the evaluation")
            results_by_idx.update(zip(indices, results, strict=True))
        return [results_by_idx[idx] for idx in range(len(requests))]

    def _run_request(self, name: str, *args: Any) -> tuple[list[Any], bool]:
        """Call method ``name``; return (its result, True if any rank was asked to stop). Collective."""
        results = getattr(self, name)(*args)
        return results, any(self.world.gather_objects(self._is_stopping()))

    def _score(self, rows: Sequence[Row]) -> list[Score]:
        return score_rows(self.stage, rows, data=self.data, max_tokens=self.max_tokens, on_rows=self.on_rows)

    def _write(self, prompts: Sequence[tuple[Sequence[int], bytes]], generation_args: GenerationArgs) -> list[str]:
        control_ids, texts_by_idx = set(self.prompts.tokenizer.control_tokens.values()), dict[int, str]()
        batches = batches_by_length([len(row) + generation_args.max_new_tokens for row, _ in prompts], self.max_tokens)
        for batch_idx, batch in enumerate(batches):
            if batch_idx % self.data.size != self.data.rank:
                continue
            rows, keys = zip(*(prompts[idx] for idx in batch), strict=True)
            outputs = generate_gpt2(
                self.stage,
                rows,
                max_new_tokens=generation_args.max_new_tokens,
                eos_id=self.prompts.eos_id,
                sampling=generation_args.sampling,
                keys=keys,
                ends=lambda row, tokens: (
                    tokens[-1] == generation_args.end_id or self._is_stopped(tokens, generation_args.stops)
                ),
            )
            for idx, prompt, tokens in zip(batch, rows, outputs, strict=True):
                text_ids = [token for token in tokens if token not in control_ids]
                texts_by_idx[idx] = truncate_at_stop(
                    self.prompts.decode(text_ids, prompt=prompt), generation_args.stops
                )
            if self.on_rows is not None:
                self.on_rows(len(rows))
        all_texts = {
            idx: text for texts_of_rank in self.data.gather_objects(texts_by_idx) for idx, text in texts_of_rank.items()
        }
        return [all_texts[idx] for idx in range(len(prompts))]

    def _is_stopped(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """Check if the end of ``tokens`` contains a stop string.

        Each token has at least one byte, so the length of the longest stop string limits the tokens to decode.
        """
        if not stops:
            return False
        text = self.prompts.decode(tokens[-max(len(stop.encode()) for stop in stops) - 2 :])
        return any(stop in text for stop in stops)


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """Truncate ``text`` at the first occurrence of any of ``stops``."""
    for stop in stops:
        text = text.split(stop, 1)[0] if stop else text
    return text
