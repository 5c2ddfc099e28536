"""Contenders of ``step_time.py``, each a function that returns ``step(batch) -> loss``, and their common sizes.

| family | name | contender |
|---|---|---|
| all | ours | the model as ``pretrain_*.py`` trains it without a pipeline: flags, DeepSpeed's engine, our optimizer |
| all | ours-compiled | the same with ``--compile`` |
| GPT-2 | hf | Hugging Face's ``GPT2LMHeadModel`` with SDPA, no cache, dropout 0, in the plain loop |
| GPT-2 | plain | ``PlainGPT``: a small script of ``torch.nn`` layers |
| GPT-2 | plain-compiled | the same after ``torch.compile`` of the full model and its loss |
| T5 | hf | ``T5ForConditionalGeneration`` with its default SDPA, no cache, dropout 0, in the plain loop |
| LLaMA | hf | ``LlamaForCausalLM`` with SDPA, no cache, in the plain loop |
| Youtu (multi-latent attention) | hf | ``YoutuForCausalLM`` with SDPA, no cache, in the plain loop |

All contenders of a family start from the same weights, train on the same random batches and compute the same function.
Only the functions that need DeepSpeed or transformers import them, so that the memory of a contender does not include
the libraries of another one.
The fields of the sizes have the names of the flags.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from megatron import device
from megatron.arguments import parse
from megatron.config import Config
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parameters import Rule, gpt2_rule, initialize, named_parameters
from megatron.models.gpt2.huggingface import from_ours
from megatron.models.llama.huggingface_formats import FORMATS
from megatron.models.registry import FAMILIES, build_model
from megatron.models.t5 import spans
from megatron.models.t5.huggingface import from_ours as t5_from_ours
from megatron.models.t5.model import T5Model, t5_model_args_from, t5_rule

START_ID = 0
"""Start token of a T5 decoder; for Hugging Face also the id of padding."""


@dataclass(frozen=True, kw_only=True)
class GPTSizes:
    """Sizes of a GPT-2 whose feed-forward layer is 4 times as wide as the model."""

    family: ClassVar[str] = "gpt2"
    model: ClassVar[str] = "gpt2"
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
    """Sizes of a LLaMA with as many key heads as query heads and an untied output head."""

    family: ClassVar[str] = "llama"
    model: ClassVar[str] = "llama"
    ff_hidden_size: int = 1408


@dataclass(frozen=True, kw_only=True)
class YoutuSizes(LlamaSizes):
    """Sizes of a dense decoder with multi-latent attention; the proportions are those of DeepSeek-V2-Lite."""

    model: ClassVar[str] = "youtu"
    num_attention_heads: int = 4
    q_lora_rank: int = 0
    kv_lora_rank: int = 128
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class T5Sizes:
    """Sizes of a T5 with equal numbers of layers on both sides; the default is Hugging Face's "t5-small".

    Args:
        dec_seq_length: number of targets; 0 to derive it from ``enc_seq_length`` (114 targets for 512 inputs).
    """

    family: ClassVar[str] = "t5"
    model: ClassVar[str] = "t5"
    num_layers: int = 6
    hidden_size: int = 512
    num_attention_heads: int = 8
    vocab_size: int = 32128
    enc_seq_length: int = 512
    dec_seq_length: int = 0

    @property
    def target_length(self) -> int:
        denoisers = spans.parse_denoisers("R", noise_density=0.15, mean_span_length=3.0)
        return self.dec_seq_length or spans.max_target_length(
            spans.raw_length(self.enc_seq_length, denoisers), denoisers
        )

    @property
    def tokens_per_sample(self) -> int:
        return self.enc_seq_length + self.target_length

    def batch(self, batch_size: int, step: int) -> dict[str, torch.Tensor]:
        """Return ``inputs`` [b, s_e] and ``targets`` [b, s_d] of a step with their segments, one document each."""
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
    "youtu": YoutuSizes(
        num_layers=5,
        hidden_size=4096,
        num_attention_heads=32,
        vocab_size=32000,
        seq_length=2048,
        ff_hidden_size=12288,
        kv_lora_rank=512,
    ),
}
"""Sizes with 1.3 billion parameters, for a GPU of 80 GB or more; for LLaMA, 5 of the 32 layers of the 7B model,
and the same layers with multi-latent attention for Youtu."""
LARGE_BATCH = {"gpt2": 8, "t5": 32, "llama": 4, "youtu": 4}


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _random(vocab_size: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=generator)


STD = 0.02
FLAGS = {
    "gpt2": f"--activation gelu-tanh --hidden-bias --init-method-std {STD}",
    "llama": f"--init-method-std {STD}",
    "youtu": f"--multi-latent-attention --latent-norm-epsilon 1e-6 --init-method-std {STD}",
    "t5": "--activation relu --layernorm-epsilon 1e-6",
}


def make_config(model_sizes: Sizes, extra_flags: str = "") -> Config:
    """Return the configuration of one process without dropout, parsed from flags; sizes of 0 are left out."""
    size_flags = {"--" + name.replace("_", "-"): str(size) for name, size in vars(model_sizes).items() if size}
    argv = [word for pair in size_flags.items() for word in pair]
    argv += (
        f"{FLAGS[model_sizes.model]} --attention-dropout 0 --hidden-dropout 0 --data-path none {extra_flags}".split()
    )
    return parse(argv, world_size=1, family=model_sizes.family).with_vocab(model_sizes.vocab_size)


SEED = 1234
LR, CLIP_GRAD = 3e-4, 1.0
Fields = Mapping[str, torch.Tensor]
Step = Callable[[Fields], torch.Tensor | float]
Contender = Callable[[Any, int, str, str], Step]


class Block(nn.Module):
    """A transformer layer: attention and feed-forward, each with a pre-norm and a residual connection.

    Shapes:
        input, output [b, s, h]
    """

    def __init__(self, model_sizes: GPTSizes) -> None:
        super().__init__()
        h = model_sizes.hidden_size
        self.num_heads = model_sizes.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.attention_out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (y.view(b, s, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).split(h, dim=2))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, a, s, d]
        return self.attention_out(context.transpose(1, 2).reshape(b, s, h))


class PlainGPT(nn.Module):
    """The model of a small single-process script; maps tokens and labels [b, s] to the mean cross-entropy.

    It has ``torch.nn`` layers with pre-norms, causal SDPA and a tied head.
    """

    def __init__(self, model_sizes: GPTSizes) -> None:
        super().__init__()
        self.word = nn.Embedding(model_sizes.vocab_size, model_sizes.hidden_size)
        self.position = nn.Embedding(model_sizes.seq_length, model_sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(model_sizes) for _ in range(model_sizes.num_layers))
        self.final_norm = nn.LayerNorm(model_sizes.hidden_size)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word(tokens) + self.position(positions)  # [b, s, h]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.word.weight)  # [b, s, v]
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class MeanLoss(nn.Module):
    """Wrapper that maps tokens and labels to the mean loss of a Hugging Face model.

    Args:
        label_names: names of the model's keyword arguments to which the labels are passed.
    """

    def __init__(self, inner: nn.Module, label_names: tuple[str, ...] = ("labels",)) -> None:
        super().__init__()
        self.inner, self.label_names = inner, label_names

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, use_cache=False, **dict.fromkeys(self.label_names, labels)).loss


class PlainLoop:
    """Training loop of a small script: no engine, fused AdamW, torch's clipping of gradients.

    Args:
        model: module that maps tokens and labels to the mean loss.
        split_batch: function from a batch to tokens and labels.
        dtype: bf16 runs the forward pass under autocast; the weights are fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        split_batch: Callable[[Fields], tuple[torch.Tensor, torch.Tensor]],
        *,
        device_type: str,
        dtype: str,
    ) -> None:
        self.device, self.dtype = device.bind(device_type, 0), device.DTYPES[dtype]
        self.model, self.split_batch = model.to(self.device).train(), split_batch
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def step(self, batch: Fields) -> torch.Tensor:
        """Train on ``batch`` and return the loss as a tensor, so that the host does not wait for a GPU."""
        tokens, labels = (tensor.to(self.device) for tensor in self.split_batch(batch))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            loss = self.model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def our_weights(model_sizes: GPTSizes) -> dict[str, torch.Tensor]:
    """Return the initial weights of every contender, by our logical names."""
    return initial_weights(
        DecoderModel(model_args_from(make_config(model_sizes).model)), gpt2_rule(STD, model_sizes.num_layers)
    )


