"""BertConfig, its checks, and FAMILY."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron.config.batch import BatchConfig
from megatron.config.config import Config
from megatron.config.family import FamilyConfig, ModelFamily
from megatron.config.option import option

_bert_option = partial(
    option, elsewhere="it is supported in BERT only; remove it, or use examples/bert/pretrain_bert.py"
)
_NUM_SPECIAL_TOKENS = {True: 3, False: 2}
_MIN_TEXT_LENGTH = 2


@dataclass(frozen=True, kw_only=True)
class BertConfig(FamilyConfig):
    """Masked language modelling, with or without next-sentence prediction."""

    KIND: ClassVar = "encoder"
    DEFAULTS: ClassVar = {"hidden_bias": True, "layernorm_epsilon": 1e-12}
    ADVICE: ClassVar = {
        "eval_tasks": "tasks score continuations of a text, which BERT does not model; remove it",
        "eval_tasks_interval": "tasks score continuations of a text, which BERT does not model; remove it",
        "hidden_bias": "BERT's linear layers always have biases; remove it",
        "untie_embeddings": "BERT's head shares the word embedding and adds a bias per word; remove it",
        "apply_residual_connection_post_layernorm": "BERT always normalises after the residual connection; remove it",
        "sample_prompts": "BERT predicts masked tokens and does not generate text; remove it",
        "prompt_bos": "BERT predicts masked tokens and does not generate text; remove it",
        "z_loss": "BERT's loss is the sum of two means, over masked tokens and over samples; remove it",
        "packing": "BERT's samples are pairs of texts; remove it",
        "fim_rate": "BERT already predicts masked tokens; remove it",
        "fim_spm_rate": "BERT already predicts masked tokens; remove it",
        "reset_position_ids": "BERT reads consecutive documents as one text; remove it",
        "reset_attention_mask": "BERT reads consecutive documents as one text; remove it",
        "eod_mask_loss": "BERT's loss covers only masked tokens; remove it",
        "position_embedding_type": "BERT always has learned positions; remove it",
        "normalization": "BERT always has LayerNorm; remove it",
        "add_qkv_bias": "BERT's linear layers always have biases; remove it",
    }
    ALWAYS_ON_FLAGS: ClassVar = {
        "--hidden-bias": "BERT's linear layers always have biases",
        "--add-qkv-bias": "BERT's linear layers always have biases",
    }
    IDENTITY: ClassVar = ("binary_head",)

    binary_head: bool = _bert_option(
        True,
        "train without next-sentence prediction, on single texts",
        flag="",
        constants={"--bert-no-binary-head": False},
        short="no next-sentence prediction",
    )
    mask_prob: float = _bert_option(
        0.15,
        "fraction of the tokens to predict",
        above=0,
        below=1,
        short="fraction that is masked",
    )
    whole_word_masking: bool = _bert_option(False, "mask all tokens of a word together")
    short_seq_prob: float = _bert_option(
        0.1,
        "fraction of samples with a random length of at least 2 tokens; they are padded",
        minimum=0,
        maximum=1,
    )

    @property
    def pads_samples(self) -> bool:
        return self.short_seq_prob > 0

    def text_length(self, batch: BatchConfig) -> int:
        return batch.seq_length - _NUM_SPECIAL_TOKENS[self.binary_head]

    def check(self, config: Config) -> Iterator[str]:
        yield from super().check(config)
        min_length = _MIN_TEXT_LENGTH + _NUM_SPECIAL_TOKENS[self.binary_head]
        if config.batch.seq_length < min_length:
            yield (
                f"--seq-length must be at least {min_length} ({_MIN_TEXT_LENGTH} tokens of text and the special "
                f"tokens), got {config.batch.seq_length}. Raise it"
            )


FAMILY = ModelFamily(
    name="bert",
    title="BERT",
    program="examples/bert/pretrain_bert.py",
    config=BertConfig,
    length=512,
    vocabulary=30592,
    benchmark_flags="--attention-dropout 0 --hidden-dropout 0",
    model="megatron.models.bert.model:MODEL",
    pipeline="megatron.models.bert.pipeline:BertModelPipe",
    costs="megatron.models.bert.cost:costs",
    data="megatron.models.bert.data:DATA",
    huggingface="megatron.models.bert.huggingface:FORMATS",
)
