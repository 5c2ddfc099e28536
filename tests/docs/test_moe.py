"""docs/moe.md: flags and groups are those of the code, and its commands run, with a tiny Qwen3-MoE for the folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from megatron.config import parse
from megatron.config.experts import FIELD_NAMES
from megatron.mpu.topology import Topology
from tests.docs.test_tutorial import ROOT, ClonedFolder
from tests.helpers.chats import write_tokenizer

PAGES = [ROOT / "docs" / "moe.md", ROOT / "docs" / "zh" / "moe.md"]
every_page = pytest.mark.parametrize("page", PAGES, ids=("english", "chinese"))


def read_commands(page: Path) -> list[str]:
    return re.findall(r"^    ((?:\w+=\S+ )*(?:bash|python) .*)$", page.read_text(encoding="utf-8"), re.M)


@every_page
def test_flag_table_has_every_expert_flag(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    flags = [f"--{name.replace('_', '-')}" for name in FIELD_NAMES]
    assert [flag for flag in flags if not re.search(rf"`{flag}\b(?!-)", text)] == []


def read_diagrams(page: Path) -> list[str]:
    return re.findall(r"^```\n( +tensor 0 .*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def read_groups(diagram: str) -> list[list[list[int]]]:
    return [
        [sorted(map(int, group.split(","))) for group in re.findall(r"\{([^}]*)\}", line)]
        for line in diagram.splitlines()
        if "{" in line
    ]


def check_experts(diagram: str, expert_groups: list[list[int]]) -> None:
    """Check that each rank has the experts of its place in its expert group."""
    pattern = r"rank (\d): (?:experts )?(\d)-(\d)"
    experts_by_rank = {int(rank): (int(a), int(b)) for rank, a, b in re.findall(pattern, diagram)}
    assert experts_by_rank == {
        rank: (4 * position, 4 * position + 3) for group in expert_groups for position, rank in enumerate(group)
    }


@every_page
def test_groups_of_diagrams_equal_grid(page: Path) -> None:
    """The ranks, the experts of each, and who sums what."""
    sharded, fewer_shards = read_diagrams(page)
    grid = Topology.from_world_size(8, tensor=2, pipe=1, expert=2)
    expected = [grid.expert_groups(), grid.expert_groups(same_experts=True), grid.groups("data")]
    assert read_groups(sharded) == expected
    check_experts(sharded, grid.expert_groups())
    grid = Topology.from_world_size(8, tensor=4, pipe=1, expert=2, expert_tensor=2)
    expected = [grid.expert_tensor_groups(), grid.expert_groups(), grid.expert_groups(same_experts=True)]
    assert read_groups(fewer_shards) == expected
    check_experts(fewer_shards, grid.expert_groups())


def test_dense_model_reports_shadowed_expert_flags() -> None:
    config = parse("--data-path none --moe-router-topk 4".split(), world_size=1)
    assert config.shadowed == {"--moe-router-topk 4": "the model has no experts (--num-experts)"}


@pytest.mark.slow
def test_commands_train_and_export_moe_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    clone = ClonedFolder(tmp_path)
    model_dir = write_tokenizer(tmp_path / "models" / "Qwen3-30B-A3B")
    size = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    hf_config = transformers.Qwen3MoeConfig(
        vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(hf_config).to(torch.bfloat16).save_pretrained(model_dir)
    shutil.copytree(ROOT / "examples" / "corpus" / "en", tmp_path / "mycorpus")
    clone.run("mkdir data")
    corpus_command, train_command, export_command, import_command = (
        line for line in read_commands(PAGES[0]) if "Qwen3" in line or "my-model" in line
    )
    clone.run(corpus_command)
    shorter = train_command.replace("SEQLEN=2048", "SEQLEN=32").replace("GAS=8", "GAS=2")
    started = clone.run(shorter)
    assert "2 per layer on each of 2 ranks" in " ".join(started.replace("│", " ").split())
    clone.run(export_command)
    clone.run(import_command)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    assert exported.config.model_type == "qwen3_moe" and exported.config.num_experts == 4
    assert (tmp_path / "runs" / "from-qwen3" / "checkpoints").is_dir()
