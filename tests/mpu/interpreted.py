"""Kernels in Triton, run on a CPU by its interpreter, against torch's operators; a program of its own.

``TRITON_INTERPRET=1 python -m tests.mpu.interpreted NAME`` raises if ``NAME`` does not hold. The interpreter must be
chosen ahead of Triton's import, which torch may do for its own ends, and it has no bf16.
"""

from __future__ import annotations

import itertools
import sys

import torch

from megatron.mpu import fused_dropout
from megatron.mpu.fused_dropout import Mask
from megatron.mpu.groups import Group
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.random import DropoutKey, DropoutStreams

PLACE = {"layer": 5, "site": "mlp output"}
BY_KERNEL = DropoutStreams.by_kernel


def with_kernel(is_on: bool) -> None:
    DropoutStreams.by_kernel = (lambda streams, x: True) if is_on else BY_KERNEL  # type: ignore[method-assign]


def streams_of(rank: int, samples: int) -> PhiloxDropout:
    streams = PhiloxDropout(samples, 7, Group((0, 1), 1), Group((0, 1), rank))
    streams.position = DropoutKey(3, 1, 2)
    return streams


def masks() -> None:
    """Masks of any layout have the bits of those by torch's operators, and so have outputs and gradients."""
    generator = torch.Generator().manual_seed(1)
    for width, (is_cut, is_part) in itertools.product((6, 21, 1100), ((0, 0), (1, 0), (0, 1))):
        has_residual, probability = width == 6, 0.3
        streams, found = streams_of(1, 2), []
        x, residual, grad = (torch.randn(3, 2, width, generator=generator) for _ in range(3))
        for is_on in (False, True):
            with_kernel(is_on)
            leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
            out = streams.dropout(
                leaves[0], probability, training=True, is_cut=bool(is_cut), is_part=bool(is_part),
                residual=leaves[1] if has_residual else None, **PLACE,
            )  # fmt: skip
            out.backward(grad)
            found.append([out, *(leaf.grad for leaf in leaves[: 1 + has_residual])])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (width, is_cut, is_part)
    for keys, is_cut in ((5, False), (64, True)):
        streams, found = streams_of(1, 2), []
        x = torch.rand(2, 2, 3, keys, generator=generator)
        for is_on in (False, True):
            with_kernel(is_on)
            leaf = x.clone().requires_grad_()
            out = streams.attend(lambda drop: drop(leaf), 0.3, device=x.device, is_cut=is_cut, **PLACE)  # noqa: B023
            out.backward(x)
            found.append([out, leaf.grad])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (keys, is_cut)


def keys() -> None:
    """Masks of a key are those of every forward of the place, of none other, and drop as many as asked."""
    with_kernel(True)
    streams = DropoutStreams(3)
    ones = torch.ones(2, 2, 8192, requires_grad=True)

    def kept(**changes: object) -> torch.Tensor:
        return streams.dropout(ones, 0.1, training=True, **{**PLACE, **changes}) != 0  # type: ignore[arg-type]

    first = kept()
    assert abs((~first).float().mean() - 0.1) < 0.005 and torch.equal(first, kept())
    (gradient,) = torch.autograd.grad(streams.dropout(ones, 0.1, training=True, **PLACE).sum(), ones)
    assert torch.equal(gradient != 0, first)
    assert torch.equal(gradient[first], torch.full_like(gradient[first], 1 / 0.9))
    for other in (kept(layer=6), kept(site="attention output")):
        assert abs((first == other).float().mean() - (0.9**2 + 0.1**2)) < 0.01
    streams.position = DropoutKey(0, 1)
    assert not torch.equal(first, kept())


def operator() -> None:
    """In a graph the operator gives what the kernel gives outside of one, and so does its backward."""
    with_kernel(True)
    x = torch.randn(8, 2, 33).requires_grad_()
    streams = DropoutStreams(3)
    streams.position = DropoutKey(4, 2)
    wanted = streams.dropout(x, 0.2, training=True, **PLACE)
    place = torch.tensor([4, 2]), torch.tensor(5), [3, 0, -1], "mlp output", 0.2, True
    found, key = fused_dropout.keyed_dropout(x, *place)
    grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in (wanted, found)]
    assert torch.equal(found, wanted) and torch.equal(*grads)
    assert int(key) == streams.key(5, "mlp output", False)
    assert torch.equal(found, fused_dropout.run_kernel(x, None, Mask(int(key), 0.2)))
    torch.library.opcheck(fused_dropout.keyed_dropout, (x.detach(), *place))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
