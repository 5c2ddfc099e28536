"""From a benchmark's sizes to the configuration of a run that trains such a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.sizes import Sizes

if TYPE_CHECKING:
    from megatron.config import Config

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
