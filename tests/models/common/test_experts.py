"""A layer of experts against a loop over tokens in fp64; ties, empty experts, capacity, balance, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models.common.experts import MoE
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.router import Router, Routers
from megatron.models.common.transformer import MLP
from megatron.mpu.groups import single_grid
from megatron.mpu.random import checkpoint
from megatron.ops import grouped
from megatron.ops.grouped import GROUPED, LOOP, grouped_linear
from tds.engine.weight_grad_store import WeightGradStore

S, B, H, E = 7, 3, 10, 6
SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": H, "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 16,
    "kv_hidden_size": 5, "ff_hidden_size": 8, "hidden_bias": False, "num_experts": E, "moe_ffn_hidden_size": 8,
}  # fmt: skip
BALANCED = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}
SIGMOID = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {**BALANCED},
    "pre-softmax, one expert": {"moe_router_topk": 1, "moe_router_pre_softmax": True, **BALANCED},
    "sigmoid": {**SIGMOID, **BALANCED, "activation": "gated-silu"},
    "sigmoid, one expert": {**SIGMOID, "moe_router_topk": 1},
    "groups": {**SIGMOID, "moe_router_topk": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 2},
    "shared": {"moe_shared_expert_intermediate_size": 6, "activation": "gated-gelu"},
    "shared with gate": {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True},
    "capacity by weight": {"moe_expert_capacity_factor": 0.7, "activation": "gated-silu", **BALANCED},
    "capacity by position": {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"},
}


def layer(**settings: Any) -> MoE:
    """Return a layer in fp64 whose router is far from even and whose bias changes choices."""
    moe = MoE(ModelArgs(**{**SIZES, **settings}), ParallelContext(), MLP).double()
    initialize(moe.named_parameters(), seed=3, rule=gpt2_rule(0.5, 1))
    if moe.router.expert_bias is not None:
        moe.router.expert_bias.data.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0, 0.25, -0.3]))
    moe.router.tokens_per_expert.copy_(torch.tensor([5, 1, 0, 9, 3, 2]))
    return moe


def hidden(seed: int = 0) -> torch.Tensor:
    """Return hidden states [S, B, H]."""
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def applied(expert: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what one feed-forward half makes of one token."""
    up, down = expert.up.weight, expert.down.weight
    if expert.is_gated:
        return down @ (expert.activation(up[0::2] @ x) * (up[1::2] @ x))
    return down @ expert.activation(up @ x)


