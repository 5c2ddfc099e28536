"""The contenders of ``step_time.py``: each a function that returns ``step(batch) -> loss`` from the same first weights.

| of | name | what it is |
|---|---|---|
| all | ours | the model as ``pretrain_*.py`` trains it without a pipeline: flags, DeepSpeed's engine, our optimizer |
| all | ours-compiled | the same with ``--compile`` |
| GPT-2 | hf | Hugging Face's ``GPT2LMHeadModel`` as it ships but with SDPA, no cache, dropout 0, in the plain loop |
| GPT-2 | hf-fused-gelu | the same with torch's fused tanh GELU in place of Hugging Face's own |
| GPT-2 | plain | ``plain_gpt.py``: a small script of ``torch.nn`` layers |
| GPT-2 | plain-compiled | the same after ``torch.compile`` of the whole model and its loss |
| T5 | hf | its ``T5ForConditionalGeneration`` as it ships, which is with SDPA, but no cache, dropout 0, in that loop |
| T5 | hf-eager | the same with its attention written out |

All of a family compute the same function. Modules are imported by the contender that needs them, so that the memory of
one does not hold the libraries of another. Those of T5 are in ``t5_contenders.py``, those of LLaMA in
``llama_contenders.py``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.flags import STD, config_of
from benchmarks.plain_gpt import PlainGPT
from benchmarks.plain_loop import CLIP_GRAD, LR, Fields, MeanLoss, PlainLoop, Step
from benchmarks.sizes import GPTSizes, Sizes
from megatron import device
from megatron.models.common.decoder import GPT2Model
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parameters import Rule, gpt2_rule, initialize, named_parameters
from megatron.models.gpt2.huggingface import from_ours
from megatron.models.registry import FAMILIES

SEED = 1234
Contender = Callable[[Any, int, str, str], Step]


def our_weights(sizes: GPTSizes) -> dict[str, torch.Tensor]:
    """Return the weights that every contender starts from, by our logical names."""
    return filled(GPT2Model(model_args_from(config_of(sizes).model)), gpt2_rule(STD, sizes.num_layers))


def filled(model: torch.nn.Module, rule: Rule) -> dict[str, torch.Tensor]:
    """Return the first weights of our ``model`` by name, drawn on as many threads as there are cores."""
    parameters = dict(named_parameters(model))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(initialize, [item], seed=SEED, rule=rule) for item in parameters.items()]:
            done.result()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def ours(sizes: Sizes, batch_size: int, kind: str, dtype: str, more: str = "") -> Step:
    """Return a step of our engine, built from flags as a user's run is; ``more`` are further flags."""
    from megatron.mpu.random import DropoutStreams
    from megatron.training import global_vars
    from megatron.training.initialize import start
    from megatron.training.parity import mock_tokenizer
    from megatron.training.setup import build_engine

    os.environ.setdefault("DS_ACCELERATOR", kind)
    script = importlib.import_module(FAMILIES[sizes.family].program.removesuffix(".py").replace("/", "."))
    config = config_of(
        sizes,
        f"--batch-size {batch_size} --lr {LR} --weight-decay 0.01 --adam-beta2 0.999 --clip-grad {CLIP_GRAD} "
        f"--seed {SEED} --{dtype} --device {kind} --train-iters 1000 {more}",
    )
    here = start(config)
    streams = DropoutStreams(SEED)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, script.model_provider, script.forward_step)
    numbers = iter(range(1_000_000_000))

    def step(batch: Fields) -> float:
        return engine.train_step(iter([batch]), next(numbers)).loss

    return step


def ours_compiled(sizes: Sizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of our engine with compiled layers."""
    return ours(sizes, batch_size, kind, dtype, "--compile")


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
    with device.bind(kind, 0):  # a GPU draws the weights that are replaced at once
        model = GPT2LMHeadModel(config)
    model.load_state_dict(from_ours(our_weights(sizes), sizes.num_attention_heads))
    return PlainLoop(MeanLoss(model, ("labels", "shift_labels")), _shifted, kind=kind, dtype=dtype).step


def hf_fused_gelu(sizes: GPTSizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of Hugging Face's model with a faster activation than it ships with."""
    return hf(sizes, batch_size, kind, dtype, activation="gelu_pytorch_tanh")


def plain(sizes: GPTSizes, batch_size: int, kind: str, dtype: str, *, is_compiled: bool = False) -> Step:
    """Return a step of the small script."""
    model = PlainGPT(sizes)
    theirs = from_ours(our_weights(sizes), sizes.num_attention_heads)
    model.load_state_dict(dict(_plain_state(theirs)))
    if is_compiled:
        model.compile(dynamic=False)
    return PlainLoop(model, _shifted, kind=kind, dtype=dtype).step


def plain_compiled(sizes: GPTSizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of the small script as its users run it when they have a compiler."""
    return plain(sizes, batch_size, kind, dtype, is_compiled=True)


CONTENDERS: dict[str, Contender] = {
    "ours": ours,
    "ours-compiled": ours_compiled,
    "hf": hf,
    "hf-fused-gelu": hf_fused_gelu,
    "plain": plain,
    "plain-compiled": plain_compiled,
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


def _shifted(batch: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [b, s]."""
    return batch["text"][:, :-1].contiguous(), batch["text"][:, 1:].contiguous()
