"""Products that add the gradient of a weight to where it lies: the same gradients, no copy of them, hooks in time."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.models.common.transformer import GatedLinear
from megatron.mpu import layers
from megatron.mpu.groups import SINGLE
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from tds.bucket_reducer import AgreedOrder, BucketReducer
from tds.engine.weight_grad_store import WeightGradStore
from tds.linear_function import add_product, can_add_products, linear, percentage_of
from tds.param_info import ParamInfo, info_of, set_info
from tests.helpers.alive import LiveMemoryTracker

H, VOCAB_SIZE = 8, 11
NUM_TOKENS = 3000
"""Tokens whose products are made in several blocks, so that one which adds does not round as a product and a sum."""


class Net(nn.Module):
    """Layers with and without bias, one that two calls share, and a table for words and logits."""

    def __init__(self, h: int = H) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.words = nn.Embedding(VOCAB_SIZE, h)
        self.up = layers.ColumnParallelLinear(h, 2 * h)
        self.down = layers.RowParallelLinear(2 * h, h, bias=False)
        self.shared = layers.ColumnParallelLinear(h, h, bias=False)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).mul_(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.shared(self.words(tokens))))
        x = self.down(F.gelu(self.up(x)))
        return layers.aligned_linear(x, self.words.weight)


def build_net(dtype: torch.dtype = torch.float64, *, fuses: bool, h: int = H) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(h)
    return net, build_optimizer(net.parameters(), dtype=dtype, data=SINGLE, lr=1e-2, fuses_accumulation=fuses)


def make_tokens(micro_batch: int, num_tokens: int = 20) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(micro_batch))


def backward(
    net: Net, micro_batch: int, *, recomputes: bool = False, store: WeightGradStore | None = None, num_tokens: int = 20
) -> None:
    tokens = make_tokens(micro_batch, num_tokens)
    forward: Any = functools.partial(checkpoint, net, use_reentrant=False) if recomputes else net
    if store is None:
        forward(tokens).square().sum().backward()
        return
    with store.active():
        loss = forward(tokens).square().sum()
        with store.deferring((micro_batch, 0)):
            loss.backward()
    store.run((micro_batch, 0))


@pytest.mark.parametrize("recomputes", [False, True])
def test_fused_gradients_equal_autograd(recomputes: bool) -> None:
    (plain, plain_optimizer), (net, optimizer) = build_net(fuses=False), build_net(fuses=True)
    for micro_batch in range(3):
        for module in (plain, net):
            backward(module, micro_batch, recomputes=recomputes)
    for (name, expected), parameter in zip(plain.named_parameters(), net.parameters(), strict=True):
        grad = optimizer.gradient_of(parameter)
        torch.testing.assert_close(grad, plain_optimizer.gradient_of(expected), rtol=1e-13, atol=1e-13, msg=name)
        assert (parameter in optimizer.reducer.fused_params) == (grad.dim() == 2), name
    assert not plain_optimizer.reducer.fused_params


@pytest.mark.parametrize("recomputes", [False, True])
def test_fused_split_backward_equals_full_backward(recomputes: bool) -> None:
    (unsplit, unsplit_optimizer), (split, split_optimizer), store = (
        build_net(torch.float32, fuses=True),
        build_net(torch.float32, fuses=True),
        WeightGradStore(),
    )
    for net in (unsplit, split):
        net.words.weight.requires_grad_(False)  # else its lookup comes ahead of the product that is put off
    for micro_batch in range(3):
        backward(unsplit, micro_batch, recomputes=recomputes, num_tokens=NUM_TOKENS)
        backward(split, micro_batch, recomputes=recomputes, store=store, num_tokens=NUM_TOKENS)
    assert unsplit_optimizer.reducer.fused_params and len(unsplit_optimizer.reducer.fused_params) == len(
        split_optimizer.reducer.fused_params
    )
    for (name, expected_param), param in zip(unsplit.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(unsplit_optimizer.gradient_of(expected_param), split_optimizer.gradient_of(param)), name


def test_post_accumulate_hook_runs_once_after_all_products() -> None:
    """The sum over the replicas starts in such a hook: what it sees must be final."""
    net, optimizer = build_net(fuses=True)
    grads: dict[str, torch.Tensor] = {}
    for name, parameter in net.named_parameters():

        def record_grad(weight: torch.Tensor, name: str = name) -> None:
            assert name not in grads
            grads[name] = weight.grad.clone()

        parameter.register_post_accumulate_grad_hook(record_grad)
    backward(net, 0)
    assert grads.keys() == dict(net.named_parameters()).keys()
    for name, parameter in net.named_parameters():
        assert torch.equal(grads[name], optimizer.gradient_of(parameter)), name


def test_first_reduced_backward_reaches_all_fused_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused weights are in autograd's graph: buckets with them do not go last."""
    net, optimizer = build_net(fuses=True)
    order, events = AgreedOrder(None), []  # type: ignore[arg-type, var-annotated]
    monkeypatch.setattr(order, "_agree", lambda sort_keys: events.append(sort_keys) or setattr(order, "_agreed", 1))
    for parameter in net.parameters():
        order.register(parameter)
    reducer = BucketReducer(order, optimizer.gradient_of, None)
    monkeypatch.setattr(reducer, "_start", lambda ready_buckets: events.extend(ready_buckets))
    with reducer.last_backward():
        backward(net, 0)
    sort_keys, *buckets = events
    assert sort_keys == [0] * len(sort_keys) and sum(map(len, buckets)) == len(list(net.parameters()))


