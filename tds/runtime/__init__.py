"""``deepspeed.runtime`` with tds's ``pipe``; all other names are DeepSpeed's."""

from __future__ import annotations

from tds.deepspeed.alias import forward_to_deepspeed
from tds.runtime import pipe as pipe

forward_to_deepspeed(__name__, {})
