"""The sizes that all contenders of a benchmark share, the random batches they train on, and the configuration of a run.

Names are as in the flags: each field is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from megatron.models.t5 import spans

if TYPE_CHECKING:
    from megatron.config import Config

START_ID = 0
"""What the decoder of a T5 begins with; for Hugging Face the id of padding, too."""


@dataclass(frozen=True, kw_only=True)
class GPTSizes:
    """A GPT-2; the feed-forward layer is 4 times as wide as the model."""

    family: ClassVar[str] = "gpt2"
    num_layers: int = 8
    hidden_size: int = 512
    num_attention_heads: int = 8
    vocab_size: int = 16384
    seq_length: int = 512

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_length

    @property
    def text(self) -> str:
        return f"{self.num_layers} layers, vocabulary {self.vocab_size}"

    def batch(self, batch_size: int, step: int) -> dict[str, torch.Tensor]:
        """Return the ``text`` [b, s+1] of a step, the same for every contender."""
        return {"text": _random(self.vocab_size, (batch_size, self.seq_length + 1), _generator(step))}


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(GPTSizes):
    """A LLaMA with as many heads for keys as for queries, and a head of its own."""

    family: ClassVar[str] = "llama"
    ff_hidden_size: int = 1408


@dataclass(frozen=True, kw_only=True)
class T5Sizes:
    """A T5 with as many layers on each side; the default is Hugging Face's "t5-small".

    Args:
        dec_seq_length: 0 for the targets that inputs of ``enc_seq_length`` leave: 512 have 114.
    """

    family: ClassVar[str] = "t5"
    num_layers: int = 6
    hidden_size: int = 512
    num_attention_heads: int = 8
    vocab_size: int = 32128
    enc_seq_length: int = 512
    dec_seq_length: int = 0

    @property
    def target_length(self) -> int:
        kinds = spans.parse_denoisers("R", noise_density=0.15, mean_span_length=3.0)
        return self.dec_seq_length or spans.longest_target(spans.raw_length(self.enc_seq_length, kinds), kinds)

    @property
    def tokens_per_sample(self) -> int:
        return self.enc_seq_length + self.target_length

    @property
    def text(self) -> str:
        return (
            f"{self.num_layers}+{self.num_layers} layers, {self.enc_seq_length}+{self.target_length} tokens, "
            f"vocabulary {self.vocab_size}"
        )

    def batch(self, batch_size: int, step: int) -> dict[str, torch.Tensor]:
        """Return ``inputs`` [b, s_e] and ``targets`` [b, s_d] of a step with their segments: one document each."""
        generator, fields = _generator(step), {}
        for name, side, length in (("inputs", "enc", self.enc_seq_length), ("targets", "dec", self.target_length)):
            fields[name] = _random(self.vocab_size, (batch_size, length), generator)
            fields[f"{side}_segments"] = torch.zeros(batch_size, length, dtype=torch.int32)
        return fields


Sizes = GPTSizes | LlamaSizes | T5Sizes
LARGE: dict[str, Sizes] = {
    "gpt2": GPTSizes(num_layers=24, hidden_size=2048, num_attention_heads=16, vocab_size=50304, seq_length=2048),
    "t5": T5Sizes(num_layers=24, hidden_size=1344, num_attention_heads=21),
    "llama": LlamaSizes(
        num_layers=5,
        hidden_size=4096,
        num_attention_heads=32,
        vocab_size=32000,
        seq_length=2048,
        ff_hidden_size=11008,
    ),
}
"""1.3 billion parameters each, for a GPU of 80 GB or more; of LLaMA it is 5 of the 32 layers of the 7B model."""
LARGE_BATCH = {"gpt2": 8, "t5": 32, "llama": 4}


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _random(vocab_size: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=generator)


STD = 0.02
FLAGS = {
    "gpt2": f"--activation gelu-tanh --hidden-bias --init-method-std {STD}",
    "llama": f"--init-method-std {STD}",
    "t5": "--activation relu --layernorm-epsilon 1e-6",
}


def config_of(sizes: Sizes, more: str = "") -> Config:
    """Return the configuration of one process without dropout, as a user's flags give it; a size of 0 is left out."""
    from megatron.arguments import parse

    given = {"--" + name.replace("_", "-"): str(size) for name, size in vars(sizes).items() if size}
    argv = [word for pair in given.items() for word in pair]
    argv += f"{FLAGS[sizes.family]} --attention-dropout 0 --hidden-dropout 0 --data-path none {more}".split()
    return parse(argv, world_size=1, family=sizes.family).with_vocab(sizes.vocab_size)
