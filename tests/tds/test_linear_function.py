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
from tds.linear_function import add_product, can_add_products, linear, share_of
from tds.param_info import ParamInfo, info_of, set_info
from tests.helpers.alive import Alive

H, WORDS = 8, 11
MANY = 3000
"""Tokens whose products are made in several blocks, so that one which adds does not round as a product and a sum."""


class Net(nn.Module):
    """Layers with and without bias, one that two calls share, and a table for words and logits."""

    def __init__(self, h: int = H) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.words = nn.Embedding(WORDS, h)
        self.up = layers.ColumnParallelLinear(h, 2 * h)
        self.down = layers.RowParallelLinear(2 * h, h, bias=False)
        self.shared = layers.ColumnParallelLinear(h, h, bias=False)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator).mul_(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.shared(self.words(tokens))))
        x = self.down(F.gelu(self.up(x)))
        return layers.aligned_linear(x, self.words.weight)


def made(dtype: torch.dtype = torch.float64, *, fuses: bool, h: int = H) -> tuple[Net, MixedPrecisionOptimizer]:
    net = Net(h)
    return net, build_optimizer(net.parameters(), dtype=dtype, data=SINGLE, lr=1e-2, fuses_accumulation=fuses)


def tokens_of(micro_batch: int, number: int = 20) -> torch.Tensor:
    return torch.randint(WORDS, (number,), generator=torch.Generator().manual_seed(micro_batch))


def backward(
    net: Net, micro_batch: int, *, recomputes: bool = False, splitter: WeightGradStore | None = None, number: int = 20
) -> None:
    tokens = tokens_of(micro_batch, number)
    run: Any = functools.partial(checkpoint, net, use_reentrant=False) if recomputes else net
    if splitter is None:
        run(tokens).square().sum().backward()
        return
    with splitter.active():
        loss = run(tokens).square().sum()
        with splitter.deferring((micro_batch, 0)):
            loss.backward()
    splitter.run((micro_batch, 0))


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_are_those_of_autograd(recomputes: bool) -> None:
    (plain, a), (net, b) = made(fuses=False), made(fuses=True)
    for micro_batch in range(3):
        for each in (plain, net):
            backward(each, micro_batch, recomputes=recomputes)
    for (name, wanted), parameter in zip(plain.named_parameters(), net.parameters(), strict=True):
        found = b.gradient_of(parameter)
        torch.testing.assert_close(found, a.gradient_of(wanted), rtol=1e-13, atol=1e-13, msg=name)
        assert (parameter in b.reducer.fused_params) == (found.dim() == 2), name
    assert not a.reducer.fused_params


@pytest.mark.parametrize("recomputes", [False, True])
def test_halves_of_a_backward_have_the_same_bits(recomputes: bool) -> None:
    (whole, a), (split, b), splitter = (
        made(torch.float32, fuses=True),
        made(torch.float32, fuses=True),
        WeightGradStore(),
    )
    for net in (whole, split):
        net.words.weight.requires_grad_(False)  # else its lookup comes ahead of the product that is put off
    for micro_batch in range(3):
        backward(whole, micro_batch, recomputes=recomputes, number=MANY)
        backward(split, micro_batch, recomputes=recomputes, splitter=splitter, number=MANY)
    assert a.reducer.fused_params and len(a.reducer.fused_params) == len(b.reducer.fused_params)
    for (name, one), two in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(a.gradient_of(one), b.gradient_of(two)), name


def test_hooks_run_once_behind_all_products_of_a_weight() -> None:
    """The sum over the replicas starts in such a hook: what it sees must be final."""
    net, optimizer = made(fuses=True)
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in net.named_parameters():

        def final(weight: torch.Tensor, name: str = name) -> None:
            assert name not in seen
            seen[name] = weight.grad.clone()

        parameter.register_post_accumulate_grad_hook(final)
    backward(net, 0)
    assert seen.keys() == dict(net.named_parameters()).keys()
    for name, parameter in net.named_parameters():
        assert torch.equal(seen[name], optimizer.gradient_of(parameter)), name


def test_the_first_backward_that_sums_gradients_knows_which_it_will_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused weights are in autograd's graph: buckets with them do not go last."""
    net, optimizer = made(fuses=True)
    order, started = AgreedOrder(None), []  # type: ignore[arg-type, var-annotated]
    monkeypatch.setattr(order, "_agree", lambda turns: started.append(turns) or setattr(order, "_agreed", 1))
    for parameter in net.parameters():
        order.register(parameter)
    reducer = BucketReducer(order, optimizer.gradient_of, None)
    monkeypatch.setattr(reducer, "_start", lambda ready: started.extend(ready))
    with reducer.last_backward():
        backward(net, 0)
    turns, *buckets = started
    assert turns == [0] * len(turns) and sum(map(len, buckets)) == len(list(net.parameters()))


