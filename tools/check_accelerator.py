"""Go through what this project asks of a device, on the device itself, and list the adaptors of its plug-in.

    python tools/check_accelerator.py --device cpu
    PYTHONPATH=examples/accelerator_sim MEGATRON_ACCELERATOR=megatron_accelerator_sim \\
        python tools/check_accelerator.py --device sim

Ends with code 0 if every line says ok. docs/accelerators.md tells what each line stands for.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron import accelerators, device
from megatron.config import Config, ParallelConfig
from megatron.training.device_setup import backend_of, check_agreement, configure_device

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}
"""Largest difference from the CPU, relative to the largest number."""


def _close(there: torch.Tensor, here: torch.Tensor, tolerance: float = TOLERANCE["fp32"]) -> None:
    """Raise AssertionError if a tensor of the device is not what the CPU has."""
    error = (there.detach().cpu().double() - here.detach().double()).abs().max() / here.detach().double().abs().max()
    assert error <= tolerance, f"differs from the CPU by {error:.1e}, more than {tolerance:g}"


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def copies(place: torch.device) -> None:
    """Return what was put there."""
    for tensor in (_numbers(3, 5), torch.arange(7), torch.tensor([True, False])):
        assert torch.equal(tensor.to(place).cpu(), tensor)
        held = device.host_memory(tuple(tensor.shape), tensor.dtype, place)
        device.copy_to_host(held, tensor.to(place))
        assert torch.equal(device.copy_from_host(held, place).cpu(), tensor)
        there, uploaded = device.start_upload({"held": held}, place)
        device.await_upload(there.values(), place, uploaded)
        assert torch.equal(there["held"].cpu(), tensor)
    device.finish_copies(place)


def views(place: torch.device) -> None:
    """Writing to a view writes to what it is a view of; bytes may be looked at as another type."""
    whole = torch.zeros(4, 6, device=place)
    whole[1:3].t()[2:4].fill_(1.0)
    assert whole.sum().item() == 4.0
    assert whole.view(-1)[8:10].sum().item() == 2.0
    assert torch.equal(whole.view(torch.uint8).view(torch.float32), whole)


def in_place(place: torch.device) -> None:
    """Operations in place, into given tensors, and resized ones."""
    x = torch.ones(3, device=place)
    x.add_(1).mul_(2)
    out = torch.empty(0, device=place)
    torch.add(x, x, out=out)
    assert out.tolist() == [8.0] * 3 and x.resize_(5)[:3].tolist() == [4.0] * 3
    torch._foreach_mul_([x, out], 0.5)
    assert out.tolist() == [4.0] * 3


def formats(place: torch.device) -> None:
    """Products in every number format that the device says it computes in."""
    plugin = accelerators.find(place.type)
    for name in plugin.dtypes if plugin else ("fp32", "fp64", "bf16"):
        a, b = _numbers(8, 16).to(device.DTYPES[name]), _numbers(16, 4).to(device.DTYPES[name])
        _close(a.to(place) @ b.to(place), a.double() @ b.double(), TOLERANCE[name])


def layers(place: torch.device) -> None:
    """Each kind of layer forward and backward, against the CPU."""
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": F.gelu,
        "norm": lambda x: F.layer_norm(x, (8,)),
        "softmax": lambda x: x.softmax(-1).square(),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "masked attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=causal.to(x.device)),
        "table": lambda x: F.embedding(torch.tensor([0, 5, 0]).to(x.device), x[0, 0]).square(),
        "cross entropy": lambda x: F.cross_entropy(x.flatten(0, 2), torch.arange(36).to(x.device) % 8),
    }
    for name, call in calls.items():
        here = _numbers(2, 3, 6, 8).requires_grad_()
        there = here.detach().to(place).requires_grad_()
        for x in (here, there):
            call(x).sum().backward()
        try:
            _close(call(there), call(here))
            assert there.grad is not None and there.grad.device == there.device
            _close(there.grad, here.grad)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def optimizer(place: torch.device) -> None:
    """A step of fused AdamW."""
    weights = []
    for where in (torch.device("cpu"), place):
        weight = torch.nn.Parameter(_numbers(4, 4).to(where))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()
        weights.append(weight)
    _close(weights[1], weights[0])


def generators(place: torch.device) -> None:
    """The same seed gives the same numbers, and a state that is put back gives them again."""
    device.seed(5)
    states = device.rng_states(place.type)
    first = torch.rand(6, device=place)
    device.set_rng_states(states)
    again = torch.rand(6, device=place)
    device.seed(5)
    assert torch.equal(first, again) and torch.equal(first, torch.rand(6, device=place))
    generator = device.default_generator(place)
    generator.set_state(generator.get_state())


def answers(place: torch.device) -> None:
    """The seam's questions have answers."""
    kind = place.type
    device.synchronize(kind)
    assert isinstance(device.name(kind), str) and isinstance(device.is_busy(place), bool)
    assert 0 <= device.peak_memory_bytes(kind) <= device.total_memory_bytes(kind)
    assert device.default_precision(kind) in device.DTYPES and backend_of(kind)


