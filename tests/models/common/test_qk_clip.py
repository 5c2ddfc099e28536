"""Largest attention logits and QK-clip in one process, in fp64 against plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.errors import ConfigError
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.qk_clip import AttentionLogits
from megatron.mpu.groups import single_grid
from megatron.mpu.random import DropoutStreams
from megatron.optim import GradScaler, MixedPrecisionOptimizer
from megatron.optim.step_policy import StepPolicy
from megatron.training.compile import GRAPHS_PER_LENGTH, compile_layers
from tests.helpers.model_samples import fill_weights
from tests.helpers.plain_decoder import recorded_maxima, reference_logits
from tests.models.common.test_features import FEATURES, FULL_MODELS, LATENT, MODEL_FIELDS, ROPE, make_batch

CPU = torch.device("cpu")
MEASURED = {
    "plain": {},
    **{
        name: FEATURES[name]
        for name in (
            "groups", "one group", "rope", "alibi", "alibi and a window", "q, k norms", "biases", "biases of q, k, v",
            "window", "window by list", "softmax scale", "capped scores", "clipped", "temperature", "sinks",
            "output gate", "value heads", "groups by window", "sinks by window",
        )
    },
    **{
        name: FULL_MODELS[name]
        for name in ("DeepSeek-V2", "DeepSeek-V2, long values", "Ling 3", "muP", "gpt-oss", "AFMoE", "MiMo-V2-Flash")
    },
}  # fmt: skip
QUICK_MEASURED = (
    "groups", "alibi and a window", "capped scores", "temperature", "sinks by window", "output gate", "Ling 3",
)  # fmt: skip
CLIPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, with biases": {**FEATURES["groups"], "hidden_bias": True},
    "grouped and gated": {**FEATURES["groups"], **ROPE, "attention_output_gate": True},
    "values of another size": {**FEATURES["groups"], **ROPE, "v_head_dim": 4, "add_qkv_bias": True},
    "capped, window": {**ROPE, "attn_logit_softcapping": 0.7, "window_size": 3},
    "alibi": FEATURES["alibi"],
    "temperature": FEATURES["temperature"],
    "latents": {**ROPE, **LATENT, "normalization": "RMSNorm"},
    "latents, queries from hidden states": {**ROPE, **LATENT, "normalization": "RMSNorm", "q_lora_rank": 0},
    "latents, gated": {**FULL_MODELS["Ling 3"]},
}


def make_model(
    changes: dict[str, Any], dtype: torch.dtype = torch.float64, **switches: Any
) -> tuple[DecoderModel, MixedPrecisionOptimizer, Any]:
    """Return a model, an optimizer with a learning rate of 0, and its attention logits."""
    args = ModelArgs(**{**MODEL_FIELDS, **changes, **switches})
    model = fill_weights(DecoderModel(args).double())
    optimizer = MixedPrecisionOptimizer(
        [{"params": list(model.parameters())}], lambda groups: torch.optim.SGD(groups, lr=0.0), dtype=dtype
    )
    logits_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    logits = AttentionLogits(model, args, single_grid(), optimizer.store, CPU, logits_dtype)
    optimizer.after_update = logits.clip if logits.clips else None
    return model, optimizer, logits


def measure(model: DecoderModel, logits: AttentionLogits, *, has_documents: bool) -> torch.Tensor:
    """Return the largest logits [layers, a] of a step with two micro-batches, after their backward."""
    tokens, positions, ids, labels = make_batch(has_documents)
    logits.start_step()
    for sample in range(len(tokens)):
        rows = slice(sample, sample + 1)
        inputs = {"position_ids": positions[rows], "segment_ids": ids[rows]} if has_documents else {}
        loss, _ = model(tokens[rows], **inputs, labels=labels[rows], loss_mask=torch.ones(1, tokens.shape[1]))
        loss.backward()
    logits.end_forwards()
    return logits.table.clone()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_MEASURED else pytest.mark.slow) for name in MEASURED]
)
def test_maxima_match_matrices_of_logits(name: str) -> None:
    for has_documents in (True,) if name in QUICK_MEASURED else (False, True):
        model, _, logits = make_model(MEASURED[name], log_max_attention_logit=True)
        maxima = measure(model, logits, has_documents=has_documents)
        tokens, positions, ids, _ = make_batch(has_documents)
        with recorded_maxima() as recorded, torch.no_grad():
            reference_logits(model.model_args, dict(model.named_parameters()), tokens, positions, ids)
        rows = [[recorded[layer, head] for head in range(4)] for layer in range(2)]
        expected = torch.tensor(rows, dtype=torch.float64)
        torch.testing.assert_close(maxima, expected, atol=1e-12, rtol=1e-12)
        assert logits.largest() == maxima.max().item()


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_logits_equal_the_threshold(name: str) -> None:
    """With a learning rate of 0, a further step has the logits of the clipped weights."""
    changes = {**CLIPPED[name], "num_layers": 1, "qk_clip": True, "qk_clip_alpha": 0.3}
    model, _, logits = make_model(changes, qk_clip_threshold=1e9)
    (maxima,) = measure(model, logits, has_documents=True)
    num_groups = model.model_args.num_query_groups
    group_maxima = maxima.view(num_groups, -1).amax(1)
    threshold = group_maxima.sort().values[-2:].mean().item()  # only the largest one is clipped
    model, optimizer, logits = make_model(changes, qk_clip_threshold=threshold)
    measure(model, logits, has_documents=True)
    optimizer.step()
    eta = (threshold / group_maxima).clamp(max=1.0).repeat_interleave(4 // num_groups)
    (clipped,) = measure(model, logits, has_documents=True)
    torch.testing.assert_close(clipped, maxima * eta, atol=1e-12, rtol=1e-12)
    assert clipped.max().item() == pytest.approx(threshold, rel=1e-12)
    assert (eta < 1.0).any() and (eta == 1.0).any()


def test_factors_of_query_groups() -> None:
    """Queries of a group get eta^alpha, its key eta^(1 - alpha) once; gates and values do not change."""
    changes = {**FEATURES["groups"], "attention_output_gate": True, "hidden_bias": True, "num_layers": 1}
    model, optimizer, logits = make_model(changes, qk_clip=True, qk_clip_threshold=0.5, qk_clip_alpha=0.3)
    attention = model.layers[0].attention
    before = [p.detach().clone() for p in attention.query_key_value.parameters()]
    logits.start_step()
    logits.table[0] = torch.tensor([1.0, 2.0, 0.4, -3.0])
    optimizer.finish_gradient_sums()
    optimizer.step()
    d, period = 6, 6 * 6  # two queries, two gates, a key, a value
    for old, new in zip(before, attention.query_key_value.parameters(), strict=True):
        ratio = (new / old).detach().reshape(2, period, -1)
        eta = 0.25  # the smaller one of the group's heads
        assert torch.allclose(ratio[0, : 2 * d], torch.tensor(eta**0.3).double())
        assert torch.allclose(ratio[0, 4 * d : 5 * d], torch.tensor(eta**0.7).double())
        assert (ratio[0, 2 * d : 4 * d] == 1.0).all() and (ratio[0, 5 * d :] == 1.0).all()
        assert (ratio[1] == 1.0).all()


def test_factors_of_latents() -> None:
    """Rotated queries have the full factor, because all heads share the rotated key, which does not change."""
    changes = {**CLIPPED["latents"], "num_layers": 1}
    model, optimizer, logits = make_model(changes, qk_clip=True, qk_clip_threshold=0.5)
    attention = model.layers[0].attention
    before = {name: p.detach().clone() for name, p in attention.named_parameters()}
    logits.start_step()
    logits.table[0] = torch.tensor([0.1, 2.0, 0.4, 8.0])
    optimizer.finish_gradient_sums()
    optimizer.step()
    ratios = {name: (p / before[name]).detach() for name, p in attention.named_parameters()}
    query, key_value = ratios["query.weight"].view(4, 3 + 4, -1), ratios["key_value.weight"].view(4, 3 + 2, -1)
    for head, eta in enumerate((1.0, 0.25, 1.0, 0.0625)):
        assert torch.allclose(query[head, :3], torch.tensor(eta**0.5).double())
        assert torch.allclose(query[head, 3:], torch.tensor(eta).double())
        assert torch.allclose(key_value[head, :3], torch.tensor(eta**0.5).double())
        assert (key_value[head, 3:] == 1.0).all()
    others = ratios.keys() - {"query.weight", "key_value.weight"}
    assert all((ratios[name] == 1.0).all() for name in others)


@pytest.mark.parametrize("logit", [float("nan"), float("inf"), float("-inf"), 0.0, -200.0])
def test_logits_that_are_not_positive_and_finite_clip_nothing(logit: float) -> None:
    model, optimizer, logits = make_model({"num_layers": 1}, qk_clip=True, qk_clip_threshold=0.5)
    before = model.layers[0].attention.query_key_value.weight.detach().clone()
    logits.start_step()
    logits.table.fill_(logit)
    optimizer.finish_gradient_sums()
    optimizer.step()
    assert torch.equal(model.layers[0].attention.query_key_value.weight, before)


@pytest.mark.parametrize("is_overflow", [False, True])
def test_skipped_step_does_not_clip(is_overflow: bool) -> None:
    model, optimizer, logits = make_model({"num_layers": 1}, qk_clip=True, qk_clip_threshold=1e-3)
    weight = model.layers[0].attention.query_key_value.weight
    before = weight.detach().clone()
    measure(model, logits, has_documents=False)
    if is_overflow:
        optimizer.policy = StepPolicy(GradScaler(scale=16.0, is_dynamic=True))
        weight.grad.fill_(torch.inf)
    else:
        optimizer.policy.accepts_step = lambda norm: False
    optimizer.step()
    assert (optimizer.overflow, optimizer.was_rejected) == (is_overflow, not is_overflow)
    assert torch.equal(weight, before)
    optimizer.policy.accepts_step = None
    maxima = measure(model, logits, has_documents=False)
    assert maxima.max() > 1e-3, "the logits of the skipped step are reset, those of this step are measured"
    optimizer.step()
    assert not torch.equal(weight, before)


def test_16_bit_weights_are_the_rounded_main_params() -> None:
    model, optimizer, logits = make_model(ROPE, torch.bfloat16, qk_clip=True, qk_clip_threshold=1e-3)
    weight = model.layers[1].attention.query_key_value.weight
    before = optimizer.main_param_of(weight).detach().clone()
    measure(model, logits, has_documents=False)
    optimizer.step()
    main_param = optimizer.main_param_of(weight)
    assert main_param.dtype == torch.float32 and not torch.equal(main_param, before)
    assert torch.equal(weight, main_param.bfloat16())


def test_bound_clips_at_least_as_much() -> None:
    exact, bound = (
        measure(*make_model(FEATURES["groups"], qk_clip=True, qk_clip_bound=is_bound)[::2], has_documents=True)
        for is_bound in (False, True)
    )
    assert (bound >= exact).all() and (bound > exact).any()


@pytest.mark.parametrize("switches", [{"checkpoint_activations": True}, {"recompute_attention": True}], ids=str)
def test_recomputation_is_not_measured(switches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for model, _, logits in (make_model(ROPE, qk_clip=True, **extra) for extra in ({}, switches)):
        for layer in model.layers:
            layer.attention.logit_meter._is_bound = False
        monkeypatch.setattr(
            "megatron.ops.attention_logits.max_logits",
            lambda query, key, **kwargs: calls.append(1) or torch.zeros(4, dtype=torch.float64),
        )
        calls.clear()
        measure(model, logits, has_documents=False)
        assert len(calls) == 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "grouped and gated", "latents"])
def test_compiled_layers_share_a_graph_and_measure_the_same(name: str) -> None:
    """All layers and passes share one graph. The model has more layers than torch compiles graphs of a function."""
    maxima = {}
    for is_compiled in (False, True):
        model, _, logits = make_model({**CLIPPED[name], "num_layers": GRAPHS_PER_LENGTH + 1}, qk_clip=True)
        if is_compiled:
            torch._dynamo.reset()
            counters.clear()
            compile_layers(model, DropoutStreams(), CPU, backend="aot_eager")
        maxima[is_compiled] = measure(model, logits, has_documents=False)
    torch.testing.assert_close(maxima[True], maxima[False], atol=1e-12, rtol=1e-12)
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


def test_evaluation_is_not_measured() -> None:
    model, _, logits = make_model(ROPE, qk_clip=True)
    maxima = measure(model, logits, has_documents=False)
    with torch.no_grad():
        model(100 * torch.ones(1, 1, dtype=torch.long).new_tensor([[3, 5, 1]]) % 23)
    assert torch.equal(logits.table, maxima)


def test_disabled_step_measures_nothing_unless_it_clips() -> None:
    for clips, is_measured in ((False, False), (True, True)):
        model, _, logits = make_model({}, qk_clip=clips, log_max_attention_logit=True)
        logits.is_enabled = False
        assert measure(model, logits, has_documents=False).isfinite().all() == is_measured


def test_model_without_measured_layers_is_an_error() -> None:
    model, optimizer, _ = make_model({}, qk_clip=True)
    with pytest.raises(ConfigError, match="--qk-clip and --log-max-attention-logit need attention layers"):
        AttentionLogits(model.embedding, model.model_args, single_grid(), optimizer.store, CPU, torch.float64)