def test_fusion_allocates_no_separate_weight_gradient() -> None:
    """Of [128, 64]: the first micro-batch makes the place, later ones nothing of that size."""
    peak_bytes: dict[bool, int] = {}
    for fuses in (False, True):
        net, optimizer = build_net(torch.float32, fuses=fuses, h=64)
        largest = net.up.weight.nbytes
        for _ in range(2):
            loss = net.up(torch.ones(4, 64)).square().sum()
            with LiveMemoryTracker("cpu") as alive:
                loss.backward()
        peak_bytes[fuses] = alive.peak_bytes
        assert optimizer.gradient_of(net.up.weight).abs().sum() > 0
    assert peak_bytes[True] <= 1.2 * largest, "the gradient where it lies, which the product returns, and activations"
    assert peak_bytes[False] >= 2 * largest


def test_gate_and_value_use_one_fused_product() -> None:
    outputs, gradients = [], []
    for fuses in (False, True):
        layer = GatedLinear(H, 2 * H)
        layer.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        layer.bias.data.normal_(generator=torch.Generator().manual_seed(2))
        optimizer = build_optimizer(layer.parameters(), dtype=torch.float64, data=SINGLE, fuses_accumulation=fuses)
        x = torch.linspace(-1, 1, 3 * H, dtype=torch.float64).view(3, H).requires_grad_()
        gate, value = layer(x)
        (gate.sin() * value).sum().backward()
        assert (
            gate.is_contiguous() and value.is_contiguous() and (layer.weight in optimizer.reducer.fused_params) == fuses
        )
        outputs.append((gate, value))
        gradients.append([x.grad, *(optimizer.gradient_of(parameter) for parameter in layer.parameters())])
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("case", ["frozen", "no leaf", "other type", "no gradients", "autocast", "not fused", "fused"])
@pytest.mark.parametrize("defers", [False, True])
def test_unsupported_products_fall_back_to_torch(case: str, defers: bool) -> None:
    """A product that is not to be fused can still be deferred."""
    weight = nn.Parameter(torch.ones(3, 4), requires_grad=case != "frozen")
    table = weight * 2 if case == "no leaf" else weight
    set_info(table, ParamInfo(add_product=lambda rows, inputs: None))
    x = torch.ones(2, 4, dtype=torch.bfloat16 if case == "other type" else torch.float32, requires_grad=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast")
    with (
        autocast,
        torch.set_grad_enabled(case != "no gradients"),
        WeightGradStore().active() if defers else nullcontext(),
    ):
        if case == "other type":
            with pytest.raises(RuntimeError, match="dtype"):
                linear(x, table)
            return
        y = linear(x, table, fuse=case != "not fused")
    grad_fn_name = "" if y.grad_fn is None else y.grad_fn.name()
    assert (grad_fn_name == "_LinearBackward") == (case == "fused" and not defers)
    assert ("_SplitLinear" in grad_fn_name) == (case in ("fused", "not fused") and defers)


def test_layers_do_not_call_patched_functional_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only users' layers are reached by replacing it; a product that is split calls torch's own."""
    layer, store = layers.ColumnParallelLinear(H, H), WeightGradStore()
    x = torch.ones(2, H, requires_grad=True)
    with store.active():
        monkeypatch.setattr(F, "linear", None)
        y = layer(x)
        monkeypatch.undo()
    with store.deferring((0, 0)):
        y.sum().backward()
    assert store.split_leaves == {layer.weight, layer.bias}


def test_16_bit_fusion_requires_wider_accumulation() -> None:
    net, optimizer = build_net(torch.bfloat16, fuses=True)
    assert info_of(net.up.weight).add_product is None
    backward(net, 0)
    assert not optimizer.reducer.fused_params and optimizer.gradient_of(net.up.weight).abs().sum() > 0
    assert not can_add_products(torch.empty(2, 2, dtype=torch.bfloat16, device="meta"), torch.float32)
    assert can_add_products(torch.empty(2, 2), torch.float32) and not can_add_products(torch.empty(2), torch.float32)


def test_fusion_rejects_zero_2() -> None:
    with pytest.raises(ValueError, match="--gradient-accumulation-fusion requires --zero-stage 0 or 1, got 2"):
        build_optimizer(Net().parameters(), data=SINGLE, zero_stage=2, fuses_accumulation=True)


def test_add_product_requests_fp32_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA has it; untried there."""
    requested_dtypes: list[Any] = []

    def addmm(buffer: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int, out: Any, out_dtype: Any) -> None:
        requested_dtypes.append(out_dtype)
        out.copy_(beta * buffer + a.float() @ b.float())

    monkeypatch.setattr(torch, "addmm", addmm)
    buffer = torch.full((3, 4), torch.nan)
    add_product(buffer.zero_(), torch.ones(3, 2).bfloat16(), torch.ones(2, 4).bfloat16(), is_first=True)
    add_product(buffer, torch.ones(3, 2).bfloat16(), torch.ones(2, 4).bfloat16(), is_first=False)
    assert requested_dtypes == [torch.float32] * 2 and buffer.eq(4).all()


def test_first_product_overwrites_buffer() -> None:
    for shape in ((3, 4), (2, 3, 4)):
        buffer = torch.full(shape, torch.nan)
        a, b = torch.ones(*shape[:-1], 2), torch.ones(*shape[:-2], 2, 4)
        add_product(buffer, a, b, is_first=True)
        add_product(buffer, a, b, is_first=False)
        assert buffer.eq(4).all()


def test_fused_share_counts_trainable_weights_and_names_largest_others() -> None:
    numels = dict(zip("abcdefg", (60, 10, 9, 8, 7, 6, 50), strict=True))
    parameters = {name: nn.Parameter(torch.ones(numel), requires_grad=name != "g") for name, numel in numels.items()}
    assert percentage_of({parameters["a"]}, parameters) == ("60.0", "b, c, d, e and 1 more")
    assert percentage_of(set(parameters.values()), parameters) == ("100.0", "")
