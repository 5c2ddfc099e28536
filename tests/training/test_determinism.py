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
from megatron.training.determinism import WORKSPACE_VARIABLE
from tests.helpers.runs import make_flags, train_ranks

CPU_KERNELS = ("FlashAttention", "unfused torch operators")
FLAGS = "--data-path none --vocab-size 100".split()


@pytest.fixture(autouse=True)
def restore_determinism(monkeypatch):
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in (WORKSPACE_VARIABLE, *determinism.NCCL_SETTINGS):
        os.environ.pop(name, None)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True


def make_config(*extra, family="gpt2"):
    return parse([*FLAGS, *extra], world_size=1, family=family)


def configure_as(device_type, monkeypatch, *extra):
    """Settle as on a machine with that device; return (cuBLAS's setting, torch's)."""
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setattr(device_setup.device, "choose", lambda requested: device_type)
    device_setup.configure_device(make_config(*extra))
    return os.environ.get(WORKSPACE_VARIABLE), torch.are_deterministic_algorithms_enabled()


def test_deterministic_flag_configures_cuda_before_initialization(monkeypatch):
    assert configure_as("cuda", monkeypatch, "--deterministic") == (":4096:8", True)
    assert not torch.cuda.is_initialized()
    assert {name: os.environ.get(name) for name in determinism.NCCL_SETTINGS} == {
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    assert not torch.utils.deterministic.fill_uninitialized_memory, "a pass over memory that is written anyway"


def test_cuda_matmul_reduces_in_fp32_with_any_flags(monkeypatch):
    configure_as("cuda", monkeypatch)
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_bf16_reduced_precision_reduction and not matmul.allow_fp16_reduced_precision_reduction


def test_start_table_names_attention_kernels_except_on_cpu(monkeypatch):
    config, calls = make_config("--bf16", "--attention-dropout", "0"), []
    assert not list(kernel_rows.attention_rows(config, torch.device("cpu")))

    def fake_sdp_choice(query, key, value, mask, dropout, *, is_causal):
        calls.append((query.shape, query.dtype, query.requires_grad, mask is None, dropout, is_causal))
        return 3 if mask is None else 2

    monkeypatch.setattr(torch, "_fused_sdp_choice", fake_sdp_choice)
    (row,) = kernel_rows.attention_rows(config, torch.device("meta"))
    assert row == ("attention", "causal by cuDNN's, with a mask by the memory-efficient kernel")
    shape = (1, config.model.num_attention_heads, config.batch.seq_length, config.model.kv_hidden_size)
    assert calls == [(shape, torch.bfloat16, True, is_plain, 0.0, is_plain) for is_plain in (True, False)]
    mask_flags = ("--layout-independent-dropout", "--attention-dropout", "0.1")
    ((_, kernel_text),) = kernel_rows.attention_rows(make_config("--bf16", *mask_flags), torch.device("meta"))
    assert kernel_text.startswith("unfused torch operators")


def documents_row(device_type, *flags):
    config = make_config("--reset-attention-mask", *flags)
    return dict(kernel_rows.document_rows(config, torch.device(device_type)))["documents"]


def test_start_table_names_document_separation_method():
    no_dropout = ("--attention-dropout", "0")
    assert not list(kernel_rows.document_rows(make_config(*no_dropout), torch.device("cpu")))
    assert documents_row("cpu", *no_dropout) == "separated by start positions, without a mask"
    mask_text = "separated by a mask of [b, 1, s, s], one per stage: "
    assert (
        documents_row("cpu", "--attention-dropout", "0.1")
        == f"{mask_text}--attention-dropout 0.1 requires a mask; --attention-dropout 0 does not"
    )
    assert documents_row("meta", *no_dropout) == f"{mask_text}meta has no variable-length attention"
    t5 = make_config("--reset-attention-mask", family="t5")
    assert dict(kernel_rows.document_rows(t5, torch.device("cpu"))) == {
        "documents": "separated by masks of [b, 1, s, s], one per stage: scores have biases"
    }
    reason = functools.partial(decoder_cost.mask_reason, device_type="cuda")
    long_args = ("--seq-length", "1024", "--max-position-embeddings", "1024", *no_dropout)
    small_heads, large_heads = ("--num-attention-heads", "64"), ("--num-attention-heads", "1")
    for extra_args, expected_reason in (
        (("--fp64",), "CUDA kernels only support fp32 and 16-bit formats"),
        (("--fp32", *small_heads), "flex_attention supports head sizes from 16 to 256, got 8"),
        (
            ("--bf16", "--position-embedding-type", "alibi", *large_heads),
            "flex_attention supports head sizes from 16 to 256, got 512",
        ),
        (("--bf16", "--seq-length", "512", *small_heads), "flex_attention supports head sizes from 16 to 256, got 8"),
        (("--bf16", *small_heads), None),
        (("--fp32",), None),
        (("--bf16", "--seq-length", "512"), None),
        (("--bf16", "--position-embedding-type", "alibi"), None),
    ):
        assert reason(make_config("--hidden-size", "512", *long_args, *extra_args)) == expected_reason


@pytest.mark.parametrize(
    ("kernel", "expected_text"),
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
def test_start_table_names_cuda_kernel_for_documents_and_padding(kernel, expected_text, monkeypatch):
    calls = []

    def fake_select_implementation(x, length, head_size, *, is_plain):
        calls.append((length, is_plain))
        return kernel

    monkeypatch.setattr(document_attention, "select_implementation", fake_select_implementation)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    no_dropout = ("--attention-dropout", "0")
    assert documents_row("cuda", *no_dropout) == expected_text
    assert documents_row("cuda", *no_dropout, "--position-embedding-type", "alibi") == expected_text
    assert documents_row("cuda", *no_dropout, "--attn-logit-softcapping", "20") == expected_text
    bert = make_config(*no_dropout, family="bert")
    assert dict(kernel_rows.document_rows(bert, torch.device("cuda")))["documents"] == f"padding {expected_text}"
    assert [is_plain for _, is_plain in calls] == [True, False, False, False]


def test_start_table_names_padding_separation_if_padding_exists():
    def padding_row(*flags):
        return dict(kernel_rows.document_rows(make_config(*flags, family="bert"), torch.device("cpu")))

    assert padding_row("--attention-dropout", "0") == {
        "documents": "padding separated by start positions, without a mask"
    }
    assert "--attention-dropout 0.1 requires a mask" in padding_row("--attention-dropout", "0.1")["documents"]
    assert padding_row("--short-seq-prob", "0") == {}


def test_torch_reports_attention_kernel():
    config = make_config("--attention-dropout", "0", "--fp32")
    for has_mask in (False, True):
        assert kernel_rows.attention_kernel(config, torch.device("cpu"), has_mask=has_mask) in CPU_KERNELS


@pytest.mark.parametrize(("device_type", "extra"), [("cuda", []), ("cpu", []), ("cpu", ["--deterministic"])])
def test_determinism_is_not_configured_without_flag_or_cuda(device_type, extra, monkeypatch):
    assert configure_as(device_type, monkeypatch, *extra) == (None, False)


def test_deterministic_cublas_workspace_of_user_is_preserved(monkeypatch):
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":16:8")
    assert configure_as("cuda", monkeypatch, "--deterministic") == (":16:8", True)
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":0:0")
    with pytest.raises(
        ConfigError, match="needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8 in the environment, got ':0:0'"
    ):
        configure_as("cuda", monkeypatch, "--deterministic")


@pytest.mark.parametrize(
    ("device_type", "extra", "expected_text"),
    [
        ("cuda", [], "not bitwise identical"),
        ("cuda", ["--deterministic"], "bitwise identical in the same layout (--deterministic)"),
        ("cpu", ["--deterministic"], "on a CPU also without --deterministic"),
        ("cpu", [], None),
    ],
)
def test_start_table_states_resume_reproducibility(device_type, extra, expected_text):
    rows = list(determinism.determinism_rows(make_config(*extra), device_type))
    assert [name for name, _ in rows] == ([] if expected_text is None else ["resume"])
    assert expected_text is None or expected_text in rows[0][1]


def test_cpu_run_accepts_deterministic_flag_and_reports_resume_row(corpus, tmp_path, capfd):
    short_args = "--train-iters 1 --warmup 0 --eval-iters 0"
    assert train_ranks(1, make_flags(corpus, tmp_path / "run", f"{short_args} --deterministic"))[0] == [0]
    assert "│ resume " in capfd.readouterr().out
