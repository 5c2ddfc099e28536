"""All Hugging Face formats of LLaMA-like decoders, in the order in which an export tries them."""

from __future__ import annotations

from megatron.models.llama import huggingface
from megatron.models.llama.huggingface_delta_types import DELTA_FORMATS
from megatron.models.llama.huggingface_dense_types import DENSE_FORMATS
from megatron.models.llama.huggingface_mamba_types import MAMBA_FORMATS

FORMATS = (*huggingface.FORMATS, *DENSE_FORMATS, *MAMBA_FORMATS, *DELTA_FORMATS)