def test_no_gradient_of_a_weight_is_made_apart() -> None:
    """Of [128, 64]: the first micro-batch makes the place, later ones nothing of that size."""
    most: dict[bool, int] = {}
    for fuses in (False, True):
        net, optimizer = made(torch.float32, fuses=fuses, h=64)
        largest = net.up.weight.nbytes
        for _ in range(2):
            loss = net.up(torch.ones(4, 64)).square().sum()
            with Alive("cpu") as alive:
                loss.backward()
        most[fuses] = alive.peak
        assert optimizer.gradient_of(net.up.weight).abs().sum() > 0
    assert most[True] <= 1.2 * largest, "the gradient where it lies, which the product returns, and activations"
    assert most[False] >= 2 * largest


def test_gate_and_value_are_one_product_of_their_weight() -> None:
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
        gradients.append([x.grad, *(optimizer.gradient_of(each) for each in layer.parameters())])
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("case", ["frozen", "no leaf", "other type", "no gradients", "autocast", "not fused", "fused"])
@pytest.mark.parametrize("defers", [False, True])
def test_what_is_no_plain_product_of_a_leaf_is_left_to_torch(case: str, defers: bool) -> None:
    """A product that is not to be fused can still be deferred."""
    weight = nn.Parameter(torch.ones(3, 4), requires_grad=case != "frozen")
    table = weight * 2 if case == "no leaf" else weight
    set_info(table, ParamInfo(add_product=lambda rows, inputs: None))
    x = torch.ones(2, 4, dtype=torch.bfloat16 if case == "other type" else torch.float32, requires_grad=True)
    autocasts = torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast")
    with (
        autocasts,
        torch.set_grad_enabled(case != "no gradients"),
        WeightGradStore().active() if defers else nullcontext(),
    ):
        if case == "other type":
            with pytest.raises(RuntimeError, match="dtype"):
                linear(x, table)
            return
        y = linear(x, table, fuse=case != "not fused")
    kind = "" if y.grad_fn is None else y.grad_fn.name()
    assert ("_FusedLinear" in kind) == (case == "fused" and not defers)
    assert ("_SplitLinear" in kind) == (case in ("fused", "not fused") and defers)


def test_our_layers_do_not_depend_on_the_name_in_torchs_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only users' layers are reached by replacing it; a product that is split calls torch's own."""
    layer, store = layers.ColumnParallelLinear(H, H), WeightGradStore()
    x = torch.ones(2, H, requires_grad=True)
    with store.active():
        monkeypatch.setattr(F, "linear", None)
        y = layer(x)
        monkeypatch.undo()
    with store.deferring((0, 0)):
        y.sum().backward()
    assert store.split == {layer.weight, layer.bias}


def test_16_bits_are_fused_where_a_product_has_a_wider_sum() -> None:
    net, optimizer = made(torch.bfloat16, fuses=True)
    assert info_of(net.up.weight).add_product is None
    backward(net, 0)
    assert not optimizer.reducer.fused_params and optimizer.gradient_of(net.up.weight).abs().sum() > 0
    assert not can_add_products(torch.empty(2, 2, dtype=torch.bfloat16, device="meta"), torch.float32)
    assert can_add_products(torch.empty(2, 2), torch.float32) and not can_add_products(torch.empty(2), torch.float32)


def test_zero_2_has_no_whole_gradients_to_add_to() -> None:
    with pytest.raises(ValueError, match="--gradient-accumulation-fusion requires --zero-stage 0 or 1, got 2"):
        build_optimizer(Net().parameters(), data=SINGLE, zero_stage=2, fuses_accumulation=True)


def test_a_wider_sum_is_asked_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA has it; untried there."""
    asked: list[Any] = []

    def addmm(place: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int, out: Any, out_dtype: Any) -> None:
        asked.append(out_dtype)
        out.copy_(beta * place + a.float() @ b.float())

    monkeypatch.setattr(torch, "addmm", addmm)
    place = torch.full((3, 4), torch.nan)
    add_product(place.zero_(), torch.ones(3, 2).bfloat16(), torch.ones(2, 4).bfloat16(), is_first=True)
    add_product(place, torch.ones(3, 2).bfloat16(), torch.ones(2, 4).bfloat16(), is_first=False)
    assert asked == [torch.float32] * 2 and place.eq(4).all()


def test_the_first_product_writes_over_whatever_is_there() -> None:
    for shape in ((3, 4), (2, 3, 4)):
        place = torch.full(shape, torch.nan)
        a, b = torch.ones(*shape[:-1], 2), torch.ones(*shape[:-2], 2, 4)
        add_product(place, a, b, is_first=True)
        add_product(place, a, b, is_first=False)
        assert place.eq(4).all()


def test_the_share_counts_trained_numbers_and_names_the_largest_others() -> None:
    sizes = dict(zip("abcdefg", (60, 10, 9, 8, 7, 6, 50), strict=True))
    parameters = {name: nn.Parameter(torch.ones(size), requires_grad=name != "g") for name, size in sizes.items()}
    assert share_of({parameters["a"]}, parameters) == ("60.0", "b, c, d, e and 1 more")
    assert share_of(set(parameters.values()), parameters) == ("100.0", "")
