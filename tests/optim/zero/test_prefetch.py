"""ZeRO 3 gathers a unit ahead: what is issued and waited for when, what is held, and who leaves the order."""

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
from tests.helpers.zero_parts import make, take_step, whole_weights

H, LAYERS = 64, 6


class Plain(nn.Module):
    """Layers, and a table that is in none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))
        self.unused = nn.Parameter(torch.ones(H))  # no sum over the replicas starts within a backward
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).mul_(0.1)

    def forward(
        self, x: torch.Tensor, skip: int = -1, recomputes: bool = False, is_shorter: bool = False
    ) -> torch.Tensor:
        """Return [2, H]; a shorter way back leaves the first layer out."""
        x = x * self.scale
        for number, layer in enumerate(self.layers):
            if number == skip:
                continue
            y = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
            x = x + torch.tanh(y)
            x = x.detach().requires_grad_() if is_shorter and number == 0 else x
        return x


def cut(rank: int, size: int = 2, **settings: Any) -> tuple[Plain, MixedPrecisionOptimizer]:
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    module = Plain()
    optimizer = build_optimizer(module.parameters(), zero_stage=3, data=grid.data, lr=1e-2, **settings)
    optimizer.store.shard_weights(module)
    return module, optimizer


def x_of(rank: int = 0) -> torch.Tensor:
    return torch.ones(2, H) + rank


def micro_batch(module: Plain, optimizer: MixedPrecisionOptimizer, **how: Any) -> None:
    module(x_of(), **how).sum().backward()
    optimizer.end_micro_batch()


def watch(module: Plain, optimizer: MixedPrecisionOptimizer) -> list[str]:
    """Return what gets "+n" where the gather of unit n is issued, and "n" where its weights are there.

    Between them come "forward n" and "backward n" of layers when they are through; a recompute stops ahead of that.
    """
    said: list[str] = []
    for number, unit in enumerate(optimizer.store.units.units):
        start, finish = unit.start, unit.finish

        def start_and_say(note: Any = (), start: Any = start, number: int = number) -> Any:
            for place, gather in enumerate(start(note)):
                said.extend([f"+{number}"] if not place else [])
                yield gather

        def finish_and_say(gathers: Any, finish: Any = finish, number: int = number) -> None:
            finish(gathers)
            said.append(str(number))

        unit.start, unit.finish = start_and_say, finish_and_say
    for number, layer in enumerate(module.layers):
        layer.register_forward_hook(lambda *_, number=number: said.append(f"forward {number}"))
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: said.append(f"backward {number}"))
    return said


def issued(rank: int, recomputes: bool, prefetches: bool) -> list[list[str]]:
    module, optimizer = cut(rank, prefetches=prefetches)
    said = watch(module, optimizer)
    found = []
    for _ in range(3):
        said.clear()
        micro_batch(module, optimizer, recomputes=recomputes)
        found.append(list(said))
    for _ in range(2):
        said.clear()
        with torch.no_grad():
            module(x_of())
        found.append(list(said))
    return found


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_from_the_second_micro_batch_on_gathers_are_issued_one_ahead(recomputes: bool) -> None:
    forward: list[tuple[int, list[str]]] = [(LAYERS, [])]  # the rest is the last unit, and stays for the backward
    forward += [(number, [f"forward {number}"]) for number in range(LAYERS)]
    backward = [(number, [f"backward {number}"]) for number in reversed(range(LAYERS))]
    first, second, third, evaluated, evaluated_again = run_ranks(2, issued, recomputes, True)[0]

    def as_needed(uses: list[tuple[int, list[str]]]) -> list[str]:
        return [text for number, work in uses for text in (f"+{number}", str(number), *work)]

    def ahead(uses: list[tuple[int, list[str]]]) -> list[str]:
        issues = [*([f"+{number}"] for number, _ in uses), []]
        said = [[str(number), *issue, *work] for (number, work), issue in zip(uses, issues[1:], strict=True)]
        return [*issues[0], *(text for each in said for text in each)]

    assert first == as_needed(forward + backward)
    assert evaluated == [f"+{LAYERS}", *as_needed(forward)], "all leave the order of training, and say so there"
    assert second == third == ahead(forward + backward) and evaluated_again == ahead(forward)
    assert run_ranks(2, issued, recomputes, False)[0][:3] == [first] * 3


def held(rank: int) -> list[tuple[int, int]]:
    """Return whenever weights have come the bytes of them that are gathered, and those that come ahead."""
    module, optimizer = cut(rank)
    units = optimizer.store.units
    found: list[tuple[int, int]] = []
    gather = units._order.gather

    def look(number: int) -> None:
        gather(number)
        here = sum(whole.untyped_storage().nbytes() for unit in units.units for whole in unit._full.values())
        found.append((here, units._order.num_bytes_ahead()))

    units._order.gather = look
    micro_batch(module, optimizer)
    found.clear()
    micro_batch(module, optimizer)
    return found


def test_one_unit_is_held_beyond_what_is_in_use() -> None:
    layer, rest = 4 * (H * H + H), 2 * 4 * H
    notes = 2 * 16 * 4
    for found in run_ranks(2, held):
        forward, backward = found[: LAYERS + 1], found[LAYERS + 1 :]
        assert forward == [(rest, layer + notes), *[(rest + layer, layer + notes)] * LAYERS]
        assert {ahead for _, ahead in backward} == {layer + notes, 0} and backward[-1][1] == 0
        assert all(here <= rest + 2 * layer for here, _ in backward)


def bits(rank: int, gas: int, recomputes: bool) -> tuple[bool, bool]:
    """Train with and without gathers ahead, with an evaluation between; return whether bits are equal, and moved."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    sides = [make(grid, 3, recomputes=recomputes, prefetches=prefetches) for prefetches in (False, True)]
    starts = [whole_weights(*side, grid) for side in sides]
    losses: list[list[Any]] = [[], []]
    for step in range(4):
        for (module, optimizer), seen in zip(sides, losses, strict=True):
            seen.append(take_step(module, optimizer, grid, step, gas))
            with torch.no_grad():
                seen.append(module(torch.arange(5)).sum().item())
    plain, ahead = (whole_weights(*side, grid) for side in sides)
    same = all(torch.equal(plain[name], value) for name, value in ahead.items()) and losses[0] == losses[1]
    return same, not torch.equal(ahead["words.weight"], starts[1]["words.weight"])


