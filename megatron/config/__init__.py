"""Frozen dataclasses, the flags that grow from their fields, and DeepSpeed's JSON; standard library only."""

from megatron.config.batch import BatchConfig as BatchConfig
from megatron.config.bert import BertConfig as BertConfig
from megatron.config.checkpoint import CheckpointConfig as CheckpointConfig
from megatron.config.config import Config as Config
from megatron.config.data import DataConfig as DataConfig
from megatron.config.debug import DebugConfig as DebugConfig
from megatron.config.deepspeed import engine_dict as engine_dict
from megatron.config.llama import LlamaConfig as LlamaConfig
from megatron.config.model import ModelConfig as ModelConfig
from megatron.config.mpt import MptConfig as MptConfig
from megatron.config.optimizer import OptimizerConfig as OptimizerConfig
from megatron.config.parallel import ParallelConfig as ParallelConfig
from megatron.config.parse import parse as parse
from megatron.config.precision import PrecisionConfig as PrecisionConfig
from megatron.config.run import RunConfig as RunConfig
from megatron.config.t5 import T5Config as T5Config
from megatron.config.validate import check_device as check_device
from megatron.config.validate import resolve_dtype as resolve_dtype
