"""The families of models: a folder each, and a line each in ``registry``; names of their sections, no torch."""

from megatron.models.bert.config import BertConfig as BertConfig
from megatron.models.gpt2.config import GPT2Config as GPT2Config
from megatron.models.llama.config import LlamaConfig as LlamaConfig
from megatron.models.mpt.config import MptConfig as MptConfig
from megatron.models.registry import costs_of as costs_of
from megatron.models.registry import register as register
from megatron.models.t5.config import T5Config as T5Config
