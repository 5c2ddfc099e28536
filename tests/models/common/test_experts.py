"""A layer of experts against a loop over tokens in fp64; ties, empty experts, capacity, balance, what is refused."""

from __future__ import annotations

import io
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models.common.experts import MoE, stack_expert_weights
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.router import Router, Routers, capacity_mask, sinkhorn
from megatron.models.common.transformer import MLP
from megatron.mpu.groups import single_grid
from megatron.mpu.random import DropoutKey, checkpoint
from megatron.ops import grouped, stacked_weights
from megatron.ops.grouped import GROUPED, LOOP, grouped_linear
from tds.engine.weight_grad_store import WeightGradStore

S, B, H, E = 7, 3, 10, 6
MODEL_FIELDS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": H, "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 16,
    "kv_hidden_size": 5, "ff_hidden_size": 8, "hidden_bias": False, "num_experts": E, "moe_ffn_hidden_size": 8,
}  # fmt: skip
BALANCED = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}
SIGMOID = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {**BALANCED},
    "pre-softmax, one expert": {"moe_router_topk": 1, "moe_router_pre_softmax": True, **BALANCED},
    "sigmoid": {**SIGMOID, **BALANCED, "activation": "gated-silu"},
    "sigmoid, one expert": {**SIGMOID, "moe_router_topk": 1},
    "groups": {**SIGMOID, "moe_router_topk": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 2},
    "groups by best score": {
        "moe_router_pre_softmax": True,
        "moe_router_topk": 4,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "moe_router_group_score_topk": 1,
        **BALANCED,
    },
    "softmax with bias": {"moe_router_enable_expert_bias": True, **BALANCED},
    "shared": {"moe_shared_expert_intermediate_size": 6, "activation": "gated-gelu"},
    "shared with gate": {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True},
    "residual": {"moe_use_residual": True, "moe_router_topk": 1, "moe_router_pre_softmax": True, **BALANCED},
    "residual, capacity": {"moe_use_residual": True, "hidden_bias": True, "moe_expert_capacity_factor": 0.7},
    "capacity by weight": {"moe_expert_capacity_factor": 0.7, "activation": "gated-silu", **BALANCED},
    "capacity by position": {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"},
    "biases": {"hidden_bias": True, "moe_shared_expert_intermediate_size": 6, **BALANCED},
    "biases, clamped": {
        "hidden_bias": True, "activation": "gated-quick-gelu", "activation_func_clamp_value": 0.4,
        "glu_linear_offset": 1.0, "moe_expert_capacity_factor": 0.7,
    },
}  # fmt: skip


