"""``--deterministic``: what is set for CUDA and only there, and what the start table says."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from megatron.config import parse
from megatron.costs import decoder_cost
from megatron.errors import ConfigError
from megatron.ops import document_attention
from megatron.training import determinism, device_setup, kernel_rows
from megatron.training.determinism import WORKSPACE
from tests.helpers.runs import flags, train_ranks

KERNELS_OF_A_CPU = ("FlashAttention", "unfused torch operators")
FLAGS = "--data-path none --vocab-size 100".split()


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in (WORKSPACE, *determinism.NCCL_SUMS):
        os.environ.pop(name, None)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True


def config_of(*extra, family="gpt2"):
    return parse([*FLAGS, *extra], world_size=1, family=family)


def settle_as(kind, monkeypatch, *extra):
    """Settle as on a machine with that device; return (cuBLAS's setting, torch's)."""
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setattr(device_setup.device, "choose", lambda requested: kind)
    device_setup.configure_device(config_of(*extra))
    return os.environ.get(WORKSPACE), torch.are_deterministic_algorithms_enabled()


def test_cuda_is_told_to_repeat_itself_before_it_is_used(monkeypatch):
    assert settle_as("cuda", monkeypatch, "--deterministic") == (":4096:8", True)
    assert not torch.cuda.is_initialized()
    assert {name: os.environ.get(name) for name in determinism.NCCL_SUMS} == {
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    assert not torch.utils.deterministic.fill_uninitialized_memory, "a pass over memory that is written anyway"


def test_on_cuda_parts_of_a_sum_stay_in_32_bits_with_any_flags(monkeypatch):
    settle_as("cuda", monkeypatch)
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_bf16_reduced_precision_reduction and not matmul.allow_fp16_reduced_precision_reduction


def test_the_start_names_the_kernels_of_attention_but_on_a_cpu(monkeypatch):
    config, asked = config_of("--bf16", "--attention-dropout", "0"), []
    assert not list(kernel_rows.attention_rows(config, torch.device("cpu")))

    def choice(query, key, value, mask, dropout, *, is_causal):
        asked.append((query.shape, query.dtype, query.requires_grad, mask is None, dropout, is_causal))
        return 3 if mask is None else 2

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    (row,) = kernel_rows.attention_rows(config, torch.device("meta"))
    assert row == ("attention", "causal by cuDNN's, with a mask by the memory-efficient kernel")
    shape = (1, config.model.num_attention_heads, config.batch.seq_length, config.model.kv_hidden_size)
    assert asked == [(shape, torch.bfloat16, True, is_plain, 0.0, is_plain) for is_plain in (True, False)]
    flags_of_masks = ("--layout-independent-dropout", "--attention-dropout", "0.1")
    ((_, said),) = kernel_rows.attention_rows(config_of("--bf16", *flags_of_masks), torch.device("meta"))
    assert said.startswith("unfused torch operators")


def documents_row(place, *flags):
    config = config_of("--reset-attention-mask", *flags)
    return dict(kernel_rows.document_rows(config, torch.device(place)))["documents"]


def test_the_start_says_by_what_documents_are_kept_apart():
    none = ("--attention-dropout", "0")
    assert not list(kernel_rows.document_rows(config_of(*none), torch.device("cpu")))
    assert documents_row("cpu", *none) == "separated by start positions, without a mask"
    said = "separated by a mask of [b, 1, s, s], one per stage: "
    assert (
        documents_row("cpu", "--attention-dropout", "0.1")
        == f"{said}--attention-dropout 0.1 requires a mask, 0 does not"
    )
    assert documents_row("meta", *none) == f"{said}meta has no variable-length attention"
    t5 = config_of("--reset-attention-mask", family="t5")
    assert dict(kernel_rows.document_rows(t5, torch.device("cpu"))) == {
        "documents": "separated by masks of [b, 1, s, s], one per stage: scores have biases"
    }
    reason = functools.partial(decoder_cost.mask_reason, kind="cuda")
    long = ("--seq-length", "1024", "--max-position-embeddings", "1024", *none)
    small, large = ("--num-attention-heads", "64"), ("--num-attention-heads", "1")
    for words, why in (
        (("--fp64",), "CUDA kernels only support fp32 and 16-bit formats"),
        (("--fp32", *small), "flex_attention supports head sizes from 16 to 256, got 8"),
        (
            ("--bf16", "--position-embedding-type", "alibi", *large),
            "flex_attention supports head sizes from 16 to 256, got 512",
        ),
        (("--bf16", "--seq-length", "512", *small), "flex_attention supports head sizes from 16 to 256, got 8"),
        (("--bf16", *small), None),
        (("--fp32",), None),
        (("--bf16", "--seq-length", "512"), None),
        (("--bf16", "--position-embedding-type", "alibi"), None),
    ):
        assert reason(config_of("--hidden-size", "512", *long, *words)) == why


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("FlashAttention", "separated by start positions, without a mask, by FlashAttention"),
        (
            "flex_attention",
            "separated by start positions, without a mask, by flex_attention, which has not been run on a GPU yet",
        ),
        (
            None,
            "separated by a mask of [b, 1, s, s], one per stage: flex_attention needs Triton, which is not installed",
        ),
    ],
)
def test_on_cuda_the_start_names_the_kernel_of_documents_and_of_padding(way, said, monkeypatch):
    asked = []

    def way_of(x, length, head_size, *, is_plain):
        asked.append((length, is_plain))
        return way

    monkeypatch.setattr(document_attention, "way_of", way_of)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    none = ("--attention-dropout", "0")
    assert documents_row("cuda", *none) == said
    assert documents_row("cuda", *none, "--position-embedding-type", "alibi") == said
    assert documents_row("cuda", *none, "--attn-logit-softcapping", "20") == said
    bert = config_of(*none, family="bert")
    assert dict(kernel_rows.document_rows(bert, torch.device("cuda")))["documents"] == f"padding {said}"
    assert [is_plain for _, is_plain in asked] == [True, False, False, False]


def test_the_start_says_by_what_padding_is_kept_apart_where_there_is_some():
    def row(*flags):
        return dict(kernel_rows.document_rows(config_of(*flags, family="bert"), torch.device("cpu")))

    assert row("--attention-dropout", "0") == {"documents": "padding separated by start positions, without a mask"}
    assert "--attention-dropout 0.1 needs it" in row("--attention-dropout", "0.1")["documents"]
    assert row("--short-seq-prob", "0") == {}


def test_torch_answers_which_kernel_it_takes():
    config = config_of("--attention-dropout", "0", "--fp32")
    for has_mask in (False, True):
        assert kernel_rows.attention_kernel(config, torch.device("cpu"), has_mask=has_mask) in KERNELS_OF_A_CPU


@pytest.mark.parametrize(("kind", "extra"), [("cuda", []), ("cpu", []), ("cpu", ["--deterministic"])])
def test_nothing_is_set_without_the_flag_or_without_cuda(kind, extra, monkeypatch):
    assert settle_as(kind, monkeypatch, *extra) == (None, False)


def test_a_workspace_that_the_user_chose_is_kept_if_cublas_repeats_itself_with_it(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    assert settle_as("cuda", monkeypatch, "--deterministic") == (":16:8", True)
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(
        ConfigError, match="needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8 in the environment, got ':0:0'"
    ):
        settle_as("cuda", monkeypatch, "--deterministic")


@pytest.mark.parametrize(
    ("kind", "extra", "said"),
    [
        ("cuda", [], "not bitwise identical"),
        ("cuda", ["--deterministic"], "bitwise identical in the same layout (--deterministic)"),
        ("cpu", ["--deterministic"], "on a CPU also without --deterministic"),
        ("cpu", [], None),
    ],
)
def test_the_start_table_says_how_exactly_a_run_resumes(kind, extra, said):
    rows = list(determinism.determinism_rows(config_of(*extra), kind))
    assert [name for name, _ in rows] == ([] if said is None else ["resume"])
    assert said is None or said in rows[0][1]


def test_a_run_on_a_cpu_takes_the_flag_and_says_that_it_changes_nothing(corpus, tmp_path, capfd):
    short = "--train-iters 1 --warmup 0 --eval-iters 0"
    assert train_ranks(1, flags(corpus, tmp_path / "run", f"{short} --deterministic"))[0] == [0]
    assert "│ resume " in capfd.readouterr().out
