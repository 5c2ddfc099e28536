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
from tests.helpers.model_samples import filled, gradients_of, joined, place_of, worst_relative
from tests.helpers.t5_samples import KINDS, LEARNED, S_D, S_E, VOCAB, T5Batch, plain_logits, t5_batch, t5_sizes
from tests.helpers.whole import whole_world

VARIANTS = {
    **KINDS,
    "vocabulary by 8": {"make_vocab_size_divisible_by": 8, "untie_embeddings": True},
    "recompute": {"checkpoint_activations": True, "checkpoint_num_layers": 2},
}
RUNS = [(name, documents) for name in VARIANTS for documents in (False, True)]


def run(rank, size):
    """Return logits, loss sum, count and gradients of every variant."""
    group = whole_world(rank, size)
    return {case: one(group, *case) for case in RUNS}


def one(group: Group, name, documents):
    model = filled(T5Model(t5_sizes(**VARIANTS[name]), place_of(group)).double())
    batch = vars(t5_batch(with_documents=documents))
    with torch.no_grad():
        logits = model(**{key: value for key, value in batch.items() if key not in ("labels", "loss_mask")})
    loss, count = model(**batch)
    (loss / count).backward()
    return logits, loss.item(), count.item(), gradients_of(model)


@functools.cache
def seen(size):
    return run_ranks(size, run, size) if size > 1 else [run(0, 1)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_the_model_equals_plain_torch(name, documents):
    sizes, batch = t5_sizes(**KINDS[name]), t5_batch(with_documents=documents)
    model = filled(T5Model(sizes).double())
    weights = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    logits = plain_logits(weights, sizes, batch)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    expected = (losses * batch.loss_mask.double().flatten()).sum() / batch.loss_mask.sum()
    expected.backward()
    own, loss, count, gradients = seen(1)[0][name, documents]
    assert (own.transpose(0, 1) - logits).abs().max() <= 1e-12 * logits.abs().max()
    assert abs(loss / count - expected.item()) <= 1e-12 * expected.item()
    worst, where = worst_relative(joined([gradients]), {key: weight.grad for key, weight in weights.items()})
    assert worst <= 1e-11, where


def equals_one_process(name, documents, size):
    logits, loss, count, gradients = seen(1)[0][name, documents]
    ranks = [results[name, documents] for results in seen(size)]
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (together - logits[..., :VOCAB]).abs().max() <= 1e-12 * logits.abs().max()
    assert {rank[2] for rank in ranks} == {count}
    assert all(abs(rank[1] - loss) <= 1e-12 * loss for rank in ranks)
    worst, where = worst_relative(joined([rank[3] for rank in ranks]), joined([gradients]))
    assert worst <= 1e-11, where


@pytest.mark.slow  # two tensor ranks equal Hugging Face's model: test_against_huggingface.py
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_two_tensor_ranks_together_equal_one_process(name, documents):
    equals_one_process(name, documents, 2)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_four_tensor_ranks_together_equal_one_process(name, documents):
    equals_one_process(name, documents, 4)


def test_padded_rows_of_tables_get_no_gradient_at_all():
    padded = 0
    for results in seen(2):
        for name, (shard, gradient) in results["vocabulary by 8", False][3].items():
            if name in ("embedding.word.weight", "head.weight"):
                padded += gradient.shape[0] - shard.length
                assert gradient[shard.length :].count_nonzero() == 0
    assert padded > 0


@pytest.mark.parametrize("name", KINDS)
def test_a_packed_document_gets_exactly_what_it_gets_alone(name):
    sizes, batch = t5_sizes(**KINDS[name]), t5_batch(with_documents=True)
    model, alone = (filled(T5Model(sizes).double()) for _ in range(2))
    packed, _ = model(**vars(batch))
    packed.backward()
    logits = model(**{**vars(batch), "labels": None})
    total = 0.0
    for i, number in [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]:
        enc, dec = batch.enc_segments[i] == number, batch.dec_segments[i] == number
        document = T5Batch(
            batch.enc_tokens[i][enc][None], batch.dec_tokens[i][dec][None], None, None,
            batch.labels[i][dec][None], torch.ones(1, int(dec.sum())),
        )  # fmt: skip
        own = alone(**{**vars(document), "labels": None})[:, 0]
        assert (logits[dec, i] - own).abs().max() <= 1e-12 * own.abs().max(), (i, number)
        loss, _ = alone(**vars(document))
        loss.backward()
        total += loss.item()
    assert abs(packed.item() - total) <= 1e-12 * total
    worst, where = worst_relative(*({n: p.grad for n, p in m.named_parameters()} for m in (model, alone)))
    assert worst <= 1e-11, where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_padding_alone_give_no_nan(name, dtype):
    model = filled(T5Model(t5_sizes(**KINDS[name])).to(dtype))
    batch = t5_batch(with_documents=True)
    batch.enc_segments[1], batch.dec_segments[0], batch.dec_segments[2] = -1, -1, 5  # 5 is nowhere in the encoder
    batch.loss_mask = (batch.dec_segments == 0).float()
    loss, count = model(**vars(batch))
    (loss / count).backward()
    assert loss.isfinite() and count == S_D
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model(**{**vars(batch), "labels": None}).isfinite().all()


def test_what_padding_holds_changes_nothing():
    model = filled(T5Model(t5_sizes()).double())
    batch = t5_batch(with_documents=True)
    loss, _ = model(**vars(batch))
    batch.enc_tokens = batch.enc_tokens.masked_fill(batch.enc_segments < 0, 7)
    batch.dec_tokens = batch.dec_tokens.masked_fill(batch.dec_segments < 0, 7)
    batch.labels = batch.labels.masked_fill(batch.dec_segments < 0, 7)
    assert torch.equal(model(**vars(batch))[0], loss)


def test_the_decoder_sees_no_later_token_and_the_encoder_sees_all():
    model = filled(T5Model(t5_sizes()).double())
    batch = t5_batch()
    logits = model(batch.enc_tokens, batch.dec_tokens)
    later = batch.dec_tokens.clone()
    later[:, 4] = (later[:, 4] + 1) % VOCAB
    changed = model(batch.enc_tokens, later)
    assert torch.equal(changed[:4], logits[:4]) and (changed[4:] != logits[4:]).any(dim=-1).all()
    last = batch.enc_tokens.clone()
    last[:, S_E - 1] = (last[:, S_E - 1] + 1) % VOCAB
    assert (model(last, batch.dec_tokens) != logits).any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_of_a_tied_table_is_whole_whichever_of_its_uses_comes_back_first(dtype):
    model = filled(T5Model(t5_sizes()).to(dtype))
    batch = t5_batch()
    for _ in range(2):  # micro-batches
        model(**vars(batch))[0].backward()
    table = model.embedding.word.weight.grad
    assert table.layout == torch.strided and table.is_contiguous()
    (found,) = torch.autograd.grad(model(**vars(batch))[0], [model.embedding.word.weight])
    assert found.layout == torch.strided
    assert (table - 2 * found).norm() <= 4 * torch.finfo(dtype).eps * table.norm()


def test_logical_names_are_those_of_checkpoints():
    sizes = t5_sizes(enc_layers=1, dec_layers=1, untie_embeddings=True, activation="gated-gelu")
    own = ["input_norm", "attention.query_key_value", "attention.dense", "post_attention_norm", "mlp.up", "mlp.down"]
    cross = ["cross_norm", *(f"cross_attention.{part}" for part in ("query", "key_value", "dense"))]
    names = ["embedding.word", "encoder.bias", "encoder.final_norm", "decoder.bias", "decoder.final_norm", "head"]
    names += [f"encoder.layers.0.{part}" for part in own] + [f"decoder.layers.0.{part}" for part in own + cross]
    assert sorted(name for name, _ in T5Model(sizes).named_parameters()) == sorted(f"{name}.weight" for name in names)
    learned = {name for name, _ in T5Model(t5_sizes(**LEARNED)).named_parameters()}
    assert "embedding.position.weight" in learned and not any("encoder.bias" in name for name in learned)


def test_the_table_of_relative_positions_is_cut_by_heads():
    table = T5Model(t5_sizes(), place_of(Group((0, 1), 1))).encoder.bias
    shard = shard_of(table.weight)
    assert table.weight.shape == (8, 2) and table.by_distance(S_E).shape == (2, 2 * S_E - 1)
    assert (shard.global_shape, shard.partition_dim, shard.start, shard.length) == ((8, 4), 1, 2, 2)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_attention_heads": 4}, "--num-attention-heads"),
        ({"num_attention_heads": 6}, "output_size"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, what):
    with pytest.raises(ValueError, match=f"{what} must be a multiple of --model-parallel-size, got"):
        T5Model(t5_sizes(**changes), place_of(Group((0, 1, 2), 0)))


def test_the_gradient_of_a_16_bit_bias_table_is_summed_in_32() -> None:
    size = 1024
    upstream = torch.randn(4, 2 * size - 1, generator=torch.Generator().manual_seed(1))
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        table = filled(RelativeBias(t5_sizes(), ParallelContext(), True)).to(dtype)
        table.by_distance(size).backward(upstream.bfloat16().to(dtype))
        grads[dtype] = table.weight.grad.float()
    exact = grads[torch.float32]
    assert (grads[torch.bfloat16] - exact).norm() <= 0.004 * exact.norm()  # rounding of the result alone
