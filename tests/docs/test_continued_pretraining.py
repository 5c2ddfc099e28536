"""docs/continued_pretraining.md runs as it stands: its commands, with a tiny Qwen3 of random weights in the folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.test_tutorial import ROOT, Folder
from tests.helpers.huggingface_models import save_small_qwen3

PAGES = [ROOT / "docs" / "continued_pretraining.md", ROOT / "docs" / "zh" / "continued_pretraining.md"]
SMALLER = "SEQLEN=64 GAS=4 TRAIN_ITERS=4 "
"""For a corpus of 36 texts, in front of the page's own variables."""


def commands(page: Path) -> list[str]:
    """Return the page's commands without the download of the model, for which the pages name different hubs."""
    lines = re.findall(r"^    (\S.*)$", page.read_text(encoding="utf-8"), re.M)
    return [line for line in lines if ".venv" not in line and " download " not in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a folder like a clone's, with a corpus and a tiny models/Qwen3-0.6B in it."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    import tokenizers

    made = Folder(tmp_path_factory.mktemp("continued"))
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples" / "corpus" / "zh").glob("*.txt"))]
    (made.place / "mycorpus").mkdir()
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (made.place / "mycorpus" / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    place = made.place / "models" / "Qwen3-0.6B"
    made.run(f"python tools/train_tokenizer.py --input mycorpus --vocab-size 1000 --output {place}/tokenizer.json")
    size = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab_size()
    save_small_qwen3(place, size + 24)  # the published tables have more rows than tokens, too
    return made


@pytest.mark.slow
def test_the_page_goes_from_the_folder_to_one_of_ones_own(folder: Folder) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    printed = [folder.run(f"{SMALLER}{line}" if "run_qwen3.sh" in line else line) for line in commands(PAGES[0])]
    planned, *_, trained, evaluated, text, _ = printed
    assert planned.startswith("llama of") and "the sizes of models/Qwen3-0.6B/config.json" in planned
    losses = [re.findall(r"test loss ([\d.]+)", each)[0] for each in (trained, evaluated)]
    assert losses[0] == losses[1]
    assert "从前" in text
    back = transformers.AutoModelForCausalLM.from_pretrained(folder.place / "my-qwen")
    assert back.config.model_type == "qwen3" and back.config.head_dim == 32
