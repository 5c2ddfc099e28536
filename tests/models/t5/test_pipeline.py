"""T5's list of layers: what crosses each boundary, what each parameter is called, and what the memory's gradient is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint import named_parameters
from megatron.models.common.transformer import MLP
from megatron.models.t5 import pipeline
from megatron.models.t5.model import T5Model
from megatron.mpu import is_counted_in_norm
from megatron.mpu.groups import build_grid
from megatron.mpu.random import DropoutStreams
from megatron.mpu.topology import Topology
from tds.p2p.communicator import P2PCommunicator
from tds.schedule import MessageType
from tests.helpers.harness import run_ranks
from tests.helpers.t5_layouts import (
    GATED,
    LEARNED,
    ROWS,
    UNTIED,
    VOCAB,
    Case,
    check_fp64,
    make_pipeline,
    run_case,
    run_cases,
    run_one_process,
)
from tests.helpers.toys import Toy, make_engine

LONG_CASE = Case(enc_layers=2, dec_layers=2, lengths=(40, 24), num_micro_batches=2)
HIDDEN, TOKEN, SEGMENT = 16 * 8, 8, 4  # bytes of a token's hidden states in fp64, of its id, of its document's


def _run_and_count_sent(rank: int, cases: list[Case]) -> list[Counter[tuple[str, int]]]:
    """Return how many bytes of activations and gradients this stage sends for each micro-batch, for each case."""
    grid = build_grid(Topology.from_world_size(dist.get_world_size(), 1, dist.get_world_size()), rank)
    original_send, results = P2PCommunicator.send, []
    for case in cases:
        num_bytes: Counter[tuple[str, int]] = Counter()

        def counting_send(
            self: Any, message_type: MessageType, message: Any, buffer: torch.Tensor, num_bytes: Any = num_bytes
        ) -> None:
            if message_type is not MessageType.HEADER:
                num_bytes[message_type.name, message.micro_batch] += buffer.numel()
            original_send(self, message_type, message, buffer)

        P2PCommunicator.send = counting_send  # type: ignore[method-assign]
        run_case(case, grid)
        results.append(num_bytes)
    return results


def _message_bytes(*tensor_bytes: int) -> int:
    """Return the bytes of a message: each tensor begins at a multiple of 64."""
    end = 0
    for num_bytes in tensor_bytes:
        end = -(-end // 64) * 64 + num_bytes
    return end


@pytest.mark.slow
@pytest.mark.parametrize("has_segments", [pytest.param(False, marks=pytest.mark.slow), True])
def test_boundaries_send_hidden_states_memory_and_ids_only(has_segments: bool) -> None:
    """The bytes of each boundary, for a cut before each layer of the list."""
    s_e, s_d = LONG_CASE.lengths
    x, y, tokens = ROWS * s_e * HIDDEN, ROWS * s_d * HIDDEN, ROWS * s_d * TOKEN
    segments = [ROWS * s_e * SEGMENT, ROWS * s_d * SEGMENT] if has_segments else []
    encoder, decoder = (
        (_message_bytes(x, tokens, *segments), x),
        (_message_bytes(y, x, *segments), _message_bytes(y, x)),
    )
    expected = [encoder] * 4 + [decoder] * 2 + [(y, y)] * 2
    boundaries = range(1, LONG_CASE.num_units)
    cases = [
        replace(LONG_CASE, has_segments=has_segments, bounds=(0, boundary, LONG_CASE.num_units))
        for boundary in boundaries
    ]
    first, last = run_ranks(2, _run_and_count_sent, cases)
    assert len(expected) == len(boundaries)
    for forward, backward, (activations, gradients) in zip(first, last, expected, strict=True):
        assert forward == {("ACTIVATION", 0): activations, ("ACTIVATION", 1): activations}
        assert backward == {("GRADIENT", 0): gradients, ("GRADIENT", 1): gradients}


class _DropGradient(torch.autograd.Function):
    """Passes a tensor on, and of its gradient nothing back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def test_memory_gradient_accumulates_over_decoder_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail where one layer returns no gradient of what later ones made of memory, or twice as much."""
    cases = [Case(num_micro_batches=2, bounds=bounds) for bounds in ((0, 6, 8, 11), (0, 3, 7, 11))]
    for case, ranks in run_cases(cases, pipe=3):
        check_fp64(case, ranks)
    forward = pipeline.DecoderLayerPipe.forward
    for mutation in (_DropGradient.apply, lambda memory: memory * 2 - memory.detach()):

        def mutated_forward(self: Any, inputs: Any, mutation: Any = mutation) -> Any:
            output = forward(self, inputs)
            return output if self.is_last else (output[0], mutation(output[1]), *output[2:])

        monkeypatch.setattr(pipeline.DecoderLayerPipe, "forward", mutated_forward)
        for case, ranks in run_cases(cases[:1], pipe=3):
            with pytest.raises(AssertionError, match="encoder"):
                check_fp64(case, ranks)


def _named_shapes(rank: int, cases: list[Case]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return, for each case, the shapes by name, and the names that this rank counts and saves."""
    grid = build_grid(Topology.from_world_size(dist.get_world_size(), 1, dist.get_world_size()), rank)
    results = []
    for case in cases:
        named = list(named_parameters(make_pipeline(case, grid, DropoutStreams())))
        counted_names = [name for name, parameter in named if is_counted_in_norm(parameter, 0)]
        results.append(({name: tuple(parameter.shape) for name, parameter in named}, counted_names))
    return results