def initial_weights(model: torch.nn.Module, rule: Rule) -> dict[str, torch.Tensor]:
    """Return the initial weights of our ``model`` by name, generated on as many threads as there are cores."""
    parameters = dict(named_parameters(model))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for future in [pool.submit(initialize, [item], seed=SEED, rule=rule) for item in parameters.items()]:
            future.result()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def our_step(model_sizes: Sizes, batch_size: int, device_type: str, dtype: str, extra_flags: str = "") -> Step:
    """Return the training step of our engine, built from flags like a user's run.

    Args:
        extra_flags: additional flags.
    """
    from megatron.mpu.random import DropoutStreams
    from megatron.training import global_vars
    from megatron.training.initialize import start
    from megatron.training.mock_data import mock_tokenizer
    from megatron.training.setup import build_engine

    os.environ.setdefault("DS_ACCELERATOR", device_type)
    script = importlib.import_module(FAMILIES[model_sizes.family].program.removesuffix(".py").replace("/", "."))
    config = make_config(
        model_sizes,
        f"--batch-size {batch_size} --lr {LR} --weight-decay 0.01 --adam-beta2 0.999 --clip-grad {CLIP_GRAD} "
        f"--seed {SEED} --{dtype} --device {device_type} --train-iters 1000 {extra_flags}",
    )
    world = start(config)
    streams = DropoutStreams(SEED)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, script.model_provider, script.forward_step)
    steps = iter(range(1_000_000_000))

    def step(batch: Fields) -> float:
        return engine.train_step(iter([batch]), next(steps)).loss

    return step


