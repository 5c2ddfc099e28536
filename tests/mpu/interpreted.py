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

DROPOUT_SITE = {"layer": 5, "site": "mlp output"}
ORIGINAL_USES_KERNEL = DropoutStreams.uses_kernel


def set_kernel(is_enabled: bool) -> None:
    DropoutStreams.uses_kernel = (lambda streams, x: True) if is_enabled else ORIGINAL_USES_KERNEL  # type: ignore[method-assign]


def make_streams(rank: int, num_samples: int) -> PhiloxDropout:
    streams = PhiloxDropout(num_samples, 7, Group((0, 1), 1), Group((0, 1), rank))
    streams.position = DropoutKey(3, 1, 2)
    return streams


def masks() -> None:
    """Masks of any layout have the bits of those by torch's operators, and so have outputs and gradients."""
    generator = torch.Generator().manual_seed(1)
    for width, (is_sharded, is_sequence_slice) in itertools.product((6, 21, 1100), ((0, 0), (1, 0), (0, 1))):
        has_residual, probability = width == 6, 0.3
        streams, results = make_streams(1, 2), []
        x, residual, grad = (torch.randn(3, 2, width, generator=generator) for _ in range(3))
        for is_enabled in (False, True):
            set_kernel(is_enabled)
            leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
            out = streams.dropout(
                leaves[0],
                probability,
                training=True,
                is_sharded=bool(is_sharded),
                is_sequence_slice=bool(is_sequence_slice),
                residual=leaves[1] if has_residual else None,
                **DROPOUT_SITE,
            )
            out.backward(grad)
            results.append([out, *(leaf.grad for leaf in leaves[: 1 + has_residual])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (width, is_sharded, is_sequence_slice)
    for keys, is_sharded in ((5, False), (64, True)):
        streams, results = make_streams(1, 2), []
        x = torch.rand(2, 2, 3, keys, generator=generator)
        for is_enabled in (False, True):
            set_kernel(is_enabled)
            leaf = x.clone().requires_grad_()
            out = streams.attend(lambda drop: drop(leaf), 0.3, device=x.device, is_sharded=is_sharded, **DROPOUT_SITE)  # noqa: B023
            out.backward(x)
            results.append([out, leaf.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (keys, is_sharded)


def keys() -> None:
    """Masks of a key are those of every forward of the place, of none other, and drop as many as asked."""
    set_kernel(True)
    streams = DropoutStreams(3)
    ones = torch.ones(2, 2, 8192, requires_grad=True)

    def draw_mask(**changes: object) -> torch.Tensor:
        return streams.dropout(ones, 0.1, training=True, **{**DROPOUT_SITE, **changes}) != 0  # type: ignore[arg-type]

    first = draw_mask()
    assert abs((~first).float().mean() - 0.1) < 0.005 and torch.equal(first, draw_mask())
    (gradient,) = torch.autograd.grad(streams.dropout(ones, 0.1, training=True, **DROPOUT_SITE).sum(), ones)
    assert torch.equal(gradient != 0, first)
    assert torch.equal(gradient[first], torch.full_like(gradient[first], 1 / 0.9))
    for other in (draw_mask(layer=6), draw_mask(site="attention output")):
        assert abs((first == other).float().mean() - (0.9**2 + 0.1**2)) < 0.01
    streams.position = DropoutKey(0, 1)
    assert not torch.equal(first, draw_mask())


def operator() -> None:
    """In a graph the operator gives what the kernel gives outside of one, and so does its backward."""
    set_kernel(True)
    x = torch.randn(8, 2, 33).requires_grad_()
    streams = DropoutStreams(3)
    streams.position = DropoutKey(4, 2)
    expected = streams.dropout(x, 0.2, training=True, **DROPOUT_SITE)
    op_args = torch.tensor([4, 2]), torch.tensor(5), [3, 0, -1], "mlp output", 0.2, True
    actual, key = fused_dropout.keyed_dropout(x, *op_args)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, actual)]
    assert torch.equal(actual, expected) and torch.equal(*grads)
    assert int(key) == streams.key(5, "mlp output", False)
    assert torch.equal(actual, fused_dropout.run_kernel(x, None, Mask(int(key), 0.2)))
    torch.library.opcheck(fused_dropout.keyed_dropout, (x.detach(), *op_args))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
