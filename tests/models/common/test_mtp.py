"""Multi-token prediction in one process: losses and gradients against loops over positions, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.models.common import mtp
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.mtp import MTPLayer, future_tokens
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.context_parallel import split_along_context
from megatron.mpu.groups import Group
from megatron.ops.attention import positions_in_segments
from tests.helpers.model_samples import fill_weights
from tests.helpers.plain_decoder import reference_logits, reference_mtp_losses

VOCAB, SEQ, BATCH = 23, 9, 3
FIELDS: dict[str, Any] = {
    "family": "llama", "num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "num_query_groups": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 16, "kv_hidden_size": 6, "ff_hidden_size": 10, "hidden_bias": False,
    "layernorm_epsilon": 1e-3, "normalization": "RMSNorm", "activation": "gated-silu",
    "position_embedding_type": "rope", "rotary_base": 50.0, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "LLaMA": {"untie_embeddings": True},
    "one layer, tied": {"mtp_num_layers": 1},
    "Gemma": {
        "layernorm_1p": True, "norm_placement": "both", "window_size": 2, "window_attn_skip_freq": "[0,1]",
        "scale_embeddings": True, "final_logit_softcapping": 1.5, "activation": "gated-gelu",
    },
    "MiniCPM": {"embedding_multiplier": 12.0, "residual_scale": 1.4, "dim_model_base": 4},
    "GPT-2": {
        "family": "gpt2", "normalization": "LayerNorm", "activation": "gelu", "position_embedding_type":
        "learned_absolute", "hidden_bias": True, "num_query_groups": 4,
    },
    "ALiBi": {"position_embedding_type": "alibi", "normalization": "LayerNorm", "norm_bias": False},
    "DeepSeek-V3": {
        "multi_latent_attention": True, "num_query_groups": 4, "q_lora_rank": 7, "kv_lora_rank": 5, "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 4, "v_head_dim": 2, "untie_embeddings": True,
    },
    "sinks, gates, a last layer without rotary positions": {
        "softmax_type": "learnable", "attention_output_gate": True, "no_rope_freq": "2", "qk_norm": "l2",
        "activation_func_clamp_value": 0.4,
    },
    "Cohere": {
        "normalization": "LayerNorm", "norm_bias": False, "parallel_residual": "shared-norm", "logit_scale": 0.3,
        "rotary_interleaved": True,
    },
    "xIELU, temperature": {"activation": "xielu", "attention_temperature_scale": 0.1, "attention_temperature_floor": 2},
    "loss in chunks": {"loss_chunk_tokens": 4, "untie_embeddings": True},
    "recomputed": {"checkpoint_activations": True},
}  # fmt: skip


def make_model(**changes: Any) -> DecoderModel:
    return fill_weights(DecoderModel(ModelArgs(**{**FIELDS, **changes})).double())


def make_text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return text and documents [b, s+1], and the loss mask [b, s]: documents of several lengths, and padding."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    documents = torch.zeros(BATCH, SEQ + 1, dtype=torch.long)
    documents[0, 4:], documents[1, 2:], documents[1, 3:], documents[1, SEQ:] = 1, 1, 2, 3
    documents[2, 7:] = -1  # padding
    mask = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    weights = torch.rand(BATCH, SEQ, generator=generator, dtype=torch.float64)
    return text, documents, weights * mask


def check_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    assert (actual - expected).abs().max() <= 1e-12 * expected.detach().abs().max().clamp(min=1.0), name


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_loops_over_positions(case: str, has_documents: bool) -> None:
    model = make_model(**CASES[case])
    args = model.model_args
    text, documents, mask = make_text()
    if not has_documents:
        documents, mask = torch.zeros_like(documents), torch.ones_like(mask)
        mask[1, 3] = mask[2, 7:] = 0
    tokens, labels, segments = text[:, :-1], text[:, 1:], documents[:, :-1].contiguous()
    positions = positions_in_segments(segments)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    logits = reference_logits(args, weights, tokens, positions, segments)
    losses = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    main_loss, mtp_losses = (
        (losses * mask).sum(),
        reference_mtp_losses(args, weights, text, mask, positions, documents),
    )
    mtp_sum = torch.stack([loss for loss, _ in mtp_losses]).sum()
    (main_loss + 0.3 / args.mtp_num_layers * mtp_sum).backward()

    inputs = {"position_ids": positions, "segment_ids": segments} if has_documents else {}
    result = model(tokens, **inputs, labels=labels, loss_mask=mask)
    result["loss"][0].backward()
    assert list(result) == ["loss", *[f"mtp_{depth + 1}_loss" for depth in range(args.mtp_num_layers)]]
    check_close(result["loss"][0], main_loss)
    check_close(result["loss"][1], mask.sum())
    for depth, (expected_sum, expected_count) in enumerate(mtp_losses, start=1):
        actual_sum, actual_count = result[f"mtp_{depth}_loss"]
        assert expected_count > 0
        check_close(actual_sum, expected_sum)
        check_close(actual_count, torch.tensor(expected_count, dtype=torch.float64))
    for name, parameter in model.named_parameters():
        gradient = weights[name].grad
        assert gradient is not None and parameter.grad is not None, name
        assert gradient.abs().max() > 0, name
        check_close(parameter.grad, gradient, name)


def loss_and_grads(model: DecoderModel, text: torch.Tensor, mask: torch.Tensor, **inputs: Any) -> list[torch.Tensor]:
    result = model(text[:, :-1], **inputs, labels=text[:, 1:], loss_mask=mask)
    model.zero_grad()
    result["loss"][0].backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*[x for pair in result.values() for x in pair], *gradients]


def test_padding_and_its_labels_have_no_effect() -> None:
    """Targets in padding are neither counted nor read, whatever token ids they have."""
    model, (text, documents, mask) = make_model(loss_chunk_tokens=4), make_text()
    labels = text[:, 1:].clone()
    segments = documents[:, :-1].contiguous()
    is_padding = documents[:, 1:] < 0
    assert is_padding.any()
    expected = model(text[:, :-1], segment_ids=segments, labels=labels, loss_mask=mask)
    labels[is_padding] = -100
    actual = model(text[:, :-1], segment_ids=segments, labels=labels, loss_mask=mask)
    for name, (loss_sum, count) in expected.items():
        assert torch.equal(actual[name][0], loss_sum) and torch.equal(actual[name][1], count), name
    assert float(actual["mtp_1_loss"][1]) == pytest.approx(float(actual["loss"][1]), rel=1e-12)


def test_packed_documents_have_the_losses_of_separate_samples() -> None:
    """Masked future tokens differ between both, and no counted position may see them."""
    model, (text, documents, _) = make_model(), make_text()
    row, ids = text[1:2], documents[1:2]
    mask = (ids[:, 1:] == ids[:, :-1]).double()
    segments = ids[:, :-1].contiguous()
    packed = model(
        row[:, :-1], position_ids=positions_in_segments(segments), segment_ids=segments, labels=row[:, 1:],
        loss_mask=mask,
    )  # fmt: skip
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in packed}
    for document in ids.unique():
        tokens = row[:, ids[0] == document]
        if tokens.shape[1] > 1:
            alone = model(tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones_like(tokens[:, 1:]).double())
            for depth, (name, (loss_sum, count)) in enumerate(alone.items()):  # the main loss has depth 0
                num_targets = max(tokens.shape[1] - 1 - depth, 0)
                sums[name] += torch.stack([loss_sum / count.clamp(min=1) * num_targets, torch.tensor(num_targets)])
    num_tokens = float(mask.sum())
    for name, (loss_sum, count) in packed.items():
        expected_sum, num_targets = sums[name]
        check_close(loss_sum, expected_sum * num_tokens / num_targets, name)
        check_close(count, torch.tensor(num_tokens, dtype=torch.float64), name)


@pytest.mark.parametrize("loss_average", ["token", "micro-batch"])
def test_loss_is_the_mean_over_targets(loss_average: str) -> None:
    """Of each sample, or of all samples of a micro-batch with ``--loss-average micro-batch``, as Megatron-LM's."""
    model = make_model(mtp_num_layers=1, mtp_loss_scaling_factor=0.7, loss_average=loss_average)
    text, _, _ = make_text()
    mask = torch.ones(BATCH, SEQ, dtype=torch.float64)
    mask[0, 3:] = mask[1, 1:] = mask[2, :4] = 0  # the only counted token of sample 1 is no target of the layer

    def target_losses(row: int) -> list[torch.Tensor]:
        """Return the losses of the targets of a sample: those of a mask with this target only."""
        result = []
        for position in range(1, SEQ):
            single = torch.zeros(BATCH, SEQ, dtype=torch.float64)
            single[row, position] = mask[row, position]
            if single.any():
                result.append(model(text[:, :-1], labels=text[:, 1:], loss_mask=single)["mtp_1_loss"][0])
        return result

    losses = [target_losses(row) for row in range(BATCH)]
    assert [len(row) for row in losses] == [2, 0, 5]
    num_tokens = [3, 1, 5]
    if loss_average == "token":
        expected = torch.stack(losses[0]).mean() * num_tokens[0] + torch.stack(losses[2]).mean() * num_tokens[2]
    else:
        expected = torch.stack(losses[0] + losses[2]).mean() * sum(num_tokens)
    actual = model(text[:, :-1], labels=text[:, 1:], loss_mask=mask)
    check_close(actual["mtp_1_loss"][0], expected)
    check_close(actual["mtp_1_loss"][1], torch.tensor(8.0 if loss_average == "token" else 9.0, dtype=torch.float64))


