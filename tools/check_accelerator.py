"""Run the device-dependent functions of this project on a device, check them, and list the adaptors of its plug-in.

    python tools/check_accelerator.py --device cpu
    PYTHONPATH=examples/accelerator_sim MEGATRON_ACCELERATOR=megatron_accelerator_sim \\
        python tools/check_accelerator.py --device sim

The exit code is 0 if every line ends with ok. docs/accelerators.md describes the lines.
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
from megatron.training.device_setup import check_deepspeed_device, configure_device, default_backend

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}
"""Number format -> largest allowed difference from the CPU's result, relative to its largest absolute value."""


def _assert_close(device_tensor: torch.Tensor, cpu_tensor: torch.Tensor, tolerance: float = TOLERANCE["fp32"]) -> None:
    """Raise AssertionError if the device's tensor ``device_tensor`` differs from the CPU's tensor ``cpu_tensor``."""
    relative_error = (
        device_tensor.detach().cpu().double() - cpu_tensor.detach().double()
    ).abs().max() / cpu_tensor.detach().double().abs().max()
    assert relative_error <= tolerance, f"differs from the CPU by {relative_error:.1e}, more than {tolerance:g}"


def _random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def copies(torch_device: torch.device) -> None:
    """Check that copies to the device and back preserve the values."""
    for tensor in (_random_tensor(3, 5), torch.arange(7), torch.tensor([True, False])):
        assert torch.equal(tensor.to(torch_device).cpu(), tensor)
        host_buffer = device.host_memory(tuple(tensor.shape), tensor.dtype, torch_device)
        device.copy_to_host(host_buffer, tensor.to(torch_device))
        assert torch.equal(device.copy_from_host(host_buffer, torch_device).cpu(), tensor)
        on_device, uploaded = device.start_upload({"held": host_buffer}, torch_device)
        device.await_upload(on_device.values(), torch_device, uploaded)
        assert torch.equal(on_device["held"].cpu(), tensor)
    device.finish_copies(torch_device)


def views(torch_device: torch.device) -> None:
    """Check that writing to a view changes its base tensor, and that bytes can be viewed as another type."""
    base = torch.zeros(4, 6, device=torch_device)
    base[1:3].t()[2:4].fill_(1.0)
    assert base.sum().item() == 4.0
    assert base.view(-1)[8:10].sum().item() == 2.0
    assert torch.equal(base.view(torch.uint8).view(torch.float32), base)


def in_place(torch_device: torch.device) -> None:
    """Check in-place operations, operations with an output tensor, and resizing."""
    x = torch.ones(3, device=torch_device)
    x.add_(1).mul_(2)
    out = torch.empty(0, device=torch_device)
    torch.add(x, x, out=out)
    assert out.tolist() == [8.0] * 3 and x.resize_(5)[:3].tolist() == [4.0] * 3
    torch._foreach_mul_([x, out], 0.5)
    assert out.tolist() == [4.0] * 3


def formats(torch_device: torch.device) -> None:
    """Check matrix products in every number format that the device supports."""
    plugin = accelerators.find(torch_device.type)
    for name in plugin.dtypes if plugin else ("fp32", "fp64", "bf16"):
        a, b = _random_tensor(8, 16).to(device.DTYPES[name]), _random_tensor(16, 4).to(device.DTYPES[name])
        _assert_close(a.to(torch_device) @ b.to(torch_device), a.double() @ b.double(), TOLERANCE[name])


def layers(torch_device: torch.device) -> None:
    """Check that the forward and backward of each type of layer match the CPU."""
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
        cpu_input = _random_tensor(2, 3, 6, 8).requires_grad_()
        device_input = cpu_input.detach().to(torch_device).requires_grad_()
        for x in (cpu_input, device_input):
            call(x).sum().backward()
        try:
            _assert_close(call(device_input), call(cpu_input))
            assert device_input.grad is not None and device_input.grad.device == device_input.device
            _assert_close(device_input.grad, cpu_input.grad)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def optimizer(torch_device: torch.device) -> None:
    """Check that a step of fused AdamW matches the CPU."""
    weights = []
    for target in (torch.device("cpu"), torch_device):
        weight = torch.nn.Parameter(_random_tensor(4, 4).to(target))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()
        weights.append(weight)
    _assert_close(weights[1], weights[0])


