"""``deepspeed.pipe`` with our ``PipelineModule`` and layers that share modules; every other name is DeepSpeed's."""

from __future__ import annotations

from tds.deepspeed_alias import follow
from tds.deepspeed_api import LayerSpec as LayerSpec
from tds.deepspeed_api import TiedLayerSpec as TiedLayerSpec
from tds.module import PipelineModule as PipelineModule
from tds.shared_layers import Shared as Shared
from tds.shared_layers import SharingLayerSpec as SharingLayerSpec

follow(
    __name__, {"PipelineModule": "tds.module", "Shared": "tds.shared_layers", "SharingLayerSpec": "tds.shared_layers"}
)
