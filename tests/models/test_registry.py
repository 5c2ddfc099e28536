"""A family is one folder and one object: the parts that it names, and a family from outside."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import config_from_values, parse
from megatron.arguments.help import help_text
from megatron.config import Config
from megatron.config.config import SECTIONS
from megatron.errors import ConfigError
from megatron.models import registry
from megatron.models.bert.config import BertConfig
from megatron.models.common.generation import generation_layers
from megatron.models.common.pipeline import ModelPipe
from megatron.models.registry import (
    FAMILIES,
    build_model,
    costs_of,
    data_parts,
    huggingface_formats,
    model_parts,
    pipeline_class,
)
from megatron.mpu.topology import Topology
from tests.helpers.toy_family import register_toy_family

ROOT = Path(__file__).parents[2]
MODEL_FIELDS = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 96}
COSTS_PROGRAM = """
import sys
from megatron.arguments import config_from_values
from megatron.models import costs_of
from megatron.models.registry import FAMILIES
for family in FAMILIES:
    config = config_from_values({"num_layers": 2, "hidden_size": 16, "vocab_size": 96}, family=family)
    assert costs_of(config).num_parameters > 0
print(sorted({"torch", "deepspeed", "numpy"} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", FAMILIES)
def test_family_defines_its_components(name: str) -> None:
    from megatron.models.common.huggingface import HFFormat
    from megatron.models.parts import DataParts, ModelParts

    data, pipeline = data_parts(name), pipeline_class(name)
    assert isinstance(model_parts(name), ModelParts)
    assert isinstance(pipeline, type) and issubclass(pipeline, ModelPipe)
    assert isinstance(data, DataParts) or (data is None and FAMILIES[name].model_type == "decoder")
    assert all(isinstance(hf_format, HFFormat) for hf_format in huggingface_formats(name)) and huggingface_formats(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_object_of_its_package(name: str) -> None:
    family = FAMILIES[name]
    assert family.name == name
    assert importlib.import_module(f"megatron.models.{name}.config").FAMILY is family
    assert (ROOT / family.program).is_file() and (ROOT / family.run_script).is_file()


@pytest.mark.parametrize("name", FAMILIES)
def test_only_decoders_support_generation(name: str) -> None:
    assert (model_parts(name).generation is not None) == (FAMILIES[name].model_type == "decoder")
    if FAMILIES[name].model_type != "decoder":
        with pytest.raises(ValueError, match=f"the family {name} does not support text generation"):
            generation_layers(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_components_agree_on_model(name: str) -> None:
    from megatron.models import ParallelContext

    config = config_from_values(MODEL_FIELDS, family=name)
    model: Any = build_model(config, ParallelContext())
    assert model.model_args.family == name
    assert costs_of(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())
    rule = model_parts(name).weight_init(config)
    assert rule("layers.0.mlp.up.weight", (64, 16)) is not None


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_flags_apply_to_training_models_only(name: str) -> None:
    from megatron.models import ParallelContext

    config = parse("--checkpoint-activations --vocab-size 96".split(), world_size=1, env={}, family=name)
    assert build_model(config, ParallelContext(), Topology(1, 1, 1)).model_args.checkpoint_activations
    assert not build_model(config, ParallelContext()).model_args.checkpoint_activations


class _RecordingPipe:
    """Records the arguments that it is built with."""

    for_run = classmethod(ModelPipe.for_run.__func__)  # type: ignore[attr-defined]

    def __init__(self, args: Any, parallel: Any, topology: Any, **kwargs: Any) -> None:
        self.args, self.parallel, self.topology, self.kwargs = args, parallel, topology, kwargs

    @classmethod
    def boundary_kwargs(cls, config: Config) -> dict[str, bool]:
        return {"has_flags": config.parallel.has_pipeline}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("method", "is_timed"), [("balanced", False), ("profile", True), ("uniform", False)])
def test_stages_follow_partition_method(
    name: str, method: str, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "pipeline_class", lambda family: _RecordingPipe)
    flags = f"--pipe-parallel-size 2 --partition-method {method} --vocab-size 96 --batch-size 3"
    config = parse(flags.split(), world_size=2, env={}, family=name)
    parallel, topology, batches = object(), Topology(pipe=2, data=1, tensor=1), object()
    stages: Any = build_model(config, parallel, topology, batches)  # type: ignore[arg-type]
    lengths = config.family_config.sequence_lengths(config.batch)
    assert (stages.parallel, stages.topology, stages._megatron_batch_fn) == (parallel, topology, batches)
    assert stages.args.family == name
    assert stages.kwargs == {
        "partition": costs_of(config).stage_bounds(2) if method == "balanced" else method,
        "chunks": 1,
        "placement": "loop",
        "profile_shape": (3, *lengths) if is_timed else None,
        "has_flags": True,
    }


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("gpt2", "", {"has_segments": False, "has_positions": False}),
        ("gpt2", "--reset-position-ids --reset-attention-mask", {"has_segments": True, "has_positions": False}),
        ("mpt", "--packing best-fit", {"has_segments": True, "has_positions": False}),
        ("llama", "", {"has_segments": False, "has_positions": False}),
        ("llama", "--reset-position-ids --reset-attention-mask", {"has_segments": True, "has_positions": True}),
        ("bert", "--short-seq-prob 0.1", {"has_segments": True}),
        ("bert", "--short-seq-prob 0", {"has_segments": False}),
        ("t5", "", {"has_segments": False}),
        ("t5", "--reset-attention-mask", {"has_segments": True}),
    ],
)
def test_boundary_kwargs_follow_settings(name: str, flags: str, expected: dict[str, bool]) -> None:
    config = parse(f"--vocab-size 96 {flags}".split(), world_size=1, env={}, family=name)
    pipeline: Any = pipeline_class(name)
    assert pipeline.boundary_kwargs(config) == expected


def test_costs_of_every_family_do_not_import_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-c", COSTS_PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_sections_have_stable_names(name: str) -> None:
    family_sections = [name] if FAMILIES[name].has_section else []
    shared = [section for section in SECTIONS if section != "model"]
    assert list(config_from_values({}, family=name).to_dict()) == [
        "family", "model", *family_sections, *shared, "deepspeed", "extra"
    ]  # fmt: skip
    assert ("family" in config_from_values({}, family=name).identity()) == (name != "gpt2")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt2"])
def test_family_section_is_available_by_family_name(name: str) -> None:
    config = config_from_values({}, family=name)
    assert getattr(config, name) is config.family_config
    with pytest.raises(AttributeError, match="has no attribute 'gpt2'"):
        getattr(config, "gpt2")  # noqa: B009


def _find_family_branches(path: Path) -> Iterator[int]:
    """Yield the lines of what tells families apart: tables of several, comparisons with one."""
    other_families = set(FAMILIES) - {path.stem, path.parent.name}  # a family's own file may say its name
    text = path.read_text(encoding="utf-8")
    if not any(f'"{name}"' in text for name in other_families):
        return
    for node in ast.walk(ast.parse(text)):
        items: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            items = list(node.keys)
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            items = list(node.elts)
        named_families = {
            item.value for item in items if isinstance(item, ast.Constant) and item.value in other_families
        }
        is_compared = isinstance(node, ast.Compare) and any(
            isinstance(item, ast.Constant) and item.value in other_families for item in (node.left, *node.comparators)
        )
        if len(named_families) > 1 or is_compared:
            yield node.lineno


def test_no_other_module_branches_on_family() -> None:
    """Neither by a table nor by an ``if``; a family's own file is no other one."""
    violations = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "megatron").rglob("*.py"))
        for line in _find_family_branches(path)
    ]
    assert violations == []


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[None]:
    """A family in a folder of somebody else's, registered."""
    with register_toy_family(tmp_path):
        yield