def generators(torch_device: torch.device) -> None:
    """Check that random numbers repeat after setting the same seed or restoring the generator's state."""
    device.seed(5)
    states = device.rng_states(torch_device.type)
    first = torch.rand(6, device=torch_device)
    device.set_rng_states(states)
    second = torch.rand(6, device=torch_device)
    device.seed(5)
    assert torch.equal(first, second) and torch.equal(first, torch.rand(6, device=torch_device))
    generator = device.default_generator(torch_device)
    generator.set_state(generator.get_state())


def answers(torch_device: torch.device) -> None:
    """Check that queries about the device (name, memory, default precision) return valid values."""
    device_type = torch_device.type
    device.synchronize(device_type)
    assert isinstance(device.name(device_type), str) and isinstance(device.is_busy(torch_device), bool)
    assert 0 <= device.peak_memory_bytes(device_type) <= device.total_memory_bytes(device_type)
    assert device.default_precision(device_type) in device.DTYPES and default_backend(device_type)


def deepspeed(torch_device: torch.device) -> None:
    """Check that DeepSpeed's accelerator object is for the same device."""
    from deepspeed.accelerator import get_accelerator

    ds_accelerator = get_accelerator()
    check_deepspeed_device(torch_device.type)
    assert ds_accelerator.on_accelerator(torch.zeros(1, device=torch_device)) and ds_accelerator.memory_allocated() >= 0
    assert ds_accelerator.device_count() >= 1 and isinstance(ds_accelerator.is_synchronized_device(), bool)


def modules(torch_device: torch.device) -> None:
    """Check that moving a module preserves its parameter objects, their attributes and parameter sharing."""
    from tds.device import move

    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    first.weight.fact = "kept"  # type: ignore[attr-defined]
    weight = first.weight
    move(torch.nn.Sequential(first, second), torch_device)
    assert first.weight is weight is second.weight and weight.device == torch_device and weight.fact == "kept"


def collectives(torch_device: torch.device) -> None:
    """Check that the backend accepts tensors of the device, in a world of one rank."""
    dist.init_process_group(default_backend(torch_device.type), store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, gathered = torch.full((2,), 3.0, device=torch_device), [torch.zeros(2, device=torch_device)]
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather(gathered, x)
        dist.barrier()
        assert gathered[0].tolist() == [3.0, 3.0]
    finally:
        dist.destroy_process_group()


def reversible(torch_device: torch.device) -> None:
    """Check that removing the adaptors restores the original functions. Must run last: it leaves them disabled."""
    plugin = accelerators.find(torch_device.type)
    if plugin is None:
        return
    accelerators.disable(torch_device.type)
    targets = [accelerators.target_of(patch) for adaptor in plugin.adaptors for patch in adaptor.patches]
    originals = [vars(owner).get(name) for owner, name in targets]
    accelerators.adapt(torch_device.type)
    accelerators.disable(torch_device.type)
    assert all(vars(owner).get(name) is original for (owner, name), original in zip(targets, originals, strict=True))


CHECKS: tuple[Callable[[torch.device], None], ...] = (
    answers, copies, views, in_place, formats, layers, optimizer, generators, modules, deepspeed, collectives,
    reversible,
)  # fmt: skip


def run_checks(device_type: str, local_rank: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (check, "ok" or the error) for device ``local_rank``; call ``configure_device`` first."""
    bound_device = device.bind(device_type, local_rank)
    for check in CHECKS:
        try:
            check(bound_device)
            yield check.__name__, "ok"
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            yield check.__name__, f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or the device of a plug-in")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the adaptors and the checklist; return the exit code."""
    requested = parse_args(argv).device
    try:
        accelerators.load()
        device_type = configure_device(Config(parallel=ParallelConfig(device=requested)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"device {device_type}: {device.name(device_type)}")
    plugin = accelerators.find(device_type)
    for adaptor, status, target, reason in accelerators.adaptor_rows(plugin.adaptors if plugin else ()):
        print(f"adaptor {adaptor:36} {status:4} {target}: {reason}")
    results = list(run_checks(device_type))
    for name, result in results:
        print(f"check   {name:12} {result}")
    return 0 if all(result == "ok" for _, result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
