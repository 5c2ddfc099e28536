"""The model of all ranks, called by rank 0 alone: it reads and scores texts where every rank has a part of the work."""

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

# A task is read and judged by one process, rank 0: no other opens a data set, or imports what reads them. What it wants
# of the model travels to all ranks, which compute it together.
#
# | rank 0 | the others |
# |---|---|
# | ``lead(do)``: calls ``do()`` | ``lead(do)``: wait for calls until rank 0 has left ``do`` |
# | ``score``, ``write`` | the same calls, with the same arguments: some batches at a time |
#
# Between two such calls all ranks hear whether one of them was asked to stop.

BATCHES_AT_ONCE = 8
"""Of each replica, between two of which ranks may be asked to stop."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Writing:
    """What is written behind prompts.

    Args:
        max_new_tokens: of each.
        stops: texts that end it; they are not part of it.
        sampling: None: the likeliest token each time.
        end_id: a token that ends it as the end of a document does: that of a turn.
    """

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    sampling: Sampling | None = None
    end_id: int | None = None


class ModelOfAllRanks:
    """A decoder that all ranks hold.

    Args:
        part: what this rank holds of it.
        prompts: its tokenizer.
        data: the replicas, which share rows.
        world: all ranks, over the CPU.
        max_length: tokens that a pass may read.
        max_tokens: of a batch.
        is_stopping: whether this rank was asked to stop.
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
        """Return what ``do()`` gives on rank 0, None on the others, which meanwhile do their part. Collective.

        Raises:
            JobError: of ``do``, on all ranks alike; another error is a RuntimeError on the others.
            StopRequest: a rank was asked to stop; on all ranks.
        """
        if self.world.rank:
            self._follow()
            return None
        try:
            result = do()
        except Exception as error:
            if not self._has_failed_together:  # else the others have it already
                sent: Exception = RuntimeError(f"rank 0: {type(error).__name__}: {error}")  # others may not travel
                if isinstance(error, JobError):
                    error.is_of_this_rank, sent = False, error
                self.world.broadcast_object(("raise", (sent,)))
            raise
        self.world.broadcast_object(("end", ()))
        return result

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Return the score of each row; called by rank 0, within ``lead``."""
        return self._in_portions("_score", rows, [len(row.tokens) - 1 for row in rows])

    def write(self, prompts: Sequence[Sequence[int]], how: Writing) -> list[str]:
        """Return what the model writes behind each of ``prompts``, without control tokens; called as ``score``."""
        lengths = [len(row) + how.max_new_tokens for row in prompts]
        return self._in_portions("_write", list(zip(prompts, keys_of(prompts), strict=True)), lengths, how)

    def _follow(self) -> None:
        while True:
            nothing: tuple[str, tuple[Any, ...]] = ("", ())
            name, args = self.world.broadcast_object(nothing)
            if name == "end":
                return
            if name == "raise":
                raise args[0]
            self._do(name, *args)

    def _in_portions(self, name: str, requests: Sequence[Any], lengths: Sequence[int], *more: Any) -> list[Any]:
        """Return what all ranks make of each of ``requests``, in their order.

        Raises:
            StopRequest: a rank was asked to stop.
        """
        found: dict[int, Any] = {}
        batches, number = list(batches_by_length(lengths, self.max_tokens)), BATCHES_AT_ONCE * self.data.size
        for first in range(0, len(batches), number):
            places = [place for batch in batches[first : first + number] for place in batch]
            own = [requests[place] for place in places]
            self.world.broadcast_object((name, (own, *more)))
            try:
                results, is_stopping = self._do(name, own, *more)
            except Exception:
                self._has_failed_together = True
                raise
            if is_stopping:
                raise StopRequest("asked to stop while it evaluates")
            found.update(zip(places, results, strict=True))
        return [found[place] for place in range(len(requests))]

    def _do(self, name: str, *args: Any) -> tuple[list[Any], bool]:
        """Return what a method gives, and whether any rank was asked to stop. Collective."""
        results = getattr(self, name)(*args)
        return results, any(self.world.gather_objects(self._is_stopping()))

    def _score(self, rows: Sequence[Row]) -> list[Score]:
        return score_rows(self.part, rows, data=self.data, max_tokens=self.max_tokens, on_rows=self.on_rows)

    def _write(self, prompts: Sequence[tuple[Sequence[int], bytes]], how: Writing) -> list[str]:
        control, found = set(self.prompts.tokenizer.control_tokens.values()), dict[int, str]()
        batches = batches_by_length([len(row) + how.max_new_tokens for row, _ in prompts], self.max_tokens)
        for number, batch in enumerate(batches):
            if number % self.data.size != self.data.rank:
                continue
            own, keys = zip(*(prompts[place] for place in batch), strict=True)
            rows = generate_gpt2(
                self.part,
                own,
                max_new_tokens=how.max_new_tokens,
                eos_id=self.prompts.eos_id,
                sampling=how.sampling,
                keys=keys,
                ends=lambda row, tokens: tokens[-1] == how.end_id or self._is_stopped(tokens, how.stops),
            )
            for place, prompt, tokens in zip(batch, own, rows, strict=True):
                said = [token for token in tokens if token not in control]
                found[place] = before_stop(self.prompts.decode(said, behind=prompt), how.stops)
            if self.on_rows is not None:
                self.on_rows(len(own))
        every = {place: text for one in self.data.gather_objects(found) for place, text in one.items()}
        return [every[place] for place in range(len(prompts))]

    def _is_stopped(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """Return whether a stop is in the newest of ``tokens``, each of which has a byte or more."""
        if not stops:
            return False
        text = self.prompts.decode(tokens[-max(len(stop.encode()) for stop in stops) - 2 :])
        return any(stop in text for stop in stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first of ``stops`` in it."""
    for stop in stops:
        text = text.split(stop, 1)[0] if stop else text
    return text
