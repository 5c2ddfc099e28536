"""``deepspeed.pipe`` with tds's ``PipelineModule`` and shared modules; all other names are DeepSpeed's."""

from __future__ import annotations

from tds.deepspeed.alias import forward_to_deepspeed
from tds.deepspeed.api import LayerSpec as LayerSpec
from tds.deepspeed.api import TiedLayerSpec as TiedLayerSpec
from tds.deepspeed.module import PipelineModule as PipelineModule
from tds.deepspeed.shared_layers import Shared as Shared
from tds.deepspeed.shared_layers import SharingLayerSpec as SharingLayerSpec

forward_to_deepspeed(
    __name__,
    {
        "PipelineModule": "tds.deepspeed.module",
        "Shared": "tds.deepspeed.shared_layers",
        "SharingLayerSpec": "tds.deepspeed.shared_layers",
    },
)
