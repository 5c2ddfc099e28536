"""The models that part ``speed`` times, and how much of each finds room on a device.

All contenders of a case hold their memory at once, for they take turns. Where they do not all find room, the batch gets
smaller, then contenders are left out from the end, then the model is a smaller slice; at last the case is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.sizes import LARGE, GPTSizes, LlamaSizes, Sizes, T5Sizes, config_of
from megatron.models import registry
from megatron.models.common.memory import Memory
from megatron.mpu.topology import Topology
from megatron.training.dry_run import stage_memory

OURS, COMPILED, HF, PLAIN = "ours", "ours-compiled", "hf", "plain"
GIB = 2**30
OF_A_PROCESS = 0.7 * GIB
"""Of each contender's process: the driver's context and the libraries' work space."""
USABLE, MARGIN = 0.94, 1.1
"""Share of the device that processes may fill, and what the allocator adds to ours."""
WRITTEN_OUT, LOGIT_BYTES, WEIGHT_BYTES = 2.5, 16, 18
"""Of other people's step under autocast: activations over ours (norms and GELU in fp32, written out), bytes of a logit
(16-bit and fp32, their softmax, both gradients), bytes of a parameter (fp32 with AdamW, and the copy in 16 bits)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One case of the part.

    Args:
        name: of the case: model and sequence length.
        title: of the model, in tables and pictures.
        slices: its sizes, the largest first; more than one where only a part of the model is meant to fit.
        contenders: the first is always ours.
        batches: sequences in a step, the largest first.
        steps: in a turn.
        has_look: one more step of ours is taken under the profiler.
    """

    name: str
    title: str
    slices: tuple[Sizes, ...]
    contenders: tuple[str, ...]
    batches: tuple[int, ...]
    steps: int = 5
    rounds: int = 5
    has_look: bool = False
    limit_s: float = 150.0


@dataclass(frozen=True)
class Fitted:
    """What of a model is run: sizes, sequences in a step, contenders, bytes that they are expected to hold together."""

    sizes: Sizes
    batch_size: int
    contenders: tuple[str, ...]
    expected_bytes: int


def gpt2(layers: int, hidden: int, heads: int, length: int) -> tuple[Sizes, ...]:
    """Return the sizes of a GPT-2 with its vocabulary, padded to a multiple of 64 as everybody has it."""
    return (
        GPTSizes(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=50304, seq_length=length),
    )


def t5_base(length: int) -> tuple[Sizes, ...]:
    """Return the sizes of T5-base with inputs of so many tokens."""
    return (T5Sizes(num_layers=12, hidden_size=768, num_attention_heads=12, enc_seq_length=length),)


def llama_7b(length: int) -> tuple[Sizes, ...]:
    """Return 5 and 2 layers of LLaMA 7B with its width, vocabulary and head."""
    slices = (replace(LARGE["llama"], num_layers=layers, seq_length=length) for layers in (5, 2))
    return tuple(slices)


SMALL, MEDIUM, XL = (12, 768, 12), (24, 1024, 16), (24, 2048, 16)
MODELS = (
    Model(
        name="gpt2 1.3b s2048", title="GPT-2 1.3B", slices=gpt2(*XL, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1), steps=3, has_look=True, limit_s=220.0,
    ),
    Model(
        name="t5-base s1024", title="T5-base", slices=t5_base(1024), contenders=(OURS, COMPILED, HF),
        batches=(16, 8, 4, 2, 1), has_look=True,
    ),
    Model(
        name="gpt2 125m s1024", title="GPT-2 125M", slices=gpt2(*SMALL, 1024), contenders=(OURS, COMPILED, HF, PLAIN),
        batches=(16, 8, 4, 2, 1),
    ),
    Model(
        name="llama 7b slice s2048", title="LLaMA 7B, a slice", slices=llama_7b(2048), contenders=(OURS, HF),
        batches=(4, 2, 1), steps=3,
    ),
    Model(
        name="gpt2 350m s1024", title="GPT-2 350M", slices=gpt2(*MEDIUM, 1024), contenders=(OURS, HF, PLAIN),
        batches=(16, 8, 4, 2, 1),
    ),
    Model(
        name="gpt2 1.3b s1024", title="GPT-2 1.3B", slices=gpt2(*XL, 1024), contenders=(OURS, HF, PLAIN),
        batches=(8, 4, 2, 1), steps=3,
    ),
    Model(
        name="gpt2 350m s2048", title="GPT-2 350M", slices=gpt2(*MEDIUM, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1),
    ),
    Model(
        name="t5-base s2048", title="T5-base", slices=t5_base(2048), contenders=(OURS, COMPILED), batches=(8, 4, 2, 1),
    ),
    Model(
        name="gpt2 125m s2048", title="GPT-2 125M", slices=gpt2(*SMALL, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1),
    ),
    Model(
        name="llama 7b slice s1024", title="LLaMA 7B, a slice", slices=llama_7b(1024), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1), steps=3,
    ),
)  # fmt: skip
"""The most telling first."""