def test_parameter_names_match_single_stage_model() -> None:
    cases = [
        Case(dec_layers=2),
        Case(overrides=GATED),
        Case(enc_layers=1, overrides=(*LEARNED, *UNTIED)),
        Case(overrides=LEARNED),
    ]
    for case, (first, first_names), (last, last_names) in zip(cases, *run_ranks(2, _named_shapes, cases), strict=True):
        expected = {name: tuple(p.shape) for name, p in named_parameters(T5Model(case.make_args()))}
        assert first | last == expected
        assert sorted([*first_names, *last_names]) == sorted(expected), "each has one owner"
        shared = set(first) & set(last)
        assert not any("layers" in name for name in shared)
        assert ("embedding.word.weight" in shared) is not case.make_args().untie_embeddings


def _count_forwards(rank: int, cases: list[Case]) -> list[int]:
    """Return how often this rank runs a feed-forward half, for each case."""
    grid = build_grid(Topology.from_world_size(dist.get_world_size(), 1, dist.get_world_size()), rank)
    forward, calls = MLP.forward, [0 for _ in cases]
    for index, case in enumerate(cases):

        def counting_forward(self: MLP, x: torch.Tensor, index: int = index) -> torch.Tensor:
            calls[index] += 1
            return forward(self, x)

        MLP.forward = counting_forward  # type: ignore[method-assign]
        run_case(case, grid)
    return calls


@pytest.mark.slow
def test_recompute_runs_layers_of_both_sides_twice() -> None:
    every = [Case(num_micro_batches=2, bounds=(0, 3, 11), recompute_every=every) for every in (0, 1, 2, 3)]
    assert run_ranks(2, _count_forwards, every) == [[2 * 2, *[2 * 2 * 2] * 3], [2 * 4, *[2 * 2 * 4] * 3]]


def _evaluate(rank: int, cases: list[Case]) -> list[float]:
    grid = build_grid(Topology.from_world_size(dist.get_world_size(), 1, dist.get_world_size()), rank)
    losses = []
    for case in cases:
        toy = Toy(micro_batch_size=ROWS, num_micro_batches=case.num_micro_batches)
        engine = make_engine(toy, grid.pipe.size, module=make_pipeline(case, grid, DropoutStreams()))
        batches = [case.make_batch(i) for i in range(case.num_micro_batches)]
        losses.append(float(engine.eval_batch(iter(batches))))
    return losses


def test_evaluation_loss_is_bitwise_equal_to_one_process() -> None:
    """Row E20, with dropout, which evaluation leaves out."""
    cases = [Case(dtype=torch.float32, overrides=fields, has_segments=True) for fields in ((), (*LEARNED, *UNTIED))]
    expected = [run_one_process(case)[0] for case in cases]
    for losses in run_ranks(2, _evaluate, [replace(case, dropout=0.3) for case in cases]):
        assert losses == expected


def test_probe_batches_have_shapes_of_real_batches() -> None:
    for has_segments in (False, True):
        case = replace(LONG_CASE, has_segments=has_segments)
        actual_batch, expected_batch = (
            pipeline.random_batch(VOCAB, (ROWS, *case.lengths), has_segments),
            case.make_batch(0),
        )
        for actual, expected in zip(actual_batch, expected_batch, strict=True):
            assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]