def weights_of(moe: MoE, x: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return expert -> weight of one token, and its share of the losses."""
    sizes, router = moe.sizes, moe.router
    logits = router.weight @ x
    is_sigmoid = sizes.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits
    wanted = scores.tolist()
    if router.expert_bias is not None:
        wanted = [score + bias for score, bias in zip(wanted, router.expert_bias.tolist(), strict=True)]
    allowed = set(range(E))
    if groups := sizes.moe_router_num_groups:
        size, best = E // groups, sizes.moe_router_topk // sizes.moe_router_group_topk
        sums = {g: sum(sorted(wanted[g * size : (g + 1) * size])[-best:]) for g in range(groups)}
        kept = sorted(sums, key=lambda g: (-sums[g], g))[: sizes.moe_router_group_topk]
        allowed = {e for g in kept for e in range(g * size, (g + 1) * size)}
    chosen = sorted(allowed, key=lambda e: (-wanted[e], e))[: sizes.moe_router_topk]
    if is_sigmoid:
        total = sum(scores[e] for e in chosen) + 1e-20 if len(chosen) > 1 else 1.0
        found = {e: scores[e] / total for e in chosen}
        shares = scores / scores.sum()
    else:
        among = range(E) if sizes.moe_router_pre_softmax else chosen
        total = sum(logits[e].exp() for e in among)
        found = {e: logits[e].exp() / total for e in chosen}
        shares = logits.exp() / logits.exp().sum()
    before = router.tokens_per_expert.double()
    loss = sizes.moe_aux_loss_coeff * E * (before / before.sum() * shares).sum()
    loss = loss + sizes.moe_z_loss_coeff * logits.exp().sum().log() ** 2
    return {e: w * sizes.moe_router_topk_scaling_factor for e, w in found.items()}, loss


def by_token(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return what the layer makes of ``x``, token by token, the sum of the losses of its router, and its choices.

    These are those of each expert, and behind them how many of all were dropped.
    """
    sizes, out, losses, choices = moe.sizes, torch.zeros_like(x), [], [0] * (E + 1)
    for b in range(x.shape[1]):
        each = [weights_of(moe, x[s, b]) for s in range(len(x))]
        losses += [loss for _, loss in each]
        dropped = set()
        if sizes.moe_expert_capacity_factor:
            places = math.ceil(sizes.moe_expert_capacity_factor * len(x) * sizes.moe_router_topk / E)
            for e in range(E):
                takers = [s for s in range(len(x)) if e in each[s][0]]
                if sizes.moe_token_drop_policy == "probs":
                    takers.sort(key=lambda s: (-float(each[s][0][e]), s))
                dropped |= {(s, e) for s in takers[places:]}
            assert dropped, "the case drops some"
        choices[E] += len(dropped)
        for s in range(len(x)):
            for e in each[s][0]:
                choices[e] += 1
            kept = [(e, w) for e, w in each[s][0].items() if (s, e) not in dropped]
            row = sum((w * applied(getattr(moe.experts, str(e)), x[s, b]) for e, w in kept), torch.zeros_like(x[s, b]))
            if moe.shared_expert is not None:
                gate = 1.0 if moe.shared_expert_gate is None else (moe.shared_expert_gate.weight @ x[s, b]).sigmoid()
                row = row + gate * applied(moe.shared_expert, x[s, b])
            out = out.index_put((torch.tensor(s), torch.tensor(b)), row)
    return out, sum(losses), choices


def gradients(moe: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input": x.grad, **{name: p.grad for name, p in moe.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_a_loop_over_tokens(kind: str) -> None:
    """Outputs, losses, what was counted, and the gradients of the input and of every weight."""
    moe, x, scale = layer(**KINDS[kind]), hidden().requires_grad_(), 0.25
    moe.router.gradient_scale = scale
    out = moe(x)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    (out * weight).sum().backward()
    found = gradients(moe, x)
    moe.zero_grad()
    other = hidden().requires_grad_()
    wanted, loss, choices = by_token(moe, other)
    ((wanted * weight).sum() + scale * loss).backward()
    assert (out - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    expected = gradients(moe, other)
    for name, gradient in expected.items():
        gradient = torch.zeros_like(found[name]) if gradient is None else gradient
        assert (found[name] - gradient).abs().max() <= 1e-12 * max(gradient.abs().max(), 1.0), name
    assert float(moe.router.sums.sum()) == pytest.approx(float(loss), rel=1e-12)
    assert [*moe.router.counts.tolist(), *moe.router.dropped.tolist()] == choices


def test_equal_scores_go_to_the_lower_numbers_and_the_others_get_no_token() -> None:
    moe, x = layer(), hidden().requires_grad_()
    moe.router.weight.data.zero_()
    weights, experts = moe.router(x)
    assert experts.eq(torch.tensor([0, 1])).all() and weights.eq(0.5).all()
    assert moe.router.counts.tolist() == [S * B, S * B, 0, 0, 0, 0]
    moe(x).sum().backward()
    for number, expert in moe.experts.named_children():
        assert (expert.up.weight.grad.abs().sum() > 0) == (int(number) < 2)  # zeros, and not nothing


def test_all_tokens_may_go_to_one_expert() -> None:
    moe, x = layer(moe_router_topk=1, moe_router_pre_softmax=True), hidden()
    moe.router.weight.data.zero_()
    moe.router.weight.data[4] = 50.0
    x = x.abs()
    wanted = torch.stack([torch.stack([applied(getattr(moe.experts, "4"), each) for each in row]) for row in x])
    assert (moe(x) - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_recompute_and_evaluation_count_no_token() -> None:
    moe, x = layer(**KINDS["capacity by weight"]), hidden().requires_grad_()
    moe(x)
    dropped = int(moe.router.dropped)
    moe.router.clear()
    assert dropped and not moe.router.dropped
    out = checkpoint(ParallelContext().streams, moe, x)
    out.sum().backward()
    assert moe.router.counts.sum() == S * B * 2 and moe.router.dropped == dropped
    moe.eval()
    moe(x)
    assert moe.router.counts.sum() == S * B * 2 and moe.router.dropped == dropped


def test_layers_are_in_the_order_of_their_numbers() -> None:
    """Of the whole model, whatever is before the number; a router that is alone in no layer keeps its name."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict() for _ in range(12)])})
    for number in (2, 10, 11):
        model["layers"][number]["mlp"] = layer()  # type: ignore[index]
    routers = Routers(model, single_grid())
    assert routers.layers == ("layers.2", "layers.10", "layers.11")
    model["layers"][10]["other"] = layer()  # type: ignore[index]
    assert Routers(model, single_grid()).layers[1:3] == ("layers.10.mlp.router", "layers.10.other.router")


def test_capacity_is_that_of_a_sample_whatever_the_micro_batch() -> None:
    for kind in ("capacity by weight", "capacity by position"):
        moe, x = layer(**KINDS[kind]), hidden()
        alone = torch.cat([moe(x[:, b : b + 1]) for b in range(B)], dim=1)
        assert (moe(x) - alone).abs().max() <= 1e-12 * alone.abs().max()


def test_a_step_moves_the_bias_by_the_sign_of_what_an_expert_lacks() -> None:
    router = layer(**SIGMOID).router
    router.expert_bias.data = torch.zeros(E)  # type: ignore[union-attr]
    router.take(torch.tensor([4, 8, 8, 8, 20, 0]))
    assert router.expert_bias.tolist() == pytest.approx([1e-3, 0.0, 0.0, 0.0, -1e-3, 1e-3])  # type: ignore[union-attr]
    assert router.tokens_per_expert.tolist() == [4, 8, 8, 8, 20, 0]


def test_the_first_step_takes_even_shares() -> None:
    router = Router(ModelArgs(**{**SIZES, **BALANCED}), ParallelContext()).double()
    assert router._fractions(hidden()).tolist() == pytest.approx([1 / E] * E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_the_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own, with experts that have no row at the start, within and at the end."""
    made = {}
    for way in (LOOP, GROUPED):
        monkeypatch.setattr(grouped, "WAY", way)
        torch.manual_seed(0)
        x = torch.randn(19, 16, dtype=dtype, requires_grad=True)
        weights = [torch.randn(24, 16, dtype=dtype, requires_grad=True) for _ in range(5)]
        y = grouped_linear(x, weights, torch.tensor([0, 7, 0, 12, 0]))
        (y * torch.arange(24)).sum().backward()
        made[way] = [y, x.grad, *[weight.grad for weight in weights]]
    for one, other in zip(made[LOOP], made[GROUPED], strict=True):
        assert (one - other).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-2) * max(one.abs().max(), 1.0)


WRONG = "--num-experts 6 --moe-router-topk 7 --moe-layer-freq [1,0] --hidden-bias --moe-shared-expert-gate"


def test_what_cannot_be_is_refused_together() -> None:
    words = f"--num-layers 4 {WRONG} --moe-router-enable-expert-bias --moe-router-num-groups 4 --compile".split()
    with pytest.raises(ConfigError) as raised:
        parse([*words, "--data-path", "none"], world_size=1)
    for said in (
        "--moe-router-topk must not exceed --num-experts, got 7 and 6",
        "--moe-layer-freq must be a number of at least 1, or a list with 1 or 0 for each of the 4 layers",
        "experts have no biases", "--moe-shared-expert-gate has no effect",
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
        "--moe-router-num-groups and --moe-router-group-topk must be set", "--compile supports dense layers only",
    ):  # fmt: skip
        assert said in str(raised.value)


def test_layouts_that_cannot_be_are_refused_together() -> None:
    words = "--num-experts 6 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --zero-stage 2".split()
    words += "--model-parallel-size 2 --moe-ffn-hidden-size 9 --batch-size 1 --data-path none".split()
    with pytest.raises(ConfigError) as raised:
        parse(words, world_size=4)
    for said in (
        "--expert-model-parallel-size must divide --num-experts, got 4 and 6. Use one of [1, 2, 3, 6]",
        "--expert-model-parallel-size must divide the data x context ranks, got 4 and 2. Use one of [1, 2]",
        "--expert-model-parallel-size 4 needs --zero-stage 0 or 1, got 2",
        "--expert-tensor-parallel-size 1 with --model-parallel-size 2 needs --sequence-parallel",
        "--moe-ffn-hidden-size must be a multiple of --model-parallel-size, got 9 and 2",
    ):  # fmt: skip
        assert said in str(raised.value)


def test_flags_of_other_kinds_of_experts_are_refused_with_experts_alone() -> None:
    words = ["--data-path", "none", "--moe-loss-coeff", "0.01", "--moe-train-capacity-factor", "1.5"]
    dense = parse([*words, "--num-experts", "1", "--moe-router-topk", "3"], world_size=1)
    assert dense.model.num_experts == 0 and dense.model == parse(["--data-path", "none"], world_size=1).model
    with pytest.raises(
        ConfigError, match="not supported with --num-experts, .*: --moe-loss-coeff, --moe-train-capacity-factor"
    ):
        parse([*words, "--num-experts", "4"], world_size=1)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_experts_wait_for_their_turn_to_the_bit(recompute: bool) -> None:
    """Under a schedule that splits backwards; two micro-batches wait at a time."""
    whole, split = layer(), layer()
    x, keys = [hidden(seed) for seed in (0, 1)], [(0, 0), (1, 0)]
    for each in x:
        given = each.clone().requires_grad_()
        (checkpoint(ParallelContext().streams, whole, given) if recompute else whole(given)).square().sum().backward()
    forwards: list[tuple[int, int] | None] = [None]
    store = WeightGradStore(split, lambda: forwards[0])
    for key, each in zip(keys, x, strict=True):
        given = each.clone().requires_grad_()
        with store.active():
            forwards[0] = key
            loss = (checkpoint(ParallelContext().streams, split, given) if recompute else split(given)).square().sum()
            forwards[0] = None
            with store.deferring(key):
                store.backward([loss], [None], [given])
    experts = [parameter for name, parameter in split.named_parameters() if name.startswith("experts.")]
    assert all(parameter.grad is None for parameter in experts) and set(experts) <= store.waiting((1, 0))
    for key in keys:
        store.run(key)
    for (name, wanted), got in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert wanted.grad is not None and got.grad is not None and torch.equal(wanted.grad, got.grad), name
    assert not split.experts.delay_wgrad and "all its weights" in store.describe_split(dict(split.named_parameters()))


def test_experts_called_twice_in_a_micro_batch_leave_the_gradients_of_both_calls() -> None:
    """Such as a layer that is shared: ``backward_dw`` runs once for each forward, and each adds another gradient."""
    whole, split = layer(), layer()
    whole(whole(hidden().requires_grad_())).square().sum().backward()
    store = WeightGradStore(split, lambda: (0, 0))
    x = hidden().requires_grad_()
    with store.active():
        loss = split(split(x)).square().sum()
    with store.deferring((0, 0)):
        store.backward([loss], [None], [x])
    store.run((0, 0))
    for (name, wanted), got in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert (got.grad - wanted.grad).abs().max() <= 1e-12 * wanted.grad.abs().max(), name
    assert not split.experts._delayed
