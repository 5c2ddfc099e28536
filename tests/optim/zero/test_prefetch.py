"""ZeRO 3 prefetches one unit: the order of gathers and waits, the memory, and replicas that depart from the order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.errors import ConfigError
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.optim.zero import gather_order
from megatron.optim.zero.gather import Gather
from megatron.optim.zero.gather_order import TRAINING, GatherOrder, Note
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.zero_parts import gather_full_weights, make_model_and_optimizer, take_step

H, LAYERS = 64, 6


class ResidualModel(nn.Module):
    """Layers, and weights outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))
        self.unused = nn.Parameter(torch.ones(H))  # keeps reductions over the replicas from starting during a backward
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).mul_(0.1)

    def forward(
        self, x: torch.Tensor, skip: int = -1, recomputes: bool = False, is_shorter: bool = False
    ) -> torch.Tensor:
        """Return [2, H]; with ``is_shorter``, backward does not reach the first layer."""
        x = x * self.scale
        for layer_idx, layer in enumerate(self.layers):
            if layer_idx == skip:
                continue
            y = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
            x = x + torch.tanh(y)
            x = x.detach().requires_grad_() if is_shorter and layer_idx == 0 else x
        return x


def shard_model(rank: int, size: int = 2, **settings: Any) -> tuple[ResidualModel, MixedPrecisionOptimizer]:
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    module = ResidualModel()
    optimizer = build_optimizer(module.parameters(), zero_stage=3, data=grid.data, lr=1e-2, **settings)
    optimizer.store.shard_weights(module)
    return module, optimizer


def make_input(rank: int = 0) -> torch.Tensor:
    return torch.ones(2, H) + rank


def run_micro_batch(module: ResidualModel, optimizer: MixedPrecisionOptimizer, **kwargs: Any) -> None:
    module(make_input(), **kwargs).sum().backward()
    optimizer.end_micro_batch()


def record_gathers(module: ResidualModel, optimizer: MixedPrecisionOptimizer) -> list[str]:
    """Return a list of events: "+n" when the gather of unit n starts, and "n" when its weights are complete.

    The events "forward n" and "backward n" are the ends of a layer's passes; a recomputed forward stops before its end.
    """
    events: list[str] = []
    for idx, unit in enumerate(optimizer.store.units.units):
        start, finish = unit.start, unit.finish

        def recorded_start(note: Any = (), start: Any = start, idx: int = idx) -> Any:
            for gather_idx, gather in enumerate(start(note)):
                events.extend([f"+{idx}"] if not gather_idx else [])
                yield gather

        def recorded_finish(gathers: Any, finish: Any = finish, idx: int = idx) -> None:
            finish(gathers)
            events.append(str(idx))

        unit.start, unit.finish = recorded_start, recorded_finish
    for idx, layer in enumerate(module.layers):
        layer.register_forward_hook(lambda *_, idx=idx: events.append(f"forward {idx}"))
        layer.weight.register_post_accumulate_grad_hook(lambda _, idx=idx: events.append(f"backward {idx}"))
    return events


def record_issues(rank: int, recomputes: bool, prefetches: bool) -> list[list[str]]:
    module, optimizer = shard_model(rank, prefetches=prefetches)
    events = record_gathers(module, optimizer)
    results = []
    for _ in range(3):
        events.clear()
        run_micro_batch(module, optimizer, recomputes=recomputes)
        results.append(list(events))
    for _ in range(2):
        events.clear()
        with torch.no_grad():
            module(make_input())
        results.append(list(events))
    return results


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gathers_are_issued_one_ahead_from_second_micro_batch(recomputes: bool) -> None:
    # weights outside of layers are the last unit, and are kept for backward
    forward: list[tuple[int, list[str]]] = [(LAYERS, [])]
    forward += [(unit_idx, [f"forward {unit_idx}"]) for unit_idx in range(LAYERS)]
    backward = [(unit_idx, [f"backward {unit_idx}"]) for unit_idx in reversed(range(LAYERS))]
    first, second, third, evaluated, evaluated_again = run_ranks(2, record_issues, recomputes, True)[0]

    def as_needed(uses: list[tuple[int, list[str]]]) -> list[str]:
        return [text for unit_idx, work in uses for text in (f"+{unit_idx}", str(unit_idx), *work)]

    def prefetched(uses: list[tuple[int, list[str]]]) -> list[str]:
        issues = [*([f"+{unit_idx}"] for unit_idx, _ in uses), []]
        steps = [[str(unit_idx), *issue, *work] for (unit_idx, work), issue in zip(uses, issues[1:], strict=True)]
        return [*issues[0], *(text for texts in steps for text in texts)]

    assert first == as_needed(forward + backward)
    assert evaluated == [f"+{LAYERS}", *as_needed(forward)], (
        "all replicas depart from the order of training, and report it in this gather"
    )
    assert second == third == prefetched(forward + backward) and evaluated_again == prefetched(forward)
    assert run_ranks(2, record_issues, recomputes, False)[0][:3] == [first] * 3