def hf_step(model_sizes: GPTSizes, batch_size: int, device_type: str, dtype: str) -> Step:
    """Return the step of Hugging Face's model in the plain loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=model_sizes.vocab_size,
        n_positions=model_sizes.seq_length,
        n_embd=model_sizes.hidden_size,
        n_layer=model_sizes.num_layers,
        n_head=model_sizes.num_attention_heads,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
        loss_type="ForCausalLM",
        bos_token_id=None,
        eos_token_id=None,
    )
    with device.bind(device_type, 0):  # weights are initialized on the GPU, although they are then replaced
        model = GPT2LMHeadModel(config)
    model.load_state_dict(from_ours(our_weights(model_sizes), model_sizes.num_attention_heads))
    return PlainLoop(
        MeanLoss(model, ("labels", "shift_labels")), _tokens_and_labels, device_type=device_type, dtype=dtype
    ).step


def plain_step(
    model_sizes: GPTSizes, batch_size: int, device_type: str, dtype: str, *, is_compiled: bool = False
) -> Step:
    """Return the training step of ``PlainGPT`` in the plain loop."""
    model = PlainGPT(model_sizes)
    hf_weights = from_ours(our_weights(model_sizes), model_sizes.num_attention_heads)
    model.load_state_dict(dict(_to_plain_names(hf_weights)))
    if is_compiled:
        model.compile(dynamic=False)
    return PlainLoop(model, _tokens_and_labels, device_type=device_type, dtype=dtype).step


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


def _to_plain_names(hf_weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert Hugging Face's weights to the names of ``PlainGPT``; Hugging Face stores the matrices transposed."""
    for name, weight in hf_weights.items():
        stem, _, suffix = name.removeprefix("transformer.").rpartition(".")
        if stem == "lm_head":
            continue
        block, stem = (f"blocks.{stem.split('.')[1]}.", stem.split(".", 2)[2]) if stem.startswith("h.") else ("", stem)
        is_matrix = "c_" in stem and weight.dim() == 2
        yield f"{block}{_PLAIN_NAMES[stem]}.{suffix}", weight.t() if is_matrix else weight


