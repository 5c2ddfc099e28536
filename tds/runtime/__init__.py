"""``deepspeed.runtime`` with tds's ``pipe``; all other names are DeepSpeed's."""

from __future__ import annotations

from tds.deepspeed.alias import follow
from tds.runtime import pipe as pipe

follow(__name__, {})