def measure_gathered_bytes(rank: int) -> list[tuple[int, int]]:
    """Return, after each gather of a unit, (bytes of gathered weights, bytes of prefetched weights)."""
    module, optimizer = shard_model(rank)
    units = optimizer.store.units
    byte_counts: list[tuple[int, int]] = []
    gather = units._order.gather

    def record_bytes(unit_idx: int) -> None:
        gather(unit_idx)
        gathered_bytes = sum(
            full_weight.untyped_storage().nbytes() for unit in units.units for full_weight in unit._full.values()
        )
        byte_counts.append((gathered_bytes, units._order.num_prefetched_bytes()))

    units._order.gather = record_bytes
    run_micro_batch(module, optimizer)
    byte_counts.clear()
    run_micro_batch(module, optimizer)
    return byte_counts


def test_only_one_unit_is_prefetched() -> None:
    layer_bytes, other_bytes = 4 * (H * H + H), 2 * 4 * H
    note_bytes = 2 * 16 * 4
    for byte_counts in run_ranks(2, measure_gathered_bytes):
        forward, backward = byte_counts[: LAYERS + 1], byte_counts[LAYERS + 1 :]
        assert forward == [
            (other_bytes, layer_bytes + note_bytes),
            *[(other_bytes + layer_bytes, layer_bytes + note_bytes)] * LAYERS,
        ]
        assert {bytes_ahead for _, bytes_ahead in backward} == {layer_bytes + note_bytes, 0} and backward[-1][1] == 0
        assert all(gathered_bytes <= other_bytes + 2 * layer_bytes for gathered_bytes, _ in backward)