def _tokens_and_labels(batch: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [b, s]."""
    return batch["text"][:, :-1].contiguous(), batch["text"][:, 1:].contiguous()


def t5_weights(model_sizes: T5Sizes) -> dict[str, torch.Tensor]:
    """Return the initial weights of every contender, by our logical names."""
    config = make_config(model_sizes)
    args = t5_model_args_from(config.model, config.family_config)
    return initial_weights(T5Model(args), t5_rule(args, config.model.init_method_std))


def t5_hf_step(model_sizes: T5Sizes, batch_size: int, device_type: str, dtype: str) -> Step:
    """Return the step of Hugging Face's model in the plain loop."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=model_sizes.vocab_size,
        d_model=model_sizes.hidden_size,
        d_kv=model_sizes.hidden_size // model_sizes.num_attention_heads,
        d_ff=4 * model_sizes.hidden_size,
        num_layers=model_sizes.num_layers,
        num_heads=model_sizes.num_attention_heads,
        dropout_rate=0.0,
        use_cache=False,
        attn_implementation="sdpa",
        pad_token_id=START_ID,
        decoder_start_token_id=START_ID,
    )
    with device.bind(device_type, 0):
        model = T5ForConditionalGeneration(config)
    model.load_state_dict(t5_from_ours(t5_weights(model_sizes), model_sizes.num_attention_heads))
    return PlainLoop(MeanLoss(model), _inputs_and_targets, device_type=device_type, dtype=dtype).step


def _inputs_and_targets(batch: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [b, s_e] and targets [b, s_d]; Hugging Face's model shifts the targets itself."""
    return batch["inputs"], batch["targets"]


def decoder_hf_step(model_sizes: LlamaSizes, batch_size: int, device_type: str, dtype: str) -> Step:
    """Return the step of Hugging Face's class for the model type ``model_sizes.model`` in the plain loop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron.training.setup import init_rule

    our_config = make_config(model_sizes)
    (hf_format,) = (hf_format for hf_format in FORMATS if model_sizes.model in hf_format.model_types)
    settings = {
        name: value
        for name, value in hf_format.fields(our_config).items()
        if name not in ("architectures", "model_type")
    }
    config = AutoConfig.for_model(
        model_sizes.model,
        **settings | {"use_cache": False, "attn_implementation": "sdpa", "loss_type": "ForCausalLM"},
        bos_token_id=None,
        eos_token_id=None,
    )
    with device.bind(device_type, 0):
        model = AutoModelForCausalLM.from_config(config)
    weights = initial_weights(build_model(our_config, None), init_rule(our_config))
    model.load_state_dict(hf_format.from_ours(weights, our_config))
    return PlainLoop(
        MeanLoss(model, ("labels", "shift_labels")), _tokens_and_labels, device_type=device_type, dtype=dtype
    ).step


_OURS: dict[str, Contender] = {"ours": our_step, "ours-compiled": partial(our_step, extra_flags="--compile")}
_FP8: dict[str, Contender] = {"ours-fp8": partial(our_step, extra_flags="--fp8-format e4m3")}
CONTENDERS: dict[str, dict[str, Contender]] = {
    "gpt2": {
        **_OURS,
        **_FP8,
        "hf": hf_step,
        "plain": plain_step,
        "plain-compiled": partial(plain_step, is_compiled=True),
    },
    "t5": {**_OURS, "hf": t5_hf_step},
    "llama": {**_OURS, **_FP8, "hf": decoder_hf_step},
    "youtu": {**_OURS, "hf": decoder_hf_step},
}
"""Model -> name of a contender -> function that builds its training step."""
