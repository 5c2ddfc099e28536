"""Parse the command line and all other sources of values into a ``Config``, without importing torch.

``sources`` defines the order of the sources, ``collect`` reads them, and ``parser`` provides ``parse``. The fields of a
``Config``, their flags and ranges are in ``megatron.config``.
"""

from megatron.arguments.deepspeed_json import engine_dict as engine_dict
from megatron.arguments.flag_values import config_from_values as config_from_values
from megatron.arguments.parser import parse as parse
from megatron.arguments.validate import check_device as check_device
from megatron.arguments.validate import resolve_dtype as resolve_dtype
from megatron.arguments.validate import resolve_fusion as resolve_fusion