def test_main_loss_evaluation_and_logits_ignore_mtp_layers() -> None:
    model, (text, _, mask) = make_model(), make_text()
    plain = fill_weights(DecoderModel(replace(model.model_args, mtp_num_layers=0)).double())
    loss, count = plain(text[:, :-1], labels=text[:, 1:], loss_mask=mask)
    trained = model(text[:, :-1], labels=text[:, 1:], loss_mask=mask)["loss"]
    assert torch.equal(trained[0], loss) and torch.equal(trained[1], count)
    with torch.no_grad():
        evaluated = model(text[:, :-1], labels=text[:, 1:], loss_mask=mask)
        assert torch.equal(evaluated[0], loss) and torch.equal(evaluated[1], count)
        assert torch.equal(model(text[:, :-1]), plain(text[:, :-1]))


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("offload", [{}, {"checkpoint_in_cpu": True, "contiguous_checkpointing": True}])
def test_recompute_is_bitwise_equal_and_repeats_each_layer(
    interval: int, offload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, documents, mask = make_text()
    segments = documents[:, :-1].contiguous()
    inputs = {"segment_ids": segments, "position_ids": positions_in_segments(segments)}
    dropout = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
    expected = loss_and_grads(make_model(**dropout), text, mask, **inputs)
    calls: list[int] = []
    forward = MTPLayer.forward

    def counting_forward(self: MTPLayer, *args: Any) -> torch.Tensor:
        calls.append(self.layer_idx)
        return forward(self, *args)

    monkeypatch.setattr(MTPLayer, "forward", counting_forward)
    recomputed = make_model(**dropout, checkpoint_activations=True, checkpoint_num_layers=interval, **offload)
    actual = loss_and_grads(recomputed, text, mask, **inputs)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert calls == [2, 3, 3, 2]  # forward, then backward


def test_dropout_masks_of_mtp_layers_are_their_own() -> None:
    """With the keys of the decoder's last layer, both would drop the same elements."""
    model = make_model(hidden_dropout=0.5)
    keys = {
        module.layer
        for layer in model.mtp
        for module in layer.modules()
        if isinstance(module.__dict__.get("layer"), int)
    }
    assert keys == {0, 2, 3}  # 0: the feed-forward layers, which have no dropout of their own


def test_layer_has_experts_of_last_layer() -> None:
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 6, "moe_layer_freq": "[0,1]", "moe_router_topk": 2}
    model, (text, _, mask) = make_model(**experts), make_text()
    model(text[:, :-1], labels=text[:, 1:], loss_mask=mask)["loss"][0].backward()
    for layer in model.mtp:
        assert layer.layer.mlp.router.weight.grad.abs().max() > 0


