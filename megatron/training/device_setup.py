"""One device for torch, DeepSpeed and plug-ins; --deterministic; --fused-kernels."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from megatron import accelerators, device
from megatron.accelerators import Accelerator, is_on
from megatron.arguments import check_device
from megatron.config import Config
from megatron.config.decoder import ALIBI
from megatron.errors import ConfigError
from megatron.models import registry
from megatron.models.common.decoder_cost import mask_reason
from megatron.mpu import fused_dropout
from megatron.ops.attention import attention_kernels

# ``--fused-kernels``: whose fused norm and Adam a run on CUDA uses, torch's or those of NVIDIA's apex.
#
# | flag | norms | AdamW |
# |---|---|---|
# | auto, torch | ``torch.nn.functional`` | ``torch.optim.AdamW(fused=True)`` |
# | apex | ``apex.normalization``, but for layer norms without a shift | ``apex.optimizers.FusedAdam``, if not offloaded |  # noqa: E501
#
# "auto" is torch's even where there is apex: what is installed must not change the numbers of a run, and nobody has
# measured apex to be faster here. Both are the same functions of their inputs, but for rounding. A checkpoint of one
# goes on with the other.

MODULES = ("apex.normalization.fused_layer_norm", "apex.optimizers", "fused_layer_norm_cuda", "amp_C")
"""What is imported of apex: its Python files, and the extensions without which they fail at the first call."""


def check_fused_kernels(config: Config, kind: str) -> None:
    """Check that apex can be used where it is asked for.

    Raises:
        ConfigError: it cannot.
    """
    if config.parallel.fused_kernels != "apex":
        return
    if kind != "cuda":
        raise ConfigError(
            f"--fused-kernels apex needs a GPU, got --device {kind}: apex has kernels for CUDA only. Leave it out"
        )
    if config.precision.dtype == "fp64":
        raise ConfigError("--fused-kernels apex needs fp32, bf16 or fp16, got --fp64. Use --fused-kernels torch")
    if missing := _missing():
        raise ConfigError(
            f"--fused-kernels apex needs NVIDIA's apex with its CUDA extensions, got {missing}. Build apex with "
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or use --fused-kernels torch, which needs nothing"
        )


def _missing() -> str | None:
    """Return why apex cannot be used here, or None."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return str(error)
    return None


def use_norms(config: Config, module: torch.nn.Module) -> int:
    """Let the norms of ``module`` use apex's kernels, if that is chosen; return how many do."""
    if config.parallel.fused_kernels != "apex":
        return 0
    # Not at the top: with the compiler that models bring it costs a second, which a tool without a model is spared.
    from megatron.models.common.norms import LayerNorm, RMSNorm

    num_norms = 0
    for norm in module.modules():
        if isinstance(norm, RMSNorm):
            norm.kernel, num_norms = apex_rms_norm, num_norms + 1
        elif isinstance(norm, LayerNorm) and norm.bias is not None:  # apex has none without a shift
            norm.kernel, num_norms = apex_layer_norm, num_norms + 1
    return num_norms


def apex_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As ``megatron.models.common.norms.layer_norm``, by apex."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, (x.shape[-1],), epsilon)


def apex_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As ``megatron.models.common.norms.rms_norm``, by apex."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, (x.shape[-1],), epsilon)


def uses_adam(config: Config) -> bool:
    """Return whether the optimizer is apex's: AdamW with its states on the GPU, in fp32."""
    settings = config.optimizer
    is_on_gpu = not settings.offload_optimizer
    return (
        config.parallel.fused_kernels == "apex"
        and settings.optimizer == "adamw"
        and is_on_gpu
        and not settings.bf16_states
    )


