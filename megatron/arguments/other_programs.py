"""Defaults of other trainers' GPT, BERT and T5 programs, for settings that their scripts omit.

| program of this project | scripts that start it | defaults of omitted settings |
|---|---|---|
| pretrain_gpt2.py | CPM-Pretrain's and our own | our defaults |
| pretrain_gpt.py | Megatron-LM's, Megatron-DeepSpeed's, BigScience's | ``GPT``: Megatron's defaults |
| pretrain_bert.py | Megatron-LM's, Megatron-DeepSpeed's, BigScience's | ``BERT`` |
| pretrain_t5.py | ours, CPM-Pretrain's | our defaults |
| | Megatron's, recognised by its length flags next to --max-position-embeddings | ``T5`` |

Source: Megatron-LM, arguments.py, and the configuration classes from which its groups of flags are generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.arguments.scan import Scan
from megatron.config.experts import AUX_LOSS
from megatron.models.registry import FAMILIES

if TYPE_CHECKING:
    from megatron.config.config import Config

MEGATRON: Mapping[str, Any] = MappingProxyType(
    {
        "activation": "gelu-tanh",  # the fused kernel, which is on by default, computes this form
        "lr_decay_style": "linear",
        "lr_wsd_decay_style": "exponential",
        "warmup": 0.0,
        "make_vocab_size_divisible_by": 128,
        "dtype": "fp32",
        "initial_scale_power": 32,
        "eval_iters": 100,
        "eval_interval": 1000,
        "log_interval": 100,
        "split": "969,30,1",
        "loss_average": "micro-batch",
        "weight_decay": 0.01,  # also our default, but Megatron ignores the optimizer section of a DeepSpeed JSON
        "num_workers": 2,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "untie_embeddings": False,
        "load_if_exists": True,
    }
)
"""Field -> default of Megatron's programs that differs from ours."""
_SGD_AND_MUON = {
    "sgd_momentum": 0.9, "muon_momentum": 0.9, "muon_nesterov": False, "muon_scale_mode": "spectral",
    "muon_coefficient_type": "quintic", "muon_fp32_matmul_prec": "medium",
}  # fmt: skip
GPT: Mapping[str, Any] = MappingProxyType({**MEGATRON, **_SGD_AND_MUON, "hidden_bias": True})
_WORDPIECE = {"tokenizer_type": "BertWordPieceLowerCase", "layernorm_epsilon": 1e-5}
BERT: Mapping[str, Any] = MappingProxyType(
    {**{name: value for name, value in MEGATRON.items() if name != "untie_embeddings"}, **_WORDPIECE}
)
T5: Mapping[str, Any] = MappingProxyType(
    {**MEGATRON, **_WORDPIECE, "hidden_bias": True, "position_embedding_type": "learned"}
)
PROGRAMS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {"pretrain_gpt.py": ("gpt2", GPT), "pretrain_bert.py": ("bert", BERT)}
)
"""Program -> its family, and its defaults as ``pretrain(args_defaults=...)`` accepts them."""
T5_LENGTHS = ("--encoder-seq-length", "--decoder-seq-length")


def defaults_of(scanned: Scan, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Select the defaults of the program for which the script was written.

    If the flags show that the script is for Megatron's T5, the result is based on ``T5``, otherwise on ``defaults``.

    A Megatron script passes its checkpoint folder with --load in the first run too, so a missing checkpoint is accepted
    unless --exit-on-missing-checkpoint is given.
    """
    lengths = (scanned.spelling.get("enc_seq_length", ""), scanned.spelling.get("dec_seq_length", ""))
    is_megatron = any(text.startswith(T5_LENGTHS) for text in lengths)
    if (
        FAMILIES[scanned.family].model_type == "encoder-decoder"
        and is_megatron
        and "max_position_embeddings" in scanned.values
    ):
        if "position_embedding_type" not in scanned.values:
            scanned.notes.append(
                "parsed as a script for Megatron's T5: learned positions, layer norms, biases; for T5's own relative "
                "positions add --position-embedding-type relative"
            )
        defaults = T5
    scanned.follows_megatron = any(dict(defaults) == dict(known) for known in (GPT, BERT, T5))
    left_out = {"tokenizer_type"} if "tokenizer_path" in scanned.values else set()
    may_be_first = "load" in scanned.values and not {"--exit-on-missing-checkpoint", "--skip-train"} & set(
        scanned.converted
    )
    needs_checkpoint = scanned.values.keys() & {"finetune", "eval_only", "load_weights_only", "resume"}
    if needs_checkpoint or not may_be_first:
        left_out.add("load_if_exists")
    return {name: value for name, value in defaults.items() if name not in left_out}


def notes(config: Config, scanned: Scan) -> Iterator[str]:
    """Yield a note for each difference from Megatron-LM if the script was written for one of its programs."""
    if not scanned.follows_megatron:
        return
    if config.model.loss_average == "micro-batch":
        yield (
            "--loss-average micro-batch, as Megatron-LM without --calculate-per-token-loss: the loss is the mean of "
            "the micro-batches' means"
        )
    if config.model.num_experts and AUX_LOSS in config.model.aux_losses:
        yield (
            "the load-balancing loss aux_loss uses the experts' shares of the previous global batch; Megatron-LM's "
            "uses those of the micro-batch on one replica"
        )
    multiple = config.model.make_vocab_size_divisible_by * config.parallel.model_parallel_size
    if config.model.vocab_size is None or config.model.vocab_size % multiple:
        yield (
            f"rows that pad the vocabulary to a multiple of {multiple} are excluded from the softmax; Megatron-LM "
            "includes them"
        )