def test_factor_scales_only_the_gradients_of_mtp() -> None:
    text, _, mask = make_text()
    gradients = {
        factor: {
            name: parameter.grad
            for model in [make_model(mtp_loss_scaling_factor=factor)]
            for loss in [model(text[:, :-1], labels=text[:, 1:], loss_mask=mask)["loss"][0]]
            if loss.backward() is None
            for name, parameter in model.named_parameters()
        }
        for factor in (0.0, 1.0, 2.0)
    }
    for name, doubled in gradients[2.0].items():
        once, zero = gradients[1.0][name], gradients[0.0][name]
        assert once is not None and doubled is not None and zero is not None
        check_close(doubled - zero, 2 * (once - zero), name)
        assert (zero.abs().max() == 0) == name.startswith("mtp."), name


@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_have_their_chunks_of_future_tokens(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next tokens of a chunk are on another rank; the ranks are simulated, with the result of their all-gather."""
    args = ModelArgs(**{**FIELDS, "mtp_num_layers": 3})
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, VOCAB, (BATCH, 16), generator=generator)
    segments = (torch.rand(BATCH, 16, generator=generator) < 0.2).long().cumsum(dim=1)
    mask = (torch.rand(BATCH, 16, generator=generator) < 0.8).float()
    expected = future_tokens(labels, mask, segments, args, ParallelContext())
    tables: list[torch.Tensor] = []
    monkeypatch.setattr(mtp, "gather_rows", lambda x, group: tables.append(x) or x)
    future_tokens(labels, mask, segments, args, ParallelContext())
    (full_table,) = tables
    for rank in range(size):
        context = Group(tuple(range(size)), rank)

        def gather(x: torch.Tensor, group: Group, context: Group = context) -> torch.Tensor:
            assert torch.equal(x, split_along_context(full_table, context, dim=0))
            return full_table

        monkeypatch.setattr(mtp, "gather_rows", gather)
        local = (split_along_context(x, context) for x in (labels, mask, segments))
        for actual, full in zip(future_tokens(*local, args, ParallelContext(context=context)), expected, strict=True):
            for tokens, all_tokens in zip(actual, full, strict=True):
                assert torch.equal(tokens, split_along_context(all_tokens, context))