_TOY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
TOYS: Mapping[str, tuple[Sizes, str]] = {
    "gpt2 1.3b s2048": (GPTSizes(**_TOY, seq_length=32), OURS),
    "t5-base s1024": (T5Sizes(**_TOY, enc_seq_length=32), OURS),
    "gpt2 125m s1024": (GPTSizes(**_TOY, seq_length=32), PLAIN),
    "llama 7b slice s2048": (LlamaSizes(**_TOY, seq_length=32, ff_hidden_size=176), HF),
}
"""Case of the dry form -> its sizes and its one contender."""


def models(*, is_dry: bool) -> Iterator[Model]:
    """Yield the cases; of the dry form a few at toy sizes with a contender each."""
    for model in MODELS:
        if not is_dry:
            yield model
        elif model.name in TOYS:
            sizes, contender = TOYS[model.name]
            yield replace(
                model, slices=(sizes,), contenders=(contender,), batches=(2,), steps=1, rounds=1, limit_s=300.0
            )


def config_for(sizes: Sizes, batch_size: int, kind: str, contender: str = OURS) -> Any:
    """Return the configuration of a run of ours on that kind of device, in bf16; on a CPU in fp32."""
    dtype = "fp32" if kind == "cpu" else "bf16"
    compiled = "--compile" if contender == COMPILED else ""
    return config_of(sizes, f"--batch-size {batch_size} --{dtype} --device {kind} --train-iters 1000 {compiled}")


def estimated(sizes: Sizes, batch_size: int, kind: str, contender: str = OURS) -> Memory:
    """Return what ``--dry-run`` says that ours holds."""
    config = config_for(sizes, batch_size, kind, contender)
    bounds = registry.costs_of(config).stage_bounds(1)
    (memory,) = stage_memory(config, Topology(pipe=1, data=1, tensor=1), bounds, config.precision.dtype)
    return memory


@functools.cache
def expected_bytes(sizes: Sizes, batch_size: int, contender: str) -> float:
    """Return about how much of a GPU a contender's process takes."""
    memory = estimated(sizes, batch_size, "cuda", contender)
    if contender in (OURS, COMPILED):
        return MARGIN * memory.total + OF_A_PROCESS
    parameters = registry.costs_of(config_of(sizes)).num_parameters
    targets = sizes.target_length if isinstance(sizes, T5Sizes) else sizes.seq_length
    logits = batch_size * targets * sizes.vocab_size * LOGIT_BYTES
    return WEIGHT_BYTES * parameters + WRITTEN_OUT * memory.activations + logits + OF_A_PROCESS


def fitted(model: Model, memory_bytes: int, below: int | None = None) -> Fitted | None:
    """Return what of ``model`` finds room in so many bytes, None for nothing.

    Args:
        below: only batches of fewer sequences: with ``below`` there was no room after all.
    """
    room = USABLE * memory_bytes - OF_A_PROCESS  # of the process that multiplies matrices
    batches = [batch for batch in model.batches if below is None or batch < below]
    for sizes in model.slices:
        for number in range(len(model.contenders), 0, -1):
            for batch in batches:
                names = model.contenders[:number]
                expected = sum(expected_bytes(sizes, batch, name) for name in names)
                if expected <= room:
                    return Fitted(sizes, batch, names, int(expected))
    return None
