"""Start-table rows on the kernels for weight gradients, dropout, loss, layers and attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend

from megatron import device
from megatron.config import Config
from megatron.config.decoder import ALIBI, ROPE
from megatron.config.layer_types import has_attention
from megatron.config.optimizer import BLOCKWISE
from megatron.costs.decoder_cost import mask_reason
from megatron.models import registry
from megatron.ops.attention import attention_kernels
from megatron.ops.fused_norm import MAX_WIDTH
from megatron.torch_compat import has_triton


def fusion_rows(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the row on weight-gradient accumulation; none on devices other than CUDA if it is not fused."""
    if config.fuses_accumulation(device_type):
        turn_off = "--no-gradient-accumulation-fusion turns this off"
        untested = "which has not been run on a GPU yet; " if device_type == "cuda" else ""
        yield "weight gradients", f"accumulated inside matrix products ({untested}{turn_off})"
    elif device_type == "cuda":
        exclusions = [
            (config.optimizer.zero_stage > 1, f"--zero-stage {config.optimizer.zero_stage}"),
            (config.parallel.compile, "--compile"),
        ]
        reasons = [flag for applies, flag in exclusions if applies] or ["--no-gradient-accumulation-fusion"]
        yield "weight gradients", f"accumulated by autograd, with {' and '.join(reasons)}"


def uses_triton(config: Config, device_type: str) -> bool:
    """Return True if Triton kernels are used where the project has them."""
    is_fp64 = config.precision.dtype == "fp64"
    return device_type == "cuda" and config.parallel.fused_kernels != "torch" and not is_fp64 and has_triton()


