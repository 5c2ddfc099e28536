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
from tds.schedule import Kind
from tests.helpers.harness import run_ranks
from tests.helpers.t5_layouts import (
    GATED,
    LEARNED,
    ROWS,
    UNTIED,
    VOCAB,
    Case,
    check_fp64,
    make_pipe,
    one_process,
    run,
    run_case,
)
from tests.helpers.toys import Toy, make_engine

LONG = Case(enc_layers=2, dec_layers=2, lengths=(40, 24), micro_batches=2)
HIDDEN, TOKEN, SEGMENT = 16 * 8, 8, 4  # bytes of a token's hidden states in fp64, of its id, of its document's


def _sent(rank: int, cases: list[Case]) -> list[Counter[tuple[str, int]]]:
    """Return how many bytes of activations and gradients this stage sends for each micro-batch, for each case."""
    grid = build_grid(Topology.of_world(dist.get_world_size(), 1, dist.get_world_size()), rank)
    send, results = P2PCommunicator.send, []
    for case in cases:
        found: Counter[tuple[str, int]] = Counter()

        def counting(self: Any, kind: Kind, message: Any, buffer: torch.Tensor, found: Any = found) -> None:
            if kind is not Kind.HEADER:
                found[kind.name, message.micro_batch] += buffer.numel()
            send(self, kind, message, buffer)

        P2PCommunicator.send = counting  # type: ignore[method-assign]
        run_case(case, grid)
        results.append(found)
    return results


def _message(*sizes: int) -> int:
    """Return the bytes of a message: each tensor begins at a multiple of 64."""
    end = 0
    for size in sizes:
        end = -(-end // 64) * 64 + size
    return end


@pytest.mark.slow
@pytest.mark.parametrize("has_segments", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hidden_states_memory_and_ids_cross_and_no_masks(has_segments: bool) -> None:
    """The bytes of each boundary, for a cut before each layer of the list."""
    s_e, s_d = LONG.lengths
    x, y, tokens = ROWS * s_e * HIDDEN, ROWS * s_d * HIDDEN, ROWS * s_d * TOKEN
    segments = [ROWS * s_e * SEGMENT, ROWS * s_d * SEGMENT] if has_segments else []
    encoder, decoder = (_message(x, tokens, *segments), x), (_message(y, x, *segments), _message(y, x))
    wanted = [encoder] * 4 + [decoder] * 2 + [(y, y)] * 2
    every = range(1, LONG.num_units)
    cases = [replace(LONG, has_segments=has_segments, bounds=(0, cut, LONG.num_units)) for cut in every]
    first, last = run_ranks(2, _sent, cases)
    assert len(wanted) == len(every)
    for forward, backward, (activations, gradients) in zip(first, last, wanted, strict=True):
        assert forward == {("ACTIVATION", 0): activations, ("ACTIVATION", 1): activations}
        assert backward == {("GRADIENT", 0): gradients, ("GRADIENT", 1): gradients}


class _Forgetting(torch.autograd.Function):
    """Passes a tensor on, and of its gradient nothing back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def test_the_gradient_of_memory_is_the_sum_over_all_decoder_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail where one layer returns no gradient of what later ones made of memory, or twice as much."""
    every = [Case(micro_batches=2, bounds=bounds) for bounds in ((0, 6, 8, 11), (0, 3, 7, 11))]
    for case, ranks in run(every, pipe=3):
        check_fp64(case, ranks)
    forward = pipeline.DecoderLayerPipe.forward
    for wrong in (_Forgetting.apply, lambda memory: memory * 2 - memory.detach()):

        def mistaken(self: Any, inputs: Any, wrong: Any = wrong) -> Any:
            output = forward(self, inputs)
            return output if self.is_last else (output[0], wrong(output[1]), *output[2:])

        monkeypatch.setattr(pipeline.DecoderLayerPipe, "forward", mistaken)
        for case, ranks in run(every[:1], pipe=3):
            with pytest.raises(AssertionError, match="encoder"):
                check_fp64(case, ranks)


def _names(rank: int, cases: list[Case]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return, for each case, the shapes by name, and the names that this rank counts and saves."""
    grid = build_grid(Topology.of_world(dist.get_world_size(), 1, dist.get_world_size()), rank)
    results = []
    for case in cases:
        named = list(named_parameters(make_pipe(case, grid, DropoutStreams())))
        owned = [name for name, parameter in named if is_counted_in_norm(parameter, 0)]
        results.append(({name: tuple(parameter.shape) for name, parameter in named}, owned))
    return results


def test_parameters_have_the_names_of_the_single_stage_model() -> None:
    cases = [Case(dec_layers=2), Case(sizes=GATED), Case(enc_layers=1, sizes=(*LEARNED, *UNTIED)), Case(sizes=LEARNED)]
    for case, (first, own), (last, others) in zip(cases, *run_ranks(2, _names, cases), strict=True):
        wanted = {name: tuple(p.shape) for name, p in named_parameters(T5Model(case.make_sizes()))}
        assert first | last == wanted
        assert sorted([*own, *others]) == sorted(wanted), "each has one owner"
        shared = set(first) & set(last)
        assert not any("layers" in name for name in shared)
        assert ("embedding.word.weight" in shared) is not case.make_sizes().untie_embeddings


def _forwards(rank: int, cases: list[Case]) -> list[int]:
    """Return how often this rank runs a feed-forward half, for each case."""
    grid = build_grid(Topology.of_world(dist.get_world_size(), 1, dist.get_world_size()), rank)
    forward, calls = MLP.forward, [0 for _ in cases]
    for index, case in enumerate(cases):

        def counting(self: MLP, x: torch.Tensor, index: int = index) -> torch.Tensor:
            calls[index] += 1
            return forward(self, x)

        MLP.forward = counting  # type: ignore[method-assign]
        run_case(case, grid)
    return calls


@pytest.mark.slow
def test_recompute_runs_each_layer_of_both_sides_twice() -> None:
    every = [Case(micro_batches=2, bounds=(0, 3, 11), recompute_every=every) for every in (0, 1, 2, 3)]
    assert run_ranks(2, _forwards, every) == [[2 * 2, *[2 * 2 * 2] * 3], [2 * 4, *[2 * 2 * 4] * 3]]


def _evaluated(rank: int, cases: list[Case]) -> list[float]:
    grid = build_grid(Topology.of_world(dist.get_world_size(), 1, dist.get_world_size()), rank)
    losses = []
    for case in cases:
        toy = Toy(rows=ROWS, micro_batches=case.micro_batches)
        engine = make_engine(toy, grid.pipe.size, module=make_pipe(case, grid, DropoutStreams()))
        batches = [case.batch(i) for i in range(case.micro_batches)]
        losses.append(float(engine.eval_batch(iter(batches))))
    return losses


def test_evaluation_gives_the_loss_of_one_process_to_the_bit() -> None:
    """Row E20, with dropout, which evaluation leaves out."""
    cases = [Case(dtype=torch.float32, sizes=sizes, has_segments=True) for sizes in ((), (*LEARNED, *UNTIED))]
    wanted = [one_process(case)[0] for case in cases]
    for losses in run_ranks(2, _evaluated, [replace(case, dropout=0.3) for case in cases]):
        assert losses == wanted


def test_random_batches_for_the_probe_have_the_shapes_of_real_ones() -> None:
    for has_segments in (False, True):
        case = replace(LONG, has_segments=has_segments)
        made, real = pipeline.random_batch(VOCAB, (ROWS, *case.lengths), has_segments), case.batch(0)
        for ours, theirs in zip(made, real, strict=True):
            assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]