def make_layer(**settings: Any) -> MoE:
    """Return a layer in fp64 whose router is far from even and whose bias changes choices."""
    moe = MoE(ModelArgs(**{**MODEL_FIELDS, **settings}), ParallelContext(), MLP).double()
    initialize(moe.named_parameters(), seed=3, rule=gpt2_rule(0.5, 1))
    if moe.router.expert_bias is not None:
        moe.router.expert_bias.data.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0, 0.25, -0.3]))
    moe.router.tokens_per_expert.copy_(torch.tensor([5, 1, 0, 9, 3, 2]))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in moe.named_parameters():
        if name.endswith(".bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return moe


def make_hidden(seed: int = 0) -> torch.Tensor:
    """Return hidden states [S, B, H]."""
    return torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def apply_expert(expert: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what one feed-forward half makes of one token."""
    up, down = expert.up.weight @ x, expert.down.weight
    up = up if expert.up.bias is None else up + expert.up.bias
    output = down @ (expert.gate(up[0::2], up[1::2], False) if expert.is_gated else expert.activation(up))
    return output if expert.down.bias is None else output + expert.down.bias


def route_token(moe: MoE, x: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return expert -> weight of one token, and its share of the losses."""
    args, router = moe.model_args, moe.router
    logits = router.weight @ x + (0.0 if router.bias is None else router.bias)
    is_sigmoid = args.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits
    selection_scores = scores.tolist()
    if router.expert_bias is not None and not is_sigmoid:
        selection_scores = logits.softmax(0).tolist()
    if router.expert_bias is not None:
        selection_scores = [
            score + bias for score, bias in zip(selection_scores, router.expert_bias.tolist(), strict=True)
        ]
    allowed = set(range(E))
    if num_groups := args.moe_router_num_groups:
        group_size = E // num_groups
        best = args.moe_router_group_score_topk or args.moe_router_topk // args.moe_router_group_topk
        group_scores = {
            g: sum(sorted(selection_scores[g * group_size : (g + 1) * group_size])[-best:]) for g in range(num_groups)
        }
        best_groups = sorted(group_scores, key=lambda g: (-group_scores[g], g))[: args.moe_router_group_topk]
        allowed = {e for g in best_groups for e in range(g * group_size, (g + 1) * group_size)}
    chosen = sorted(allowed, key=lambda e: (-selection_scores[e], e))[: args.moe_router_topk]
    if is_sigmoid:
        total = sum(scores[e] for e in chosen) + 1e-20 if len(chosen) > 1 else 1.0
        weights = {e: scores[e] / total for e in chosen}
        shares = scores / scores.sum()
    else:
        normalized_over = range(E) if args.moe_router_pre_softmax else chosen
        total = sum(logits[e].exp() for e in normalized_over)
        weights = {e: logits[e].exp() / total for e in chosen}
        shares = logits.exp() / logits.exp().sum()
    token_counts = router.tokens_per_expert.double()
    loss = args.moe_aux_loss_coeff * E * (token_counts / token_counts.sum() * shares).sum()
    loss = loss + args.moe_z_loss_coeff * logits.exp().sum().log() ** 2
    return {e: w * args.moe_router_topk_scaling_factor for e, w in weights.items()}, loss


def weights_of_sum(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Return the weights of the routed experts' sum and of the shared expert's output for one token."""
    if moe.coefficient is not None:
        routed, shared = (moe.coefficient.weight @ x + moe.coefficient.bias).exp()
        return routed / (routed + shared), shared / (routed + shared)
    return 1.0, 1.0 if moe.shared_expert_gate is None else (moe.shared_expert_gate.weight @ x).sigmoid()


def run_by_token(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return what the layer makes of ``x``, token by token, the sum of the losses of its router, and its choices.

    These are those of each expert, and behind them how many of all were dropped.
    """
    args, out, losses, choices = moe.model_args, torch.zeros_like(x), [], [0] * (E + 1)
    for b in range(x.shape[1]):
        routed = [route_token(moe, x[s, b]) for s in range(len(x))]
        losses += [loss for _, loss in routed]
        dropped = set()
        if args.moe_expert_capacity_factor:
            capacity = math.ceil(args.moe_expert_capacity_factor * len(x) * args.moe_router_topk / E)
            for e in range(E):
                assigned = [s for s in range(len(x)) if e in routed[s][0]]
                if args.moe_token_drop_policy == "probs":
                    assigned.sort(key=lambda s: (-float(routed[s][0][e]), s))
                dropped |= {(s, e) for s in assigned[capacity:]}
            assert dropped, "the case drops some"
        choices[E] += len(dropped)
        for s in range(len(x)):
            for e in routed[s][0]:
                choices[e] += 1
            retained = [(e, w) for e, w in routed[s][0].items() if (s, e) not in dropped]
            row = sum(
                (w * apply_expert(getattr(moe.experts, str(e)), x[s, b]) for e, w in retained),
                torch.zeros_like(x[s, b]),
            )
            if moe.shared_expert is not None:
                routed_weight, shared_weight = weights_of_sum(moe, x[s, b])
                row = routed_weight * row + shared_weight * apply_expert(moe.shared_expert, x[s, b])
            out = out.index_put((torch.tensor(s), torch.tensor(b)), row)
    return out, sum(losses), choices


def collect_gradients(moe: MoE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input": x.grad, **{name: p.grad for name, p in moe.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_matches_loop_over_tokens(variant: str) -> None:
    """Outputs, losses, what was counted, and the gradients of the input and of every weight."""
    moe, x, scale = make_layer(**VARIANTS[variant]), make_hidden().requires_grad_(), 0.25
    moe.router.gradient_scale = scale
    out = moe(x)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    (out * weight).sum().backward()
    actual = collect_gradients(moe, x)
    moe.zero_grad()
    reference_x = make_hidden().requires_grad_()
    expected_out, loss, choices = run_by_token(moe, reference_x)
    ((expected_out * weight).sum() + scale * loss).backward()
    assert (out - expected_out).abs().max() <= 1e-12 * expected_out.abs().max()
    expected = collect_gradients(moe, reference_x)
    for name, gradient in expected.items():
        gradient = torch.zeros_like(actual[name]) if gradient is None else gradient
        assert (actual[name] - gradient).abs().max() <= 1e-12 * max(gradient.abs().max(), 1.0), name
    assert float(moe.router.loss_sums.sum()) == pytest.approx(float(loss), rel=1e-12)
    assert [*moe.router.counts.tolist(), *moe.router.dropped.tolist()] == choices


def losses_and_gradient(types: str, coefficients: float | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the router's auxiliary losses, and the gradient that they give its weight."""
    moe = make_layer(moe_router_load_balancing_type=types, moe_aux_loss_coeff=coefficients, moe_z_loss_coeff=0.05)
    weights, _ = moe.router(make_hidden())
    (weights * 0).sum().backward()
    assert moe.router.weight.grad is not None
    return moe.router.loss_sums, moe.router.weight.grad


def test_several_load_balancing_losses_are_added_with_their_weights() -> None:
    settings = {"seq_aux_loss": 0.3, "aux_loss": 0.2, "global_aux_loss": 0.07}
    losses, gradient = losses_and_gradient(" ".join(settings), " ".join(map(str, settings.values())))
    single = [losses_and_gradient(name, weight) for name, weight in settings.items()]
    z_loss, z_gradient = losses_and_gradient("none", 0.0)
    assert [int(loss.count_nonzero()) for loss, _ in single] == [2, 2, 2] and losses.count_nonzero() == 4
    torch.testing.assert_close(losses, sum(loss for loss, _ in single) - 2 * z_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, sum(grad for _, grad in single) - 2 * z_gradient, rtol=1e-11, atol=1e-13)


def test_global_loss_ignores_tokens_of_earlier_steps() -> None:
    later_hidden = make_hidden().flip(0) + 1
    moe, fresh = (make_layer(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1) for _ in "ab")
    moe.router(make_hidden())
    moe.router.clear()
    moe.router(later_hidden)
    fresh.router(later_hidden)
    assert moe.router.loss_sums.count_nonzero() == 1
    torch.testing.assert_close(moe.router.loss_sums, fresh.router.loss_sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1", "must have one weight for each type"),
        ("aux_loss --moe-aux-loss-coeff 0.1 0.2", "must have one weight for each type"),
        ("aux_loss sinkhorn --moe-aux-loss-coeff 0.1 0.2", "must be different ones of aux_loss"),
        ("aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.2", "must be different ones of aux_loss"),
        ("aux_loss seq --moe-aux-loss-coeff 0.1 0.2", "--moe-router-load-balancing-type must be one of .* got 'seq'"),
        ("aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 -1", "--moe-aux-loss-coeff must be a finite number"),
    ],
)
def test_contradicting_load_balancing_losses_are_rejected(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(f"--num-experts 4 --moe-router-load-balancing-type {flags}".split(), world_size=1)


def test_ties_route_to_lowest_experts_and_others_get_zero_grads() -> None:
    moe, x = make_layer(), make_hidden().requires_grad_()
    moe.router.weight.data.zero_()
    weights, experts = moe.router(x)
    assert experts.eq(torch.tensor([0, 1])).all() and weights.eq(0.5).all()
    assert moe.router.counts.tolist() == [S * B, S * B, 0, 0, 0, 0]
    moe(x).sum().backward()
    for expert_idx, expert in moe.experts.named_children():
        assert (expert.up.weight.grad.abs().sum() > 0) == (int(expert_idx) < 2)  # zeros, and not nothing


def test_all_tokens_can_route_to_one_expert() -> None:
    moe, x = make_layer(moe_router_topk=1, moe_router_pre_softmax=True), make_hidden()
    moe.router.weight.data.zero_()
    moe.router.weight.data[4] = 50.0
    x = x.abs()
    expected = torch.stack(
        [torch.stack([apply_expert(getattr(moe.experts, "4"), token) for token in row]) for row in x]
    )
    assert (moe(x) - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_recompute_and_evaluation_do_not_count_tokens() -> None:
    moe, x = make_layer(**VARIANTS["capacity by weight"]), make_hidden().requires_grad_()
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


def test_routers_are_ordered_by_layer_index() -> None:
    """Of the whole model, whatever is before the number; a router that is alone in no layer keeps its name."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict() for _ in range(12)])})
    for layer_idx in (2, 10, 11):
        model["layers"][layer_idx]["mlp"] = make_layer()  # type: ignore[index]
    routers = Routers(model, single_grid())
    assert routers.layers == ("layers.2", "layers.10", "layers.11")
    model["layers"][10]["other"] = make_layer()  # type: ignore[index]
    assert Routers(model, single_grid()).layers[1:3] == ("layers.10.mlp.router", "layers.10.other.router")


def test_scale_of_the_loss_applies_to_every_router() -> None:
    """With fp16, auxiliary losses have the loss scale of the token losses."""
    model = torch.nn.ModuleList([make_layer(), make_layer()])
    Routers(model, single_grid()).set_scale(8.0)
    assert [layer.router.gradient_scale for layer in model] == [8.0, 8.0]


def test_capacity_is_per_sample_for_any_micro_batch() -> None:
    for variant in ("capacity by weight", "capacity by position"):
        moe, x = make_layer(**VARIANTS[variant]), make_hidden()
        per_sample = torch.cat([moe(x[:, b : b + 1]) for b in range(B)], dim=1)
        assert (moe(x) - per_sample).abs().max() <= 1e-12 * per_sample.abs().max()


def test_expert_bias_moves_by_sign_of_load_error() -> None:
    router = make_layer(**SIGMOID).router
    router.expert_bias.data = torch.zeros(E)  # type: ignore[union-attr]
    router.update_balance(torch.tensor([4, 8, 8, 8, 20, 0]))
    assert router.expert_bias.tolist() == pytest.approx([1e-3, 0.0, 0.0, 0.0, -1e-3, 1e-3])  # type: ignore[union-attr]
    assert router.tokens_per_expert.tolist() == [4, 8, 8, 8, 20, 0]


def test_first_step_assumes_uniform_load() -> None:
    router = Router(ModelArgs(**{**MODEL_FIELDS, **BALANCED}), ParallelContext()).double()
    assert router._previous_expert_shares(make_hidden()).tolist() == pytest.approx([1 / E] * E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm_matches_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own, with experts that have no row at the start, within and at the end."""
    results = {}
    for backend in (LOOP, GROUPED):
        monkeypatch.setattr(grouped, "IMPLEMENTATION", backend)
        torch.manual_seed(0)
        x = torch.randn(19, 16, dtype=dtype, requires_grad=True)
        weights = [torch.randn(24, 16, dtype=dtype, requires_grad=True) for _ in range(5)]
        y = grouped_linear(x, weights, torch.tensor([0, 7, 0, 12, 0]))
        (y * torch.arange(24)).sum().backward()
        results[backend] = [y, x.grad, *[weight.grad for weight in weights]]
    for expected, actual in zip(results[LOOP], results[GROUPED], strict=True):
        assert (expected - actual).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-2) * max(
            expected.abs().max(), 1.0
        )


@pytest.mark.parametrize(
    ("rows", "input_size", "output_size", "expected"),
    [(4, 16, 24, GROUPED), (0, 16, 24, LOOP), (4, 12, 24, LOOP), (4, 16, 20, LOOP)],
)
def test_grouped_gemm_needs_rows_and_sizes_divisible_by_8(
    monkeypatch: pytest.MonkeyPatch, rows: int, input_size: int, output_size: int, expected: str
) -> None:
    """CUDA's kernel raises an error within a step otherwise."""
    monkeypatch.setattr(grouped, "IMPLEMENTATION", GROUPED)
    x = torch.randn(rows, input_size, dtype=torch.bfloat16)
    assert grouped.select_implementation(x, output_size) == expected
    weights = [torch.randn(output_size, input_size, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    y = grouped_linear(x, weights, torch.tensor([0, rows]))
    y.sum().backward()
    assert y.shape == (rows, output_size) and weights[0].grad is not None and not weights[0].grad.any()


@pytest.mark.parametrize("num_experts", [1, 6, 255, 256, 300])
@pytest.mark.parametrize("has_dropped", [False, True])
def test_slots_equal_stable_sort_by_expert(num_experts: int, has_dropped: bool) -> None:
    """Keys of one byte end at 255 experts: the index after the last expert is a key, too."""
    generator = torch.Generator().manual_seed(num_experts)
    experts = torch.randint(num_experts + has_dropped, (150, 2), generator=generator)
    experts[0] = torch.tensor([num_experts - 1 + has_dropped, 0])
    slots = grouped.Slots.from_experts(experts, num_experts, has_dropped=has_dropped)
    order = experts.flatten().sort(stable=True).indices
    slot_of_choice = torch.empty_like(order).scatter_(0, order, torch.arange(300))
    slot_of_choice[experts.flatten() == num_experts] = 300
    assert slots.order.tolist() == order.tolist() and slots.slot_of_choice.tolist() == slot_of_choice.tolist()
    assert slots.counts.tolist() == experts.flatten().bincount(minlength=num_experts + 1)[:num_experts].tolist()
    assert slots.order.dtype == slots.slot_of_choice.dtype == torch.int32 and slots.counts.dtype == torch.int64


class OperatorCounter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("defers", [False, True])
def test_stacked_weights_are_not_copied_and_bitwise_equal(
    monkeypatch: pytest.MonkeyPatch, recompute: bool, defers: bool
) -> None:
    monkeypatch.setattr(grouped, "IMPLEMENTATION", GROUPED)
    results, num_stacks, num_bytes = [], [], []
    for is_stacked in (False, True):
        moe = make_layer(hidden_size=16, moe_ffn_hidden_size=24, activation="gated-silu").bfloat16()
        names, originals = list(moe.state_dict()), list(moe.parameters())
        if is_stacked:
            stack_expert_weights(moe)
            assert list(moe.state_dict()) == names
            assert all(p is original for p, original in zip(moe.parameters(), originals, strict=True))
        moe.experts.delay_wgrad = defers
        x = torch.randn(S, B, 16, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with OperatorCounter() as counter:
            y = checkpoint(ParallelContext().streams, moe, x) if recompute else moe(x)
            y.float().square().sum().backward()
            if defers:
                moe.experts.backward_dw()
        torch.save(moe.state_dict(), file := io.BytesIO())
        num_bytes.append(file.tell())
        num_stacks.append(counter.counts["stack"] + counter.counts["cat"])
        results.append([y, x.grad, *(parameter.grad for parameter in moe.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert expected.equal(actual) and actual.isfinite().all()
    assert num_stacks[0] - num_stacks[1] == (6 if recompute else 4) and num_bytes[1] <= num_bytes[0]


def test_loop_and_wide_weights_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A main param may be a view of a weight in fp32; the loop does not need a common storage."""
    for dtype, implementation in ((torch.float32, GROUPED), (torch.bfloat16, None), (torch.bfloat16, LOOP)):
        monkeypatch.setattr(grouped, "IMPLEMENTATION", implementation)
        moe = make_layer(hidden_size=16, moe_ffn_hidden_size=24).to(dtype)
        stack_expert_weights(moe)
        experts: list[Any] = list(moe.experts.children())
        assert stacked_weights.distance_of([expert.up.weight for expert in experts]) is None


@pytest.mark.parametrize("implementation", [LOOP, GROUPED])
def test_slots_of_dropped_choices_have_no_effect(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    """NaN in the undefined rows after the experts' rows reaches neither results nor gradients."""
    monkeypatch.setattr(grouped, "IMPLEMENTATION", implementation)
    experts = torch.tensor([[0, 2], [2, 1], [2, 2], [1, 0]])  # 2: dropped, of 2 experts
    x = torch.randn(4, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    slots = grouped.Slots.from_experts(experts, 2, has_dropped=True)
    rows = grouped.dispatch_rows(x, slots)
    y = grouped_linear(rows, weights, slots.counts)
    poisoned = torch.where(torch.arange(8).unsqueeze(1) < 4, y, torch.full_like(y, float("nan")))
    poisoned.register_hook(lambda grad: grad.masked_fill(torch.arange(8).unsqueeze(1) >= 4, float("nan")))
    results = grouped.combine_rows(poisoned, slots)
    results.square().sum().backward()
    expected_x, *expected_weights = (t.detach().clone().requires_grad_() for t in (x, *weights))
    kept = [(0, 0, 0), (1, 1, 1), (3, 0, 1), (3, 1, 0)]  # row, choice, expert
    expected = torch.zeros(4, 2, 8)
    for row, choice, expert in kept:
        expected = expected.index_put(
            (torch.tensor(row), torch.tensor(choice)), expected_weights[expert] @ expected_x[row]
        )
    expected.square().sum().backward()
    torch.testing.assert_close(results, expected)
    for actual, reference in zip((x, *weights), (expected_x, *expected_weights), strict=True):
        torch.testing.assert_close(actual.grad, reference.grad)


INVALID_FLAGS = "--num-experts 6 --moe-router-topk 7 --moe-layer-freq [1,0] --moe-shared-expert-gate"


def test_rejects_invalid_moe_flags_together() -> None:
    flags = f"--num-layers 4 {INVALID_FLAGS} --moe-router-num-groups 4 --compile".split()
    with pytest.raises(ConfigError) as excinfo:
        parse([*flags, "--data-path", "none"], world_size=1)
    for message in (
        "--moe-router-topk must not exceed --num-experts, got 7 and 6",
        "--moe-layer-freq must be a number of at least 1, or a list with 1 or 0 for each of the 4 layers",
        "--moe-shared-expert-gate has no effect",
        "--moe-router-num-groups and --moe-router-group-topk must be set", "--compile supports dense layers only",
    ):  # fmt: skip
        assert message in str(excinfo.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 1",
            "must not exceed the experts of a group, .*, got 4 and 6 / 2",
        ),
        ("", "has no effect without --moe-router-num-groups, got 4"),
    ],
)
def test_group_score_topk_must_fit_groups(flags: str, message: str) -> None:
    line = f"--num-experts 6 --moe-router-group-score-topk 4 {flags} --data-path none"
    with pytest.raises(ConfigError, match=f"--moe-router-group-score-topk {message}"):
        parse(line.split(), world_size=1)


def test_one_number_of_experts_for_all_layers() -> None:
    assert parse("--num-experts 8 8 --data-path none".split(), world_size=1).model.num_experts == 8
    with pytest.raises(ConfigError, match="--num-experts must be an integer of at least 0, got '8 16'"):
        parse("--num-experts 8 16 --data-path none".split(), world_size=1)


def test_residual_and_gate_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--moe-shared-expert-gate and --moe-use-residual exclude each other"):
        parse("--num-experts 8 --moe-use-residual --moe-shared-expert-gate --data-path none".split(), world_size=1)


def test_rejects_invalid_moe_layouts_together() -> None:
    flags = "--num-experts 6 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1".split()
    flags += "--model-parallel-size 2 --moe-ffn-hidden-size 9 --batch-size 1 --data-path none".split()
    flags += ["--moe-shared-expert-intermediate-size", "9"]
    with pytest.raises(ConfigError) as excinfo:
        parse(flags, world_size=4)
    for message in (
        "--expert-model-parallel-size must divide --num-experts, got 4 and 6. Use one of [1, 2, 3, 6]",
        "--expert-tensor-parallel-size 1 with --model-parallel-size 2 needs --sequence-parallel",
        "--moe-shared-expert-intermediate-size must be a multiple of --model-parallel-size, got 9 and 2",
    ):  # fmt: skip
        assert message in str(excinfo.value)
    assert "--moe-ffn-hidden-size" not in str(excinfo.value), "unsharded experts may have any width"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("--expert-model-parallel-size 4", "must divide the data x context ranks, got 4 and 2. Use one of [1, 2]"),
        (
            "--sequence-parallel --expert-tensor-parallel-size 2 --expert-model-parallel-size 8",
            "must divide the data x context x tensor / expert tensor ranks (2 x 4 / 2), got 8 and 4",
        ),
        ("--sequence-parallel --expert-tensor-parallel-size 3", "must divide --model-parallel-size, got 3 and 4"),
        ("--expert-tensor-parallel-size 2", "with --model-parallel-size 4 needs --sequence-parallel"),
        (
            "--sequence-parallel --expert-tensor-parallel-size 2 --moe-ffn-hidden-size 9",
            "--moe-ffn-hidden-size must be a multiple of --expert-tensor-parallel-size, got 9 and 2",
        ),
        ("--moe-ffn-hidden-size 9", "--moe-ffn-hidden-size must be a multiple of --model-parallel-size, got 9 and 4"),
    ],
)
def test_expert_groups_must_fit_the_ranks(layout: str, message: str) -> None:
    flags = f"--num-experts 8 --model-parallel-size 4 --num-attention-heads 4 {layout} --data-path none"
    with pytest.raises(ConfigError) as excinfo:
        parse(flags.split(), world_size=8)
    assert message in str(excinfo.value)


def test_foreign_moe_flags_are_rejected_only_with_experts() -> None:
    flags = ["--data-path", "none", "--moe-input-jitter-eps", "0.01", "--moe-latent-size", "8"]
    dense = parse([*flags, "--num-experts", "1", "--moe-router-topk", "3"], world_size=1)
    assert dense.model.num_experts == 0 and dense.model == parse(["--data-path", "none"], world_size=1).model
    with pytest.raises(
        ConfigError, match="not supported with --num-experts, .*: --moe-input-jitter-eps, --moe-latent-size"
    ):
        parse([*flags, "--num-experts", "4"], world_size=1)


@pytest.mark.parametrize("recompute", [False, True])
def test_deferred_expert_grads_are_bitwise_equal(recompute: bool) -> None:
    """Under a schedule that splits backwards; two micro-batches wait at a time."""
    reference, deferred = make_layer(), make_layer()
    micro_batches, keys = [make_hidden(seed) for seed in (0, 1)], [(0, 0), (1, 0)]
    for micro_batch in micro_batches:
        leaf = micro_batch.clone().requires_grad_()
        (
            checkpoint(ParallelContext().streams, reference, leaf) if recompute else reference(leaf)
        ).square().sum().backward()
    forwards: list[tuple[int, int] | None] = [None]
    store = WeightGradStore(deferred, lambda: forwards[0])
    for key, micro_batch in zip(keys, micro_batches, strict=True):
        leaf = micro_batch.clone().requires_grad_()
        with store.active():
            forwards[0] = key
            loss = (
                (checkpoint(ParallelContext().streams, deferred, leaf) if recompute else deferred(leaf)).square().sum()
            )
            forwards[0] = None
            with store.deferring(key):
                store.backward([loss], [None], [leaf])
    experts = [parameter for name, parameter in deferred.named_parameters() if name.startswith("experts.")]
    assert all(parameter.grad is None for parameter in experts) and set(experts) <= store.deferred_leaves((1, 0))
    for key in keys:
        store.run(key)
    for (name, expected), actual in zip(reference.named_parameters(), deferred.parameters(), strict=True):
        assert expected.grad is not None and actual.grad is not None and torch.equal(expected.grad, actual.grad), name
    assert not deferred.experts.delay_wgrad and "all its weight gradients" in store.describe_split(
        dict(deferred.named_parameters())
    )


def test_experts_called_twice_accumulate_both_gradients() -> None:
    """Such as a layer that is shared: ``backward_dw`` runs once for each forward, and each adds another gradient."""
    reference, deferred = make_layer(), make_layer()
    reference(reference(make_hidden().requires_grad_())).square().sum().backward()
    store = WeightGradStore(deferred, lambda: (0, 0))
    x = make_hidden().requires_grad_()
    with store.active():
        loss = deferred(deferred(x)).square().sum()
    with store.deferring((0, 0)):
        store.backward([loss], [None], [x])
    store.run((0, 0))
    for (name, expected), actual in zip(reference.named_parameters(), deferred.parameters(), strict=True):
        assert (actual.grad - expected.grad).abs().max() <= 1e-12 * expected.grad.abs().max(), name
    assert not deferred.experts._delayed_grads


@pytest.mark.parametrize("num_tokens", [5, 40])
def test_sinkhorn_balances_rows_and_columns(num_tokens: int) -> None:
    logits = 2 * torch.randn(num_tokens, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    balanced = sinkhorn(logits, tolerance=1e-6)
    assert balanced.sum(0).tolist() == pytest.approx([1 / E] * E, rel=1e-4)
    assert balanced.sum(1).tolist() == pytest.approx([1 / num_tokens] * num_tokens, rel=1e-4)
    ratios = (balanced.log() - logits).exp()  # products of a row factor and a column factor
    assert (ratios / ratios[:1] / ratios[:, :1] * ratios[0, 0]).sub(1).abs().max() < 1e-12


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_chooses_by_balance_in_training_and_by_weight_in_evaluation(topk: int) -> None:
    moe, x = make_layer(moe_router_topk=topk, moe_router_load_balancing_type="sinkhorn"), make_hidden()
    logits = x @ moe.router.weight.t()
    expected = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    balanced = sinkhorn(logits.flatten(0, 1)).unflatten(0, x.shape[:2])
    for scores in (balanced, expected):
        weights, experts = moe.router(x)
        assert torch.equal(experts, scores.topk(topk).indices)
        assert torch.equal(weights, expected.gather(-1, experts))
        moe.eval()
    assert not torch.equal(balanced.topk(topk).indices, experts)
    assert moe.router.counts.sum() == topk * S * B


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--moe-aux-loss-coeff 0.1", "sinkhorn has no load-balancing loss, got --moe-aux-loss-coeff 0.1"),
        ("--moe-router-enable-expert-bias --moe-router-score-function sigmoid", "does not support --moe-router-enable"),
    ],
)
def test_sinkhorn_rejects_settings_of_other_routers(flags: str, problem: str) -> None:
    argv = f"--vocab-size 9 --data-path none --num-experts 4 --moe-router-load-balancing-type sinkhorn {flags}".split()
    with pytest.raises(ConfigError, match=problem):
        parse(argv, world_size=1, env={})


def test_random_drops_keep_capacity_and_differ_by_sample_and_step() -> None:
    settings = {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "random", "moe_router_topk": 1}
    moe, x = make_layer(**settings, moe_router_pre_softmax=True), make_hidden()[:, :1].expand(S, B, H)
    args, (weights, experts) = moe.model_args, moe.router(x)
    masks = []
    for step in (0, 0, 1):
        moe.parallel.streams.position = DropoutKey(step, 0, 0)
        masks.append(capacity_mask(experts, weights, args, moe.parallel))
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0][:, 0], masks[0][:, 1]), "samples with equal tokens drop different ones"
    capacity = math.ceil(0.7 * S / E)
    counts = [torch.bincount(experts[:, sample, 0], minlength=E) for sample in range(B)]
    kept = [torch.bincount(experts[:, b, 0][masks[0][:, b, 0]], minlength=E) for b in range(B)]
    assert all(torch.equal(k, c.clamp(max=capacity)) for k, c in zip(kept, counts, strict=True))
    evaluated = capacity_mask(experts, weights, args, moe.parallel, is_training=False)
    assert torch.equal(evaluated[:, 0], evaluated[:, 1])


def test_capacity_has_minimum_and_other_factor_in_evaluation() -> None:
    args = make_layer(moe_expert_capacity_factor=0.5, moe_eval_capacity_factor=1.5, moe_min_capacity=2).model_args
    assert [args.capacity(n, is_training=True) for n in (6, 60)] == [2, 10]
    assert [args.capacity(n, is_training=False) for n in (6, 60)] == [3, 30]