def loss_rows(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the start-table row on the cross-entropy kernels on CUDA."""
    if uses_triton(config, device_type):
        yield (
            "cross-entropy",
            "by Triton kernels that have not been run on a GPU yet (--fused-kernels torch uses torch's)",
        )


def triton_rows(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the start-table row on the Triton kernels in layers; dropout has a separate row."""
    operations = list(_operations_in_triton(config)) if uses_triton(config, device_type) else []
    if operations:
        yield (
            "Triton kernels",
            f"{', '.join(operations)}, by kernels that have not been run on a GPU yet (--fused-kernels torch uses "
            "torch's operators)",
        )


def _operations_in_triton(config: Config) -> Iterator[str]:
    """Yield the operations in uncompiled transformer layers that have a Triton kernel."""
    model = config.model
    if config.parallel.compile and not model.num_experts:
        return
    if model.position_embedding_type == ROPE:
        yield "rotary positions"
    if model.activation.startswith("gated-"):
        yield "gated activation"
    has_kernel = model.hidden_size <= MAX_WIDTH and config.parallel.fused_kernels != "apex"
    is_encoder = registry.family_of(config.family).model_type == "encoder"  # BERT's norms follow the residual sum
    if has_kernel and config.optimizer.zero_stage < 3 and not is_encoder:
        yield "norms with residual connections"


def fp8_rows(config: Config, device_type: str, *, is_known_model: bool) -> Iterator[tuple[str, str]]:
    """Yield the row on products in FP8.

    Args:
        is_known_model: the FLOPs of the model are known, because ``config`` describes it.
    """
    precision = config.precision
    if precision.fp8_format is None:
        return
    layers = precision.fp8_layers()
    first = layers["num_layers_at_start_in_bf16"]
    last = config.model.num_layers - layers["num_layers_at_end_in_bf16"] - 1
    kernels_text = "by kernels that have not been run on a GPU yet"
    if device_type != "cuda" or precision.fp8_recipe == BLOCKWISE:
        kernels_text = f"emulated in {'bf16' if device_type == 'cuda' else 'fp32'}"
    share = registry.costs_of(config).fp8_share if is_known_model else 0.0
    share_text = f", {100 * share:.0f} % of the FLOPs" if share else ""
    yield "FP8", f"{precision.fp8_format}, {precision.fp8_recipe}, layers {first} to {last}{share_text}, {kernels_text}"


def uses_dropout_kernel(config: Config, device_type: str) -> bool:
    """Return True if a Triton kernel generates the dropout masks."""
    return bool(config.model.hidden_dropout or config.model.attention_dropout) and uses_triton(config, device_type)


def dropout_rows(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the start-table row on the dropout kernel on CUDA."""
    if uses_dropout_kernel(config, device_type):
        yield "dropout", "by a Triton kernel that has not been run on a GPU yet (--fused-kernels torch uses torch's)"


def dropout_warning(config: Config, device_type: str) -> str | None:
    """Return the warning about ``--layout-independent-dropout`` on CUDA, or None if it does not apply."""
    model = config.model
    if device_type != "cuda" or not model.layout_independent_dropout:
        return None
    attention_text = "; attention dropout stores all probabilities in memory" if model.attention_dropout else ""
    if uses_dropout_kernel(config, device_type):
        return (
            "--layout-independent-dropout generates its masks with a Triton kernel that was compared with torch's "
            f"operators on a CPU, but has not been run on a GPU{attention_text}"
        )
    return (
        "--layout-independent-dropout generates each mask with about 100 torch operators. A step is estimated to take "
        f"6 to 7 times as long{attention_text}. Install Triton and leave --fused-kernels torch out"
    )


KERNEL_NAMES = {
    SDPBackend.ERROR: "no kernel of torch",
    SDPBackend.MATH: "unfused torch operators",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
    SDPBackend.OVERRIDEABLE: "the device's kernel",
}


def attention_rows(config: Config, torch_device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that names the attention kernels; none on a CPU and without attention."""
    if torch_device.type == "cpu" or not has_attention(config.model):
        return
    model = config.model
    if model.layout_independent_dropout and model.attention_dropout:
        yield "attention", "unfused torch operators, for the masks of --layout-independent-dropout"
        return
    causal_kernel, masked_kernel = (
        attention_kernel(config, torch_device, has_mask=has_mask) for has_mask in (False, True)
    )
    yield (
        "attention",
        f"causal by {causal_kernel}" + (f", with a mask by {masked_kernel}" if masked_kernel != causal_kernel else ""),
    )


def document_rows(config: Config, torch_device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the row on the separation of documents or padding in attention; none if neither is needed."""
    pads_samples = config.family_config.pads_samples
    if not config.data.separates_documents and not pads_samples:
        return
    if config.family_config.is_encoder_decoder:
        yield "documents", "separated by masks of [b, 1, s, s], one per stage: scores have biases"
        return
    kernel_text, reason = _document_kernel(
        config, torch_device, is_causal=registry.family_of(config.family).model_type == "decoder"
    )
    subject = "padding separated" if pads_samples else "separated"
    if reason is not None:
        yield "documents", f"{subject} by a mask of [b, 1, s, s], one per stage: {reason}"
        return
    yield "documents", f"{subject} by start positions, without a mask{kernel_text}"


def _document_kernel(config: Config, torch_device: torch.device, *, is_causal: bool) -> tuple[str, str | None]:
    """Describe the kernel that separates documents on ``torch_device``, or the reason to use a mask."""
    from megatron.ops.document_attention import FLEX, TILES, select_implementation  # imports torch's compiler

    model = config.model
    reason = mask_reason(config, torch_device.type, is_causal=is_causal)
    if reason is not None:
        return "", reason
    x = torch.empty(0, dtype=device.DTYPES[config.precision.dtype or "fp32"], device=torch_device)
    has_score_changes = model.position_embedding_type == ALIBI or model.attn_logit_softcapping > 0
    kernel = select_implementation(
        x, config.batch.seq_length, model.padded_head_size, is_plain=is_causal and not has_score_changes
    )
    if kernel is None:
        return "", "flex_attention needs Triton, which is not installed"
    return {TILES: "", FLEX: ", by flex_attention, which has not been run on a GPU yet"}.get(
        kernel, f", by {kernel}"
    ), None


def attention_kernel(config: Config, torch_device: torch.device, *, has_mask: bool) -> str:
    """Return the name of torch's attention kernel for one sample on ``torch_device``.

    Args:
        has_mask: attention has a mask, for separate documents, padding or position biases; otherwise it is causal.
    """
    model, length = config.model, config.batch.seq_length
    num_heads = max(1, model.num_attention_heads // config.parallel.model_parallel_size)
    shape, dtype = (1, num_heads, length, model.padded_head_size), device.DTYPES[config.precision.dtype or "fp32"]
    query, key, value = (torch.empty(shape, dtype=dtype, device=torch_device, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=torch_device) if has_mask else None
    with attention_kernels(mask):
        backend = torch._fused_sdp_choice(query, key, value, mask, model.attention_dropout, is_causal=not has_mask)
    return KERNEL_NAMES.get(SDPBackend(backend), str(backend))