@pytest.mark.parametrize(("gas", "recomputes"), [(1, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_gathers_ahead_change_no_bit(gas: int, recomputes: bool) -> None:
    assert run_ranks(2, bits, gas, recomputes) == [(True, True)] * 2


def departures(rank: int) -> list[bool]:
    """Leave the order on all replicas alike, in many ways; return whether each result is that of whole weights."""
    module, optimizer = cut(rank)
    plain = Plain()
    same = []

    def compare(**how: Any) -> None:
        plain.zero_grad()
        wanted, found = plain(x_of(), **how), module(x_of(), **how)
        (2 * wanted.sum()).backward()
        found.sum().backward()
        optimizer.end_micro_batch()
        parts = ((optimizer.store.partition(p), optimizer.gradient_of(p)) for p in module.parameters())
        zeros = torch.zeros(())
        pairs = [
            (part, zeros if q.grad is None else c.slice(q.grad, rank))
            for (c, part), q in zip(parts, plain.parameters(), strict=True)
        ]
        same.append(torch.equal(found, wanted) and all(torch.allclose(a, b, atol=1e-5) for a, b in pairs))
        optimizer.zero_grad()

    def evaluate(**how: Any) -> None:
        with torch.no_grad():
            same.append(torch.equal(module(x_of(), **how), plain(x_of(), **how)))

    for skip in (-1, -1, 0, 0, 3, LAYERS - 1, -1, -1):
        compare(skip=skip)
        evaluate(skip=skip)
    with torch.no_grad():
        part = module.layers[2](x_of())
        same.append(torch.equal(part, plain.layers[2](x_of())))
    for _ in range(2):
        with pytest.raises(RuntimeError), torch.no_grad():
            module(torch.ones(2, H + 1))
    evaluate()
    compare()
    hook = module.layers[3].register_forward_pre_hook(fail)
    for context in (nullcontext, torch.no_grad):
        with pytest.raises(ArithmeticError), context():
            module(x_of())
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
        same.append(all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters(), strict=True)))
    compare()
    module(x_of())  # a forward that no backward follows
    evaluate()
    compare()
    compare()
    return same


def fail(*_: Any) -> None:
    raise ArithmeticError


def test_replicas_that_leave_the_order_together_get_the_right_weights() -> None:
    for same in run_ranks(2, departures):
        assert all(same) and len(same) > 30


def stale(rank: int) -> list[float]:
    """Change the weights while a unit is gathered ahead; return what the next forwards find of them."""
    module, optimizer = cut(rank)
    for _ in range(2):
        micro_batch(module, optimizer)
        optimizer.zero_grad()
    found = []
    module(x_of())  # the first unit of a backward comes ahead
    ahead = [optimizer.store.units._order.num_bytes_ahead() > 0]
    with torch.no_grad():
        for value in (0.0, 2.0):
            for p in module.parameters():
                optimizer.main_param_of(p).fill_(value)
            optimizer.copy_main_params_to_parameters()
            found += [module.layers[number](torch.ones(H)).max().item() for number in reversed(range(LAYERS))]
            found.append(module(torch.ones(H)).max().item())
    return [*map(float, ahead), *found]


def test_what_comes_ahead_of_an_update_is_not_used_after_it() -> None:
    layer, whole = 2.0 * H + 2, 2.0 + LAYERS
    for found in run_ranks(2, stale):
        assert found == [1.0, *[0.0] * LAYERS, 0.0, *[layer] * LAYERS, whole]


def one_departs(rank: int, way: str, reads: bool) -> str:
    """Let one replica leave an order that all know; return what it is told."""
    module, optimizer = cut(rank)
    if not reads:  # as on a device, where only who departs can look
        optimizer.store.units._order._reads_notes = False
    before = [optimizer.main_param_of(p).detach().clone() for p in module.parameters()]
    for _ in range(2):
        micro_batch(module, optimizer)
    optimizer.zero_grad()
    try:
        if rank and way == "evaluates":
            with torch.no_grad():
                module(x_of())
        skip = {"skips": 2, "ends early": LAYERS - 1}.get(way, -1) if rank else -1
        y = module(x_of(), skip=skip, is_shorter=rank == 1 and way == "is shorter")
        y.sum().backward()
        if rank and way == "goes on":
            module(x_of())
        optimizer.end_micro_batch()
        optimizer.step()
    except ConfigError as error:
        if not reads:
            raise
        kept = all(torch.equal(optimizer.main_param_of(p), b) for p, b in zip(module.parameters(), before, strict=True))
        return f"{error}{'' if kept else ' CHANGED'}"
    return "no error"


NAMED = {
    "skips": "replica 0 gathers layers.2, replica 1 gathers layers.3",
    "ends early": "replica 0 gathers layers.5, replica 1 gathers layers.4",
    "is shorter": "replica 0 gathers layers.0, replica 1 has finished its micro-batch",
    "goes on": "replica 0 has finished its micro-batch, replica 1 gathers weights outside of layers",
    "evaluates": "of layers in training, replica 1 gathers weights outside of layers in an evaluation",
}


@pytest.mark.parametrize("way", NAMED)
def test_a_replica_that_leaves_the_order_alone_is_named_on_all(way: str) -> None:
    codes, messages, _ = fork_ranks(2, one_departs, way, True)
    assert codes == [0, 0] and messages[0] == messages[1]
    assert "same layers in the same order" in messages[0] and "CHANGED" not in messages[0]
    assert NAMED[way] in messages[0]


@pytest.mark.parametrize("way", ["skips", "is shorter", "goes on"])
def test_on_a_device_who_leaves_the_order_is_told_before_anybody_waits_for_another_layer(way: str) -> None:
    _, _, reports = fork_ranks(2, one_departs, way, False)
    assert NAMED[way] in reports[1]


class Alike:
    """A unit whose gather tells nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, note: Any) -> Any:
        yield Gather([], torch.zeros(2, len(note)), None, len(note))

    def finish(self, gathers: Any) -> None:
        assert len(list(gathers)) == 1


def other_hashes(rank: int, reads: bool) -> list[str]:
    """Follow other orders on each replica, which no message tells; return which call raises what."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    found = []
    for behind in ("end", "check"):
        order = GatherOrder(grid.data, [Alike(n) for n in "abc"], torch.device("cpu"), reads_notes=reads)
        for numbers in ([0, 1, 2], [0, 2, 1] if rank else [0, 1, 2], [0, 1, 2]):
            order._orders[TRAINING] = order._last = [*numbers, gather_order.END]
            call = "end"
            try:
                for number in numbers:
                    order.gather(number)
                order.end()
                if behind == "check":
                    call = behind
                    order.check()
            except ConfigError as error:
                found.append(f"{call} of {numbers[1:]}: {error}")
                break
    return found


@pytest.mark.parametrize("reads", [True, False])
def test_one_hash_for_each_micro_batch_tells_orders_apart(reads: bool) -> None:
    for rank, found in enumerate(run_ranks(2, other_hashes, reads)):
        second = f"of {[[1, 2], [2, 1]][rank]}"
        at_once = [f"end {second}"] * 2
        later = ["end of [1, 2]", f"check {second}"]  # a device looks when the next pass is through, or a step begins
        assert [text.partition(":")[0] for text in found] == (at_once if reads else later)
        assert all("replica 0 calls b, replica 1 calls c." in text for text in found)


def compared(rank: int) -> list[int]:
    """Return how often replicas compare orders in each of three micro-batches and two evaluations."""
    module, optimizer = cut(rank)
    calls: list[int] = []
    send = gather_order.all_gather_single
    gather_order.all_gather_single = lambda *args, **how: [calls.append(args[1].numel()), send(*args, **how)][1]
    found = []
    for step in range(5):
        calls.clear()
        with nullcontext() if step < 3 else torch.no_grad():
            module(x_of()).sum().backward() if step < 3 else module(x_of())
        if step < 3:
            optimizer.end_micro_batch()
        assert set(calls) == {3}
        found.append(len(calls))
    return found


def test_replicas_compare_once_for_each_micro_batch_whose_order_is_known() -> None:
    first, evaluation = 2 * LAYERS + 2, LAYERS + 1  # each gather and the end; the first is agreed upon in its gather
    assert run_ranks(2, compared) == [[first, 1, 1, evaluation, 1]] * 2


@pytest.mark.parametrize("word", [Note(0), Note(7), Note(300, -1, 5), Note(TRAINING, 70, -1), Note(65000, 1000, 999)])
def test_a_word_goes_through_numbers_of_16_bits(word: Note) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert Note.from_digits(torch.tensor(word.digits()).to(dtype).tolist()) == word
