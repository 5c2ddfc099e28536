"""The contenders of ``step_time.py``: each a function that returns ``step(text) -> loss`` from the same first weights.

| name | what it is |
|---|---|
| ours | ``GPT2Model`` as ``pretrain_gpt2.py`` trains it without a pipeline: flags, DeepSpeed's engine, our optimizer |
| hf | Hugging Face's ``GPT2LMHeadModel`` as it ships, but with SDPA, no cache and dropout 0, in the plain loop |
| hf-fused-gelu | the same with torch's fused tanh GELU in place of Hugging Face's own |
| plain | ``plain_gpt.py``: a small script of ``torch.nn`` layers |

All four compute the same function. Modules are imported by the contender that needs them, so that the memory of one
does not hold the libraries of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from benchmarks.plain_gpt import GPTSizes, PlainGPT, PlainLoop
from megatron import device
from megatron.checkpoint.hf.gpt2 import from_ours
from megatron.checkpoint.naming import named_parameters
from megatron.model.gpt2 import GPT2Model
from megatron.model.init import initialize
from megatron.model.sizes import Sizes

SEED, STD, LR, CLIP_GRAD = 1234, 0.02, 3e-4, 1.0
Step = Callable[[torch.Tensor], torch.Tensor | float]


def our_weights(sizes: GPTSizes) -> dict[str, torch.Tensor]:
    """Return the weights that every contender starts from, by our logical names."""
    h, a = sizes.hidden_size, sizes.num_attention_heads
    full = Sizes(
        num_layers=sizes.num_layers,
        hidden_size=h,
        num_attention_heads=a,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.seq_length,
        kv_hidden_size=h // a,
        ff_hidden_size=4 * h,
    )
    parameters = dict(named_parameters(GPT2Model(full)))
    initialize(parameters.items(), seed=SEED, std=STD, num_layers=sizes.num_layers)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def ours(sizes: GPTSizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of our engine, built from flags as a user's run is."""
    import pretrain_gpt2
    from megatron.config import parse
    from megatron.mpu.random import DropoutStreams
    from megatron.training import arguments, world
    from megatron.training.assembly import build_engine

    os.environ.setdefault("DS_ACCELERATOR", kind)
    argv = (
        f"--num-layers {sizes.num_layers} --hidden-size {sizes.hidden_size} --seq-length {sizes.seq_length} "
        f"--num-attention-heads {sizes.num_attention_heads} --vocab-size {sizes.vocab_size} --batch-size {batch_size} "
        f"--activation gelu-tanh --hidden-bias --attention-dropout 0 --hidden-dropout 0 --init-method-std {STD} "
        f"--lr {LR} --weight-decay 0.01 --adam-beta2 0.999 --clip-grad {CLIP_GRAD} --seed {SEED} --{dtype} "
        f"--device {kind} --train-iters 1000 --data-path none"
    ).split()
    config = parse(argv, world_size=1).with_vocab(sizes.vocab_size)
    here = world.start(config)
    streams = DropoutStreams(SEED)
    arguments.set_current(config, SimpleNamespace(eod_id=0), streams)
    engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    numbers = iter(range(1_000_000_000))

    def step(text: torch.Tensor) -> float:
        batches: Iterator[dict[str, torch.Tensor]] = iter([{"text": text}])
        return engine.train_step(batches, next(numbers)).loss

    return step


def hf(sizes: GPTSizes, batch_size: int, kind: str, dtype: str, activation: str = "gelu_new") -> Step:
    """Return a step of Hugging Face's model in the plain loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.seq_length,
        n_embd=sizes.hidden_size,
        n_layer=sizes.num_layers,
        n_head=sizes.num_attention_heads,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
        loss_type="ForCausalLM",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.load_state_dict(from_ours(our_weights(sizes), sizes.num_attention_heads))

    class MeanLoss(torch.nn.Module):
        """Takes labels that are shifted already, as the plain model does."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss

    return _plain_loop(MeanLoss(), kind, dtype)


def hf_fused_gelu(sizes: GPTSizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of Hugging Face's model with a faster activation than it ships with."""
    return hf(sizes, batch_size, kind, dtype, activation="gelu_pytorch_tanh")


def plain(sizes: GPTSizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of the small script."""
    model = PlainGPT(sizes)
    theirs = from_ours(our_weights(sizes), sizes.num_attention_heads)
    model.load_state_dict(dict(_plain_state(theirs)))
    return _plain_loop(model, kind, dtype)


CONTENDERS: dict[str, Callable[[GPTSizes, int, str, str], Step]] = {
    "ours": ours,
    "hf": hf,
    "hf-fused-gelu": hf_fused_gelu,
    "plain": plain,
}

_PLAIN_NAMES = {
    "wte": "word",
    "wpe": "position",
    "ln_f": "final_norm",
    "ln_1": "attention_norm",
    "attn.c_attn": "qkv",
    "attn.c_proj": "attention_out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def _plain_state(theirs: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain model's names and weights; Hugging Face keeps its products transposed."""
    for name, weight in theirs.items():
        stem, _, kind = name.removeprefix("transformer.").rpartition(".")
        if stem == "lm_head":
            continue
        block, stem = (f"blocks.{stem.split('.')[1]}.", stem.split(".", 2)[2]) if stem.startswith("h.") else ("", stem)
        is_product = "c_" in stem and weight.dim() == 2
        yield f"{block}{_PLAIN_NAMES[stem]}.{kind}", weight.t() if is_product else weight


def _plain_loop(model: torch.nn.Module, kind: str, dtype: str) -> Step:
    place = device.bind(kind, 0)
    return PlainLoop(model, device=place, dtype=device.DTYPES[dtype], lr=LR, clip_grad=CLIP_GRAD).step