def apex_adam(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return apex's FusedAdam over ``groups``; ``settings`` as of ``torch.optim.AdamW``.

    apex counts steps by group. Checkpoints hold them by parameter, as torch does, so they are kept there too.
    """
    from apex.optimizers import FusedAdam

    class CountedAdam(FusedAdam):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, *args: Any, **kwargs: Any) -> Any:
            for group in self.param_groups:
                counts = [self.state[p]["step"] for p in group["params"] if "step" in self.state.get(p, ())]
                group["step"] = counts[0] if counts else 0
            result = super().step(*args, **kwargs)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self.state.get(parameter):
                        self.state[parameter]["step"] = group["step"]
            return result

    return CountedAdam(groups, adam_w_mode=True, **settings)


def fused_kernel_rows(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says whose kernels are used."""
    if config.parallel.fused_kernels == "apex":
        others = "" if uses_adam(config) else "; the optimizer is not apex's: it has AdamW on the GPU alone"
        yield "fused kernels", f"apex's norms{' and AdamW' if uses_adam(config) else ''}{others}"
    elif kind == "cuda" and config.parallel.fused_kernels == "auto" and _missing() is None:
        yield "fused kernels", "torch's (apex is here too: --fused-kernels apex takes its norms and AdamW)"
    else:
        yield "fused kernels", "torch's"


# Dropout by a kernel in Triton, on CUDA (``megatron.mpu.fused_dropout``).


def drops_by_kernel(config: Config, kind: str) -> bool:
    """Return whether the masks of dropout are made by Triton's kernel."""
    model, is_wide = config.model, config.precision.dtype == "fp64"
    is_asked = kind == "cuda" and config.parallel.fused_kernels != "torch" and not is_wide
    return is_asked and bool(model.hidden_dropout or model.attention_dropout) and fused_dropout.is_there()


def dropout_rows(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says by what elements are dropped on CUDA."""
    if drops_by_kernel(config, kind):
        yield "dropout", "by a kernel in Triton, which no GPU has run yet (--fused-kernels torch takes torch's)"


def dropout_warning(config: Config, kind: str) -> str | None:
    """Return what to say of ``--layout-independent-dropout`` on CUDA, None where there is nothing to say."""
    model = config.model
    if kind != "cuda" or not model.layout_independent_dropout:
        return None
    attention = "; dropout of attention keeps all probabilities in memory" if model.attention_dropout else ""
    if drops_by_kernel(config, kind):
        return (
            "--layout-independent-dropout makes its masks by a kernel in Triton that has been held against torch's "
            f"operators on a CPU and not been run on a GPU{attention}"
        )
    return (
        "--layout-independent-dropout makes each mask by some 100 operators of torch's, by which a step is estimated "
        f"to take 6 to 7 times as long{attention}. Install Triton and leave --fused-kernels torch out"
    )


# Attention: which kernel torch takes, for the start table.

KERNEL_NAMES = {
    SDPBackend.ERROR: "none that torch has",
    SDPBackend.MATH: "torch's operators one by one",
    SDPBackend.FLASH_ATTENTION: "FlashAttention",
    SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
    SDPBackend.OVERRIDEABLE: "the device's own",
}


def attention_rows(config: Config, place: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that names the kernels of attention; none on a CPU."""
    if place.type == "cpu":
        return
    model = config.model
    if model.layout_independent_dropout and model.attention_dropout:
        yield "attention", "torch's operators one by one, for the masks of --layout-independent-dropout"
        return
    plain, masked = (attention_kernel(config, place, has_mask=has_mask) for has_mask in (False, True))
    yield "attention", f"causal by {plain}" + (f", with a mask by {masked}" if masked != plain else "")


def document_rows(config: Config, place: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says by what documents, or padding, are kept apart, where they are."""
    pads = config.own.pads_samples
    if not config.data.keeps_documents_apart and not pads:
        return
    if config.own.is_encoder_decoder:
        yield "documents", "apart by masks of [b, 1, s, s], one a stage: scores have biases"
        return
    how, reason = _way_of_documents(config, place, is_causal=registry.family_of(config.family).kind == "decoder")
    what = "padding apart" if pads else "apart"
    if reason is not None:
        yield "documents", f"{what} by a mask of [b, 1, s, s], one a stage: {reason}"
        return
    yield "documents", f"{what} by where each begins, without a mask{how}"


def _way_of_documents(config: Config, place: torch.device, *, is_causal: bool) -> tuple[str, str | None]:
    """Return by what documents are kept apart on ``place``, or why by a mask."""
    from megatron.ops.document_attention import BLOCKS, TILES, way_of  # not ahead of need: it loads torch's compiler

    model = config.model
    reason = mask_reason(config, place.type, is_causal=is_causal)
    if reason is not None:
        return "", reason
    x = torch.empty(0, dtype=device.DTYPES[config.precision.dtype or "fp32"], device=place)
    has_more = model.position_embedding_type == ALIBI or model.attn_logit_softcapping > 0
    way = way_of(x, config.batch.seq_length, model.kv_hidden_size, is_plain=is_causal and not has_more)
    if way is None:
        return "", "flex_attention needs Triton, which is not installed"
    return {TILES: "", BLOCKS: ", by flex_attention, which no GPU has run yet"}.get(way, f", by {way}"), None


def attention_kernel(config: Config, place: torch.device, *, has_mask: bool) -> str:
    """Return by what torch computes the attention of one sample on ``place``, in words.

    Args:
        has_mask: as of documents kept apart, of padding, or of positions in the scores; else it is causal.
    """
    model, length = config.model, config.batch.seq_length
    heads = max(1, model.num_attention_heads // config.parallel.model_parallel_size)
    shape, dtype = (1, heads, length, model.kv_hidden_size), device.DTYPES[config.precision.dtype or "fp32"]
    query, key, value = (torch.empty(shape, dtype=dtype, device=place, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=place) if has_mask else None
    with attention_kernels(mask):
        chosen = torch._fused_sdp_choice(query, key, value, mask, model.attention_dropout, is_causal=not has_mask)
    return KERNEL_NAMES.get(SDPBackend(chosen), str(chosen))


# ``--deterministic``: the same sums in the same order every time, on devices that need to be told.
#
# CPUs are that way: one thread count gives one result. On CUDA many kernels add in whatever order their blocks finish.

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS repeats itself, as its documentation on reproducibility has them; the first is faster."""
NCCL_SUMS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""One order of sums for every start: left alone, NCCL chooses by size and by what it finds of the machine."""


def configure_determinism(config: Config, kind: str) -> None:
    """Tell torch and cuBLAS to repeat themselves if the flag asks for it; before CUDA is first used.

    Raises:
        ConfigError: the environment asks cuBLAS for a workspace with which it does not.
    """
    if not config.run.deterministic or kind == "cpu":
        return
    if kind == "cuda":
        _configure_workspace()
        for name, value in NCCL_SUMS.items():
            os.environ.setdefault(name, value)
        # A pass over each new tensor, against reading it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def _configure_workspace() -> None:
    asked = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if asked not in WORKSPACES:
        raise ConfigError(
            f"with --deterministic the environment's {WORKSPACE} must be {' or '.join(WORKSPACES)}, got {asked!r}. "
            "Unset it, or leave the flag out"
        )


def determinism_rows(config: Config, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says how exactly a run resumes, where there is something to say."""
    asked = config.run.deterministic
    if kind == "cuda" and asked:
        yield "resume", "bit for bit in the same layout (--deterministic)"
    elif kind == "cuda":
        yield "resume", "not bit for bit: kernels on this device add in any order; --deterministic makes it so, slower"
    elif asked and kind != "cpu":
        yield "resume", f"bit for bit in the same layout, as far as the kernels of {kind} hold to it (--deterministic)"
    elif asked:
        yield "resume", "bit for bit in the same layout; on a CPU so without --deterministic, too"


# Make the seam ``megatron.device`` and DeepSpeed use one device.
#
# DeepSpeed chooses for itself when it is imported and says so, so it is told before, by DS_ACCELERATOR. For the device
# of a plug-in it may be given the plug-in's own accelerator object; what the plug-in leaves open, the object says.


def configure_device(config: Config) -> str:
    """Choose the kind of device, and whether it repeats itself to the bit, and return the kind.

    A plug-in's device is made ready here, and its adaptors are applied; a second call changes nothing.

    Raises:
        ConfigError: --device asks for one that is not there, a plug-in does not fit, or --deterministic cannot be held.
    """
    try:
        kind = device.choose(config.parallel.device)
        plugin = accelerators.find(kind)
        if plugin is not None and accelerators.applied(kind) is None:
            _open(plugin)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    os.environ["DS_ACCELERATOR"] = kind
    if kind == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # parts of a sum stay in fp32
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    configure_determinism(config, kind)
    return kind


def _open(plugin: Accelerator) -> None:
    """Make a plug-in's device ready, first for torch, then for DeepSpeed, and apply its adaptors."""
    device.prepare(plugin.name)
    # DeepSpeed takes one of its own when it is imported, which an adaptor may do, and knows ours by its name or not.
    os.environ["DS_ACCELERATOR"] = plugin.name if plugin.deepspeed is None else "cpu"
    if plugin.deepspeed is not None:
        from deepspeed.accelerator import set_accelerator

        set_accelerator(plugin.deepspeed())
    accelerators.adapt(plugin.name)


def check_device_fits(config: Config, kind: str) -> None:
    """Check that the device computes in the number format that was said, if one was, and has the kernels asked for.

    Raises:
        ConfigError: it does not.
    """
    if kind in accelerators.BUILT_IN:
        check_device(config, kind == "cuda", kind != "cuda" or device.default_precision(kind) == "bf16")
    elif problem := device.missing_dtype(kind, config.precision.dtype):
        raise ConfigError(problem)
    check_fused_kernels(config, kind)


def check_agreement(kind: str) -> None:
    """Check that DeepSpeed, which has been imported, works on this kind of device too.

    Raises:
        ConfigError: it chose another one.
    """
    from deepspeed.accelerator import get_accelerator

    theirs = get_accelerator().device_name().partition(":")[0]
    if theirs != kind:
        raise ConfigError(
            f"DeepSpeed must use the device of --device, got {theirs} and {kind}: it was imported before the "
            f"device was chosen. Set DS_ACCELERATOR={kind} in the environment"
        )


def backend_of(kind: str) -> str:
    """Return torch.distributed's backend for this kind: the seam's, or where that is open DeepSpeed's accelerator's."""
    own = device.backend(kind)
    if own:
        return own
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().communication_backend_name()


def device_rows(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says which adaptors of a plug-in are on."""
    plugin = accelerators.find(kind)
    if plugin is None or not plugin.adaptors:
        return
    adaptors = [f"{a.part}: {a.name} ({len(a.patches)}){'' if is_on(a) else ', off'}" for a in plugin.adaptors]
    yield "adaptors", "; ".join(adaptors)
