"""A third-party family of decoders: two files with settings and names, on top of the common decoder.

``register_toy_family(folder)`` writes the files and registers the family while the block runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.arguments.flag_values import all_options
from megatron.models import registry

FILES = {
    "config.py": '''"""Settings of a toy."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.config import FamilyConfig, ModelFamily
from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class ToyConfig(FamilyConfig):
    DEFAULTS: ClassVar = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation": "relu"}
    ADVICE: ClassVar = {"hidden_bias": "a toy has no biases; leave it out"}
    REJECTED_FLAGS: ClassVar = {"--swiglu": "a toy is simple; leave it out"}
    IDENTITY: ClassVar = ("toy_size",)

    toy_size: int = option(3, "how large a toy is", minimum=1, elsewhere="it is for toys; leave it out")

    def check(self, config):
        yield from super().check(config)
        if self.toy_size == 7:
            yield "--toy-size must not be 7"


FAMILY = ModelFamily(
    name="toy",
    title="Toy",
    config=ToyConfig,
    huggingface="toy_family.huggingface:FORMATS",
)
''',
    "huggingface.py": '''"""Names and fields of a toy in Hugging Face's files."""

from megatron.models.common.huggingface import HFFormat, WeightMapping, by_recipes

NORMS = {"input_norm": "first", "post_attention_norm": "second"}
FIELDS = {
    "num_layers": "depth",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "ff_hidden_size": "inner",
    "max_position_embeddings": "length",
    "vocab_size": "words",
}


TABLES = (("word", "words"), ("position", "spots"))


def recipes(config):
    found = {f"embedding.{ours}.weight": WeightMapping((f"{theirs}.weight",)) for ours, theirs in TABLES}
    for kind in ("weight", "bias"):
        found[f"final_norm.{kind}"] = WeightMapping((f"last.{kind}",))
    for i in range(config.model.num_layers):
        ours, theirs = f"layers.{i}", f"blocks.{i}"
        packed = tuple(f"{theirs}.{part}.weight" for part in ("query", "key", "value"))
        heads = config.model.num_attention_heads
        found[f"{ours}.attention.query_key_value.weight"] = WeightMapping(packed, num_blocks=heads)
        found[f"{ours}.attention.dense.weight"] = WeightMapping((f"{theirs}.out.weight",))
        found[f"{ours}.mlp.up.weight"] = WeightMapping((f"{theirs}.up.weight",), is_transposed=True)
        found[f"{ours}.mlp.down.weight"] = WeightMapping((f"{theirs}.down.weight",), is_transposed=True)
        for name, other in NORMS.items():
            for kind in ("weight", "bias"):
                found[f"{ours}.{name}.{kind}"] = WeightMapping((f"{theirs}.{other}.{kind}",))
    return found


def problems(config):
    if config.model.untie_embeddings:
        yield "a toy has one table"


def fields(config):
    sizes = {theirs: getattr(config.model, ours) for ours, theirs in FIELDS.items()}
    return {"model_type": "toy", "toy_size": config.family_config.toy_size, **sizes}


def values(theirs):
    return {"toy_size": theirs["toy_size"], **{ours: theirs[name] for ours, name in FIELDS.items()}}


FORMAT = HFFormat(
    model_types=("toy",), problems=problems, fields=fields, values=values, word="words.weight", **by_recipes(recipes)
)
FORMATS = (FORMAT,)
''',
}


@contextmanager
def register_toy_family(folder: Path, costs: str = "") -> Iterator[None]:
    """Write the family into ``folder`` and register it. ``costs`` is the text of a file with its own costs."""
    package = folder / "toy_family"
    package.mkdir()
    files = {"__init__.py": "", **FILES}
    if costs:
        files["cost.py"] = costs
        costs_line = '    costs="toy_family.cost:costs",\n'
        files["config.py"] = files["config.py"].replace("    huggingface=", f"{costs_line}    huggingface=")
    for name, text in files.items():
        (package / name).write_text(text)
    assert all_options()  # fills the cache, which must not hide a family that is registered later
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    registry.register(importlib.import_module("toy_family.config").FAMILY)
    try:
        yield
    finally:
        del registry.FAMILIES["toy"]
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "toy_family"]:
            del sys.modules[name]
