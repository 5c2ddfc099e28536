"""docs/continued_pretraining.md runs as it stands: its commands, with a tiny Qwen3 of random weights in the folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.test_tutorial import ROOT, ClonedFolder
from tests.helpers.huggingface_models import save_small_qwen3

PAGES = [ROOT / "docs" / "continued_pretraining.md", ROOT / "docs" / "zh" / "continued_pretraining.md"]
SMALL_VARIABLES = "SEQLEN=64 GAS=4 TRAIN_ITERS=4 "
"""For a corpus of 36 texts, in front of the page's own variables."""


def read_commands(page: Path) -> list[str]:
    """Return the page's commands without the download of the model, for which the pages name different hubs."""
    lines = re.findall(r"^    (\S.*)$", page.read_text(encoding="utf-8"), re.M)
    return [line for line in lines if ".venv" not in line and " download " not in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ClonedFolder:
    """Return a folder like a clone's, with a corpus and a tiny models/Qwen3-0.6B in it."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    import tokenizers

    clone = ClonedFolder(tmp_path_factory.mktemp("continued"))
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples" / "corpus" / "zh").glob("*.txt"))]
    (clone.path / "mycorpus").mkdir()
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (clone.path / "mycorpus" / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model_dir = clone.path / "models" / "Qwen3-0.6B"
    clone.run(f"python tools/train_tokenizer.py --input mycorpus --vocab-size 1000 --output {model_dir}/tokenizer.json")
    vocab_size = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
    save_small_qwen3(model_dir, vocab_size + 24)  # the published tables have more rows than tokens, too
    return clone


@pytest.mark.slow
def test_commands_train_evaluate_and_export_model(folder: ClonedFolder) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    outputs = [
        folder.run(f"{SMALL_VARIABLES}{line}" if "run_qwen3.sh" in line else line) for line in read_commands(PAGES[0])
    ]
    planned, *_, trained, evaluated, text, _ = outputs
    assert planned.startswith("llama of") and "the sizes of models/Qwen3-0.6B/config.json" in planned
    losses = [re.findall(r"test loss ([\d.]+)", output)[0] for output in (trained, evaluated)]
    assert losses[0] == losses[1]
    assert "从前" in text
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder.path / "my-qwen")
    assert exported.config.model_type == "qwen3" and exported.config.head_dim == 32