def parse_error(flags: str, family: str) -> str:
    with pytest.raises(ConfigError) as excinfo:
        parse(flags.split(), world_size=1, env={}, family=family)
    return str(excinfo.value)


def test_external_family_has_flags_checks_and_costs(toy: None) -> None:
    config = parse("--toy-size 5 --vocab-size 96".split(), world_size=1, env={}, family="toy")
    assert (config.family_config.toy_size, config.model.hidden_dropout, config.to_dict()["toy"]) == (
        5,
        0.0,
        {"toy_size": 5},
    )
    assert config.identity()["family"] == "toy" and config.identity()["toy_size"] == 5
    assert config.namespace().toy_size == 5
    assert costs_of(config).num_parameters > 0
    assert "--toy-size" in help_text(family="toy", show_all=True)
    assert "--toy-size" not in help_text(family="gpt2", show_all=True)
    assert "bash run_gpt2.sh --model toy" in help_text(None, "toy")
    assert parse_error("--toy-size 7", "toy") == "--toy-size must not be 7"
    assert parse_error("--hidden-bias", "toy") == "--hidden-bias is not supported: a toy has no biases; leave it out"
    assert parse_error("--swiglu", "toy") == "--swiglu is not supported: a toy is simple; leave it out"
    assert parse_error("--toy-size 5", "llama") == "--toy-size is not supported: it is for toys; leave it out"
    assert parse(["--num-query-groups", "1"], world_size=1, env={}, family="toy").model.num_query_groups == 1


def test_external_decoder_defaults_to_common_components(toy: None) -> None:
    assert model_parts("toy") is model_parts("gpt2") and pipeline_class("toy") is pipeline_class("gpt2")
    assert data_parts("toy") is None and not registry.is_common_decoder("toy"), "it has flags of its own"
    assert [hf_format.model_types for hf_format in huggingface_formats("toy")] == [("toy",)]


def test_family_component_override_is_used(tmp_path: Path) -> None:
    with register_toy_family(tmp_path, costs="def costs(config, is_on_cpu=False):\n    return is_on_cpu, 'its own'\n"):
        assert costs_of(config_from_values({}, family="toy"), is_on_cpu=True) == (True, "its own")
        assert model_parts("toy") is model_parts("gpt2")


def test_non_decoder_family_must_define_components() -> None:
    with pytest.raises(ValueError, match="the family kite is not a decoder and must define its own pipeline, costs"):
        registry.ModelFamily(name="kite", title="Kite", config=BertConfig, model="kite.model:MODEL")


def test_external_family_is_unregistered_on_exit() -> None:
    assert "toy" not in FAMILIES
    assert "unknown flag --toy-size" in parse_error("--toy-size 5", "gpt2")


@pytest.mark.parametrize("name", ["llama", "data"])
def test_rejects_taken_family_name(name: str) -> None:
    family = registry.ModelFamily(name=name, title="", program="", config=registry.GPT2.config)
    with pytest.raises(ValueError, match=f"family name {name} is already in use"):
        registry.register(family)


def test_unknown_family_raises() -> None:
    with pytest.raises(ValueError, match=f"family must be {' or '.join(FAMILIES)}, got 'opt'"):
        model_parts("opt")
