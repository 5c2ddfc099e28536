"""T5 against the same function in plain torch, and on 2 and 4 tensor ranks: logits, loss, every gradient, in fp64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.model import RelativeBias, T5Model
from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import (
    fill_weights,
    get_sharded_grads,
    join_shards,
    make_parallel_context,
    worst_relative_error,
)
from tests.helpers.t5_samples import (
    LEARNED,
    MODEL_VARIANTS,
    S_D,
    S_E,
    VOCAB,
    T5Batch,
    make_t5_batch,
    reference_t5_logits,
    t5_model_args,
)
from tests.helpers.whole import group_of_all_ranks

VARIANTS = {
    **MODEL_VARIANTS,
    "vocabulary by 8": {"make_vocab_size_divisible_by": 8, "untie_embeddings": True},
    "recompute": {"checkpoint_activations": True, "checkpoint_num_layers": 2},
}
CASES = [(name, has_documents) for name in VARIANTS for has_documents in (False, True)]


def run_cases(rank, size):
    """Return logits, loss sum, count and gradients of every variant."""
    group = group_of_all_ranks(rank, size)
    return {case: run_case(group, *case) for case in CASES}


def run_case(group: Group, name, has_documents):
    model = fill_weights(T5Model(t5_model_args(**VARIANTS[name]), make_parallel_context(group)).double())
    batch = vars(make_t5_batch(with_documents=has_documents))
    with torch.no_grad():
        logits = model(**{key: value for key, value in batch.items() if key not in ("labels", "loss_mask")})
    loss, count = model(**batch)
    (loss / count).backward()
    return logits, loss.item(), count.item(), get_sharded_grads(model)


@functools.cache
def rank_results(size):
    return run_ranks(size, run_cases, size) if size > 1 else [run_cases(0, 1)]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_model_matches_plain_torch(name, has_documents):
    args, batch = t5_model_args(**MODEL_VARIANTS[name]), make_t5_batch(with_documents=has_documents)
    model = fill_weights(T5Model(args).double())
    weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    logits = reference_t5_logits(weights, args, batch)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    expected = (losses * batch.loss_mask.double().flatten()).sum() / batch.loss_mask.sum()
    expected.backward()
    our_logits, loss, count, gradients = rank_results(1)[0][name, has_documents]
    assert (our_logits.transpose(0, 1) - logits).abs().max() <= 1e-12 * logits.abs().max()
    assert abs(loss / count - expected.item()) <= 1e-12 * expected.item()
    worst, worst_name = worst_relative_error(
        join_shards([gradients]), {key: weight.grad for key, weight in weights.items()}
    )
    assert worst <= 1e-11, worst_name


def check_matches_one_process(name, has_documents, size):
    logits, loss, count, gradients = rank_results(1)[0][name, has_documents]
    ranks = [results[name, has_documents] for results in rank_results(size)]
    gathered = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (gathered - logits[..., :VOCAB]).abs().max() <= 1e-12 * logits.abs().max()
    assert {rank[2] for rank in ranks} == {count}
    assert all(abs(rank[1] - loss) <= 1e-12 * loss for rank in ranks)
    worst, worst_name = worst_relative_error(join_shards([rank[3] for rank in ranks]), join_shards([gradients]))
    assert worst <= 1e-11, worst_name


@pytest.mark.slow  # two tensor ranks equal Hugging Face's model: test_against_huggingface.py
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_two_tensor_ranks_match_one_process(name, has_documents):
    check_matches_one_process(name, has_documents, 2)


@pytest.mark.slow
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_four_tensor_ranks_match_one_process(name, has_documents):
    check_matches_one_process(name, has_documents, 4)


def test_padded_table_rows_get_zero_gradient():
    num_padded = 0
    for results in rank_results(2):
        for name, (shard, gradient) in results["vocabulary by 8", False][3].items():
            if name in ("embedding.word.weight", "head.weight"):
                num_padded += gradient.shape[0] - shard.length
                assert gradient[shard.length :].count_nonzero() == 0
    assert num_padded > 0


@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_packed_document_matches_standalone_forward(name):
    args, batch = t5_model_args(**MODEL_VARIANTS[name]), make_t5_batch(with_documents=True)
    model, standalone = (fill_weights(T5Model(args).double()) for _ in range(2))
    packed, _ = model(**vars(batch))
    packed.backward()
    logits = model(**{**vars(batch), "labels": None})
    total = 0.0
    for i, document_idx in [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]:
        enc, dec = batch.enc_segments[i] == document_idx, batch.dec_segments[i] == document_idx
        document = T5Batch(
            batch.enc_tokens[i][enc][None], batch.dec_tokens[i][dec][None], None, None,
            batch.labels[i][dec][None], torch.ones(1, int(dec.sum())),
        )  # fmt: skip
        standalone_logits = standalone(**{**vars(document), "labels": None})[:, 0]
        assert (logits[dec, i] - standalone_logits).abs().max() <= 1e-12 * standalone_logits.abs().max(), (
            i,
            document_idx,
        )
        loss, _ = standalone(**vars(document))
        loss.backward()
        total += loss.item()
    assert abs(packed.item() - total) <= 1e-12 * total
    worst, worst_name = worst_relative_error(
        *({n: p.grad for n, p in m.named_parameters()} for m in (model, standalone))
    )
    assert worst <= 1e-11, worst_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODEL_VARIANTS)
def test_fully_padded_rows_give_no_nan(name, dtype):
    model = fill_weights(T5Model(t5_model_args(**MODEL_VARIANTS[name])).to(dtype))
    batch = make_t5_batch(with_documents=True)
    batch.enc_segments[1], batch.dec_segments[0], batch.dec_segments[2] = -1, -1, 5  # 5 is nowhere in the encoder
    batch.loss_mask = (batch.dec_segments == 0).float()
    loss, count = model(**vars(batch))
    (loss / count).backward()
    assert loss.isfinite() and count == S_D
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model(**{**vars(batch), "labels": None}).isfinite().all()


def test_padding_values_do_not_change_loss():
    model = fill_weights(T5Model(t5_model_args()).double())
    batch = make_t5_batch(with_documents=True)
    loss, _ = model(**vars(batch))
    batch.enc_tokens = batch.enc_tokens.masked_fill(batch.enc_segments < 0, 7)
    batch.dec_tokens = batch.dec_tokens.masked_fill(batch.dec_segments < 0, 7)
    batch.labels = batch.labels.masked_fill(batch.dec_segments < 0, 7)
    assert torch.equal(model(**vars(batch))[0], loss)


def test_decoder_is_causal_and_encoder_is_bidirectional():
    model = fill_weights(T5Model(t5_model_args()).double())
    batch = make_t5_batch()
    logits = model(batch.enc_tokens, batch.dec_tokens)
    later = batch.dec_tokens.clone()
    later[:, 4] = (later[:, 4] + 1) % VOCAB
    changed = model(batch.enc_tokens, later)
    assert torch.equal(changed[:4], logits[:4]) and (changed[4:] != logits[4:]).any(dim=-1).all()
    last = batch.enc_tokens.clone()
    last[:, S_E - 1] = (last[:, S_E - 1] + 1) % VOCAB
    assert (model(last, batch.dec_tokens) != logits).any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tied_table_gradient_accumulates_all_uses(dtype):
    model = fill_weights(T5Model(t5_model_args()).to(dtype))
    batch = make_t5_batch()
    for _ in range(2):  # micro-batches
        model(**vars(batch))[0].backward()
    table = model.embedding.word.weight.grad
    assert table.layout == torch.strided and table.is_contiguous()
    (expected,) = torch.autograd.grad(model(**vars(batch))[0], [model.embedding.word.weight])
    assert expected.layout == torch.strided
    assert (table - 2 * expected).norm() <= 4 * torch.finfo(dtype).eps * table.norm()


def test_logical_names_match_checkpoint_names():
    args = t5_model_args(enc_layers=1, dec_layers=1, untie_embeddings=True, activation="gated-gelu")
    layer_names = [
        "input_norm",
        "attention.query_key_value",
        "attention.dense",
        "post_attention_norm",
        "mlp.up",
        "mlp.down",
    ]
    cross_names = ["cross_norm", *(f"cross_attention.{module_name}" for module_name in ("query", "key_value", "dense"))]
    names = ["embedding.word", "encoder.bias", "encoder.final_norm", "decoder.bias", "decoder.final_norm", "head"]
    names += [f"encoder.layers.0.{module_name}" for module_name in layer_names] + [
        f"decoder.layers.0.{module_name}" for module_name in layer_names + cross_names
    ]
    assert sorted(name for name, _ in T5Model(args).named_parameters()) == sorted(f"{name}.weight" for name in names)
    learned = {name for name, _ in T5Model(t5_model_args(**LEARNED)).named_parameters()}
    assert "embedding.position.weight" in learned and not any("encoder.bias" in name for name in learned)


def test_relative_bias_table_is_sharded_by_heads():
    table = T5Model(t5_model_args(), make_parallel_context(Group((0, 1), 1))).encoder.bias
    shard = shard_of(table.weight)
    assert table.weight.shape == (8, 2) and table.by_distance(S_E).shape == (2, 2 * S_E - 1)
    assert (shard.global_shape, shard.partition_dim, shard.start, shard.length) == ((8, 4), 1, 2, 2)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"num_attention_heads": 4}, "--num-attention-heads"),
        ({"num_attention_heads": 6}, "output_size"),
    ],
)
def test_rejects_indivisible_sizes(changes, argument):
    with pytest.raises(ValueError, match=f"{argument} must be a multiple of --model-parallel-size, got"):
        T5Model(t5_model_args(**changes), make_parallel_context(Group((0, 1, 2), 0)))


def test_16_bit_bias_table_gradient_accumulates_in_fp32() -> None:
    length = 1024
    upstream = torch.randn(4, 2 * length - 1, generator=torch.Generator().manual_seed(1))
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        table = fill_weights(RelativeBias(t5_model_args(), ParallelContext(), True)).to(dtype)
        table.by_distance(length).backward(upstream.bfloat16().to(dtype))
        grads[dtype] = table.weight.grad.float()
    exact = grads[torch.float32]
    assert (grads[torch.bfloat16] - exact).norm() <= 0.004 * exact.norm()  # rounding of the result alone
