"""From a command line to a ``Config``: the layer above the families, whose flags it knows; no torch.

What it stands on still lies in ``megatron.config``: scan, defaults, DeepSpeed's JSON, checks over several sections.
"""

from megatron.arguments.deepspeed_json import engine_dict as engine_dict
from megatron.arguments.flag_values import config_from_values as config_from_values
from megatron.arguments.parser import parse as parse
from megatron.arguments.validate import check_device as check_device
from megatron.arguments.validate import resolve_dtype as resolve_dtype