def compare_prefetch(rank: int, gas: int, recomputes: bool) -> tuple[bool, bool]:
    """Train with and without prefetch, with evaluations; return (results are bitwise equal, weights have changed)."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    runs = [
        make_model_and_optimizer(grid, 3, recompute=recomputes, prefetches=prefetches) for prefetches in (False, True)
    ]
    starts = [gather_full_weights(*run, grid) for run in runs]
    losses: list[list[Any]] = [[], []]
    for step in range(4):
        for (module, optimizer), run_losses in zip(runs, losses, strict=True):
            run_losses.append(take_step(module, optimizer, grid, step, gas))
            with torch.no_grad():
                run_losses.append(module(torch.arange(5)).sum().item())
    plain, prefetched = (gather_full_weights(*run, grid) for run in runs)
    is_same = all(torch.equal(plain[name], value) for name, value in prefetched.items()) and losses[0] == losses[1]
    return is_same, not torch.equal(prefetched["words.weight"], starts[1]["words.weight"])


@pytest.mark.parametrize(("gas", "recomputes"), [(1, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_prefetch_is_bitwise_equal(gas: int, recomputes: bool) -> None:
    assert run_ranks(2, compare_prefetch, gas, recomputes) == [(True, True)] * 2


def leave_order_together(rank: int) -> list[bool]:
    """Depart from the order on all replicas, in many ways; return for each result if it equals that of full weights."""
    module, optimizer = shard_model(rank)
    plain = ResidualModel()
    matches = []

    def compare(**kwargs: Any) -> None:
        plain.zero_grad()
        expected, actual = plain(make_input(), **kwargs), module(make_input(), **kwargs)
        (2 * expected.sum()).backward()
        actual.sum().backward()
        optimizer.end_micro_batch()
        shards = ((optimizer.store.partition(p), optimizer.gradient_of(p)) for p in module.parameters())
        zeros = torch.zeros(())
        pairs = [
            (shard, zeros if q.grad is None else partition.slice(q.grad, rank))
            for (partition, shard), q in zip(shards, plain.parameters(), strict=True)
        ]
        matches.append(torch.equal(actual, expected) and all(torch.allclose(a, b, atol=1e-5) for a, b in pairs))
        optimizer.zero_grad()

    def evaluate(**kwargs: Any) -> None:
        with torch.no_grad():
            matches.append(torch.equal(module(make_input(), **kwargs), plain(make_input(), **kwargs)))

    for skip in (-1, -1, 0, 0, 3, LAYERS - 1, -1, -1):
        compare(skip=skip)
        evaluate(skip=skip)
    with torch.no_grad():
        output = module.layers[2](make_input())
        matches.append(torch.equal(output, plain.layers[2](make_input())))
    for _ in range(2):
        with pytest.raises(RuntimeError), torch.no_grad():
            module(torch.ones(2, H + 1))
    evaluate()
    compare()
    hook = module.layers[3].register_forward_pre_hook(raise_error)
    for context in (nullcontext, torch.no_grad):
        with pytest.raises(ArithmeticError), context():
            module(make_input())
        if context is nullcontext:
            optimizer.end_micro_batch()
    hook.remove()
    for _ in range(2):
        evaluate()
        compare()
    module.layers[1].requires_grad_(False)
    plain.layers[1].requires_grad_(False)
    module.layers[0].requires_grad_(False), module.scale.requires_grad_(False)
    plain.layers[0].requires_grad_(False), plain.scale.requires_grad_(False)
    for _ in range(3):
        compare()
    module.requires_grad_(True), plain.requires_grad_(True)
    for _ in range(2):
        compare()
    with optimizer.store.full_weights():
        evaluate()
        matches.append(all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters(), strict=True)))
    compare()
    module(make_input())  # a forward without a backward
    evaluate()
    compare()
    compare()
    return matches


def raise_error(*_: Any) -> None:
    raise ArithmeticError


def test_replicas_leaving_order_together_get_correct_weights() -> None:
    for matches in run_ranks(2, leave_order_together):
        assert all(matches) and len(matches) > 30


def change_weights_during_prefetch(rank: int) -> list[float]:
    """Change the weights while a unit is prefetched; return if it was, and the outputs of the next forwards."""
    module, optimizer = shard_model(rank)
    for _ in range(2):
        run_micro_batch(module, optimizer)
        optimizer.zero_grad()
    outputs = []
    module(make_input())  # prefetches the first unit of the backward
    has_prefetched = [optimizer.store.units._order.num_prefetched_bytes() > 0]
    with torch.no_grad():
        for value in (0.0, 2.0):
            for p in module.parameters():
                optimizer.main_param_of(p).fill_(value)
            optimizer.copy_main_params_to_parameters()
            outputs += [module.layers[layer_idx](torch.ones(H)).max().item() for layer_idx in reversed(range(LAYERS))]
            outputs.append(module(torch.ones(H)).max().item())
    return [*map(float, has_prefetched), *outputs]


def test_prefetched_weights_are_not_used_after_update() -> None:
    layer_output, model_output = 2.0 * H + 2, 2.0 + LAYERS
    for outputs in run_ranks(2, change_weights_during_prefetch):
        assert outputs == [1.0, *[0.0] * LAYERS, 0.0, *[layer_output] * LAYERS, model_output]


def leave_order_on_one_replica(rank: int, departure: str, reads_notes: bool) -> str:
    """Let one replica depart from the recorded order; return this replica's error message."""
    module, optimizer = shard_model(rank)
    if not reads_notes:  # as on a device, where only departing replicas read the notes
        optimizer.store.units._order._reads_notes = False
    before = [optimizer.main_param_of(p).detach().clone() for p in module.parameters()]
    for _ in range(2):
        run_micro_batch(module, optimizer)
    optimizer.zero_grad()
    try:
        if rank and departure == "evaluates":
            with torch.no_grad():
                module(make_input())
        skip = {"skips": 2, "ends early": LAYERS - 1}.get(departure, -1) if rank else -1
        y = module(make_input(), skip=skip, is_shorter=rank == 1 and departure == "is shorter")
        y.sum().backward()
        if rank and departure == "goes on":
            module(make_input())
        optimizer.end_micro_batch()
        optimizer.step()
    except ConfigError as error:
        if not reads_notes:
            raise
        is_unchanged = all(
            torch.equal(optimizer.main_param_of(p), b) for p, b in zip(module.parameters(), before, strict=True)
        )
        return f"{error}{'' if is_unchanged else ' CHANGED'}"
    return "no error"


