"""docs/moe.md: flags and groups are those of the code, and its commands run, with a tiny Qwen3-MoE for the folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from megatron.config import parse
from megatron.config.experts import NAMES
from megatron.mpu.topology import Topology
from tests.docs.test_tutorial import ROOT, Folder
from tests.helpers.chats import write_tokenizer

PAGES = [ROOT / "docs" / "moe.md", ROOT / "docs" / "zh" / "moe.md"]
every_page = pytest.mark.parametrize("page", PAGES, ids=("english", "chinese"))


def commands(page: Path) -> list[str]:
    return re.findall(r"^    ((?:\w+=\S+ )*(?:bash|python) .*)$", page.read_text(encoding="utf-8"), re.M)


@every_page
def test_the_table_of_flags_has_every_flag_of_experts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    flags = [f"--{name.replace('_', '-')}" for name in NAMES]
    assert [flag for flag in flags if not re.search(rf"`{flag}\b(?!-)", text)] == []


@every_page
def test_the_groups_of_the_picture_are_those_of_the_grid(page: Path) -> None:
    """The ranks, the experts of each, and who sums what."""
    (picture,) = re.findall(r"^```\n( +tensor 0 .*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    grid = Topology.of_world(8, tensor=2, pipe=1, expert=2)
    groups = [
        [sorted(map(int, group.split(","))) for group in re.findall(r"\{([^}]*)\}", line)]
        for line in picture.splitlines()
        if "{" in line
    ]
    assert groups == [grid.expert_groups(), grid.expert_groups(of_replicas=True), [[0, 2, 4, 6], [1, 3, 5, 7]]]
    held = {int(rank): (int(a), int(b)) for rank, a, b in re.findall(r"rank (\d): experts (\d)-(\d)", picture)}
    assert held == {rank: (4 * place, 4 * place + 3) for group in groups[0] for place, rank in enumerate(group)}


def test_a_dense_model_says_what_does_not_act() -> None:
    config = parse("--data-path none --moe-router-topk 4".split(), world_size=1)
    assert config.shadowed == {"--moe-router-topk 4": "the model has no experts (--num-experts)"}


@pytest.mark.slow
def test_the_page_goes_from_a_folder_with_experts_to_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    made = Folder(tmp_path)
    place = write_tokenizer(tmp_path / "models" / "Qwen3-30B-A3B")
    size = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeConfig(
        vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(theirs).to(torch.bfloat16).save_pretrained(place)
    shutil.copytree(ROOT / "examples" / "corpus" / "en", tmp_path / "mycorpus")
    made.run("mkdir data")
    corpus, tuned, out, back = (line for line in commands(PAGES[0]) if "Qwen3" in line or "my-model" in line)
    made.run(corpus)
    shorter = tuned.replace("SEQLEN=2048", "SEQLEN=32").replace("GAS=8", "GAS=2")
    started = made.run(shorter)
    assert "2 per layer on each of 2 ranks" in " ".join(started.replace("│", " ").split())
    made.run(out)
    made.run(back)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    assert found.config.model_type == "qwen3_moe" and found.config.num_experts == 4
    assert (tmp_path / "runs" / "from-qwen3" / "checkpoints").is_dir()