def deepspeed(place: torch.device) -> None:
    """DeepSpeed's accelerator object is for the same device."""
    from deepspeed.accelerator import get_accelerator

    theirs = get_accelerator()
    check_agreement(place.type)
    assert theirs.on_accelerator(torch.zeros(1, device=place)) and theirs.memory_allocated() >= 0
    assert theirs.device_count() >= 1 and isinstance(theirs.is_synchronized_device(), bool)


def modules(place: torch.device) -> None:
    """A module that is moved keeps its parameters, their attributes and who shares them."""
    from tds.device import move

    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    first.weight.fact = "kept"  # type: ignore[attr-defined]
    weight = first.weight
    move(torch.nn.Sequential(first, second), place)
    assert first.weight is weight is second.weight and weight.device == place and weight.fact == "kept"


def collectives(place: torch.device) -> None:
    """The backend takes tensors of the device, in a world of one."""
    dist.init_process_group(backend_of(place.type), store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, parts = torch.full((2,), 3.0, device=place), [torch.zeros(2, device=place)]
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather(parts, x)
        dist.barrier()
        assert parts[0].tolist() == [3.0, 3.0]
    finally:
        dist.destroy_process_group()


def reversible(place: torch.device) -> None:
    """All adaptors can be taken back, and every target is then what it was before; last, for they are off after it."""
    plugin = accelerators.find(place.type)
    if plugin is None:
        return
    accelerators.disable(place.type)
    targets = [accelerators.target_of(patch) for adaptor in plugin.adaptors for patch in adaptor.patches]
    before = [vars(owner).get(name) for owner, name in targets]
    accelerators.adapt(place.type)
    accelerators.disable(place.type)
    assert all(vars(owner).get(name) is old for (owner, name), old in zip(targets, before, strict=True))


CHECKS: tuple[Callable[[torch.device], None], ...] = (
    answers, copies, views, in_place, formats, layers, optimizer, generators, modules, deepspeed, collectives,
    reversible,
)  # fmt: skip


def run_checks(kind: str, local_rank: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (check, "ok" or what went wrong) for the device ``local_rank`` of this kind, which has been settled."""
    place = device.bind(kind, local_rank)
    for check in CHECKS:
        try:
            check(place)
            yield check.__name__, "ok"
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            yield check.__name__, f"{type(error).__name__}: {error} ({Path(line.filename).name}:{line.lineno})"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the tool's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or the device of a plug-in")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the adaptors and the checklist; return the exit code."""
    asked = parse_args(argv).device
    try:
        accelerators.load()
        kind = configure_device(Config(parallel=ParallelConfig(device=asked)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"device {kind}: {device.name(kind)}")
    plugin = accelerators.find(kind)
    for adaptor, state, target, why in accelerators.adaptor_rows(plugin.adaptors if plugin else ()):
        print(f"adaptor {adaptor:36} {state:4} {target}: {why}")
    results = list(run_checks(kind))
    for name, result in results:
        print(f"check   {name:12} {result}")
    return 0 if all(result == "ok" for _, result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