EXPECTED_MESSAGES = {
    "skips": "replica 0 gathers layers.2, replica 1 gathers layers.3",
    "ends early": "replica 0 gathers layers.5, replica 1 gathers layers.4",
    "is shorter": "replica 0 gathers layers.0, replica 1 has finished its micro-batch",
    "goes on": "replica 0 has finished its micro-batch, replica 1 gathers weights outside of layers",
    "evaluates": "of layers in training, replica 1 gathers weights outside of layers in an evaluation",
}


@pytest.mark.parametrize("departure", EXPECTED_MESSAGES)
def test_replica_leaving_order_is_named_on_all_replicas(departure: str) -> None:
    codes, messages, _ = fork_ranks(2, leave_order_on_one_replica, departure, True)
    assert codes == [0, 0] and messages[0] == messages[1]
    assert "same layers in the same order" in messages[0] and "CHANGED" not in messages[0]
    assert EXPECTED_MESSAGES[departure] in messages[0]


@pytest.mark.parametrize("departure", ["skips", "is shorter", "goes on"])
def test_departure_on_device_is_reported_before_next_wait(departure: str) -> None:
    _, _, reports = fork_ranks(2, leave_order_on_one_replica, departure, False)
    assert EXPECTED_MESSAGES[departure] in reports[1]


class FakeUnit:
    """A unit whose gather contains only notes of zeros."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, note: Any) -> Any:
        yield Gather([], torch.zeros(2, len(note)), None, len(note))

    def finish(self, gathers: Any) -> None:
        assert len(list(gathers)) == 1


def follow_different_orders(rank: int, reads_notes: bool) -> list[str]:
    """Follow different orders without notes about them; return the call that raises, and the error."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    errors = []
    for last_call in ("end", "check"):
        order = GatherOrder(grid.data, [FakeUnit(n) for n in "abc"], torch.device("cpu"), reads_notes=reads_notes)
        for unit_idxs in ([0, 1, 2], [0, 2, 1] if rank else [0, 1, 2], [0, 1, 2]):
            order._orders[TRAINING] = order._last_order = [*unit_idxs, gather_order.END]
            call = "end"
            try:
                for unit_idx in unit_idxs:
                    order.gather(unit_idx)
                order.end()
                if last_call == "check":
                    call = last_call
                    order.check()
            except ConfigError as error:
                errors.append(f"{call} of {unit_idxs[1:]}: {error}")
                break
    return errors


@pytest.mark.parametrize("reads_notes", [True, False])
def test_micro_batch_hash_detects_different_orders(reads_notes: bool) -> None:
    for rank, errors in enumerate(run_ranks(2, follow_different_orders, reads_notes)):
        suffix = f"of {[[1, 2], [2, 1]][rank]}"
        immediate = [f"end {suffix}"] * 2
        deferred = [
            "end of [1, 2]",
            f"check {suffix}",
        ]  # on a device, orders are compared at the end of the next pass or before an update
        assert [text.partition(":")[0] for text in errors] == (immediate if reads_notes else deferred)
        assert all("replica 0 gathers b, replica 1 gathers c." in text for text in errors)


def count_order_comparisons(rank: int) -> list[int]:
    """Return the number of comparisons of the order in each of three micro-batches and two evaluations."""
    module, optimizer = shard_model(rank)
    calls: list[int] = []
    original_gather = gather_order.all_gather_single
    gather_order.all_gather_single = lambda *args, **kwargs: [
        calls.append(args[1].numel()),
        original_gather(*args, **kwargs),
    ][1]
    counts = []
    for step in range(5):
        calls.clear()
        with nullcontext() if step < 3 else torch.no_grad():
            module(make_input()).sum().backward() if step < 3 else module(make_input())
        if step < 3:
            optimizer.end_micro_batch()
        assert set(calls) == {3}
        counts.append(len(calls))
    return counts


def test_replicas_compare_order_once_per_known_micro_batch() -> None:
    first_count, evaluation_count = (
        2 * LAYERS + 2,
        LAYERS + 1,
    )  # every gather and the end; the first evaluation's departure is in a gather
    assert run_ranks(2, count_order_comparisons) == [[first_count, 1, 1, evaluation_count, 1]] * 2


@pytest.mark.parametrize("note", [Note(0), Note(7), Note(300, -1, 5), Note(TRAINING, 70, -1), Note(65000, 1000, 999)])
def test_note_survives_16_bit_encoding(note: Note) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert Note.from_digits(torch.tensor(note.digits()).to(dtype).tolist()) == note
