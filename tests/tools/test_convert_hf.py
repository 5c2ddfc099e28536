"""tools/convert_hf.py: checkpoints to Hugging Face folders and back, and what it refuses."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from megatron import tokenizer
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import parse
from megatron.tokenizer import train
from tests.helpers.huggingface_models import config_of, save_model, values_of
from tests.helpers.small_corpora import TEXTS, make_tokenizer, write
from tools import convert_hf

ROOT = Path(__file__).resolve().parents[2]
T5 = {"vocab_size": 29, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
GPT2 = {"vocab_size": 29, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
IDS = {"bos_token_id": 3, "eos_token_id": 4}
MODELS = {
    "gpt2": ("GPT2", {**GPT2, **IDS, "activation_function": "gelu"}),
    "gpt2-untied": ("GPT2", {**GPT2, **IDS, "n_inner": 24, "tie_word_embeddings": False}),
    "t5": ("T5", {**T5, "num_decoder_layers": 1}),
    "t5-v1.1": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {**T5, "relative_attention_num_buckets": 6}),
}
SAID_OTHERWISE = {
    "GPT2": {"n_inner"},  # null: 4 h
    "T5": {"tie_word_embeddings"},  # transformers 5 calls every T5 tied
    "MT5": {"tie_word_embeddings"},
}
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the tool in this process; returns its exit code and what it said."""

    def run(*words: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["convert_hf.py", *map(str, words)])
        code = convert_hf.main()
        return code, capsys.readouterr().err

    return run


def save_theirs(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a random model as Hugging Face does; return its state dict."""
    import transformers

    torch.manual_seed(0)
    kind, settings = MODELS[name]
    head = "LMHeadModel" if kind == "GPT2" else "ForConditionalGeneration"
    model = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**settings))
    if name in ("t5-v1.1", "mt5"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms away from 0 and 1, so that each matters
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.state_dict()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return sorted(one) == sorted(other) and all(one[n].dtype == other[n].dtype and one[n].equal(other[n]) for n in one)


@pytest.mark.parametrize("name", MODELS)
def test_theirs_to_ours_and_back_is_bitwise_and_computes_the_same(name: str, convert: Run, tmp_path: Path) -> None:
    state = save_theirs(name, tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0, output
    words = ["--max-shard-bytes", 20_000, "--verify"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", *words)
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    back = tensors_in(tmp_path / "back")
    assert same(back, {key: state[key] for key in back}) and (tmp_path / "back/model.safetensors.index.json").exists()
    assert all(any(tensor is state[key] or tensor.equal(t) for t in back.values()) for key, tensor in state.items())
    theirs, ours = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("theirs", "back"))
    differing = {key for key in ours if key in theirs and ours[key] != theirs[key]}
    assert differing <= SAID_OTHERWISE[MODELS[name][0]]


def test_the_flags_that_import_prints_build_the_model_of_the_checkpoint(convert: Run, tmp_path: Path) -> None:
    save_theirs("t5-v1.1", tmp_path / "theirs")
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")[1]
    words = output.split("pretrain_t5.py ")[1].split()
    assert words[:3] == ["--load", str(tmp_path / "run"), "--finetune"]
    parsed = parse([*words, "--data-path", "x", "--dry-run"], world_size=1, family="t5")
    state = open_folder(tmp_path / "run").metadata
    assert state["model"] == parsed.identity() and parsed.model.layernorm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("gpt2", {"hidden_bias": False, "activation": "gelu-tanh"}),
        ("gpt2", {"hidden_bias": True, "untie_embeddings": True, "ff_hidden_size": 24}),
        ("t5", {"activation": "gated-silu", "dec_layers": 1, "max_position_embeddings": 0, "untie_embeddings": True}),
    ],
)
def test_a_model_of_two_ranks_goes_there_and_back_to_the_bit_without_its_padding(
    family: str, values: dict[str, Any], convert: Run, tmp_path: Path
) -> None:
    config = config_of(family, **values)
    path = save_model(tmp_path / "run", config, ranks=2)  # 29 tokens: one row of padding
    code, output = convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")
    assert code == 0, output
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")
    assert code == 0, output
    back = open_folder(tmp_path / "back")
    weights = read_weights(back)
    assert same(weights, {name: values_of(name, tuple(t.shape)) for name, t in weights.items()})
    assert same(weights, read_weights(open_folder(path)))
    assert back.metadata["model"] == config.identity()
    theirs = json.loads((tmp_path / "theirs/config.json").read_text())
    assert theirs["vocab_size"] == 29 and theirs["dtype"] == "float32"
    assert tensors_in(tmp_path / "theirs")["lm_head.weight" if config.model.untie_embeddings else
                                           "transformer.wte.weight"].shape == (29, 16)  # fmt: skip


def test_the_type_asked_for_is_written(convert: Run, tmp_path: Path) -> None:
    save_model(tmp_path / "run", config_of("gpt2"))
    out = tmp_path / "out"
    assert convert("export", "--load", tmp_path / "run", "--output", out, "--dtype", "bf16", "--verify")[0] == 0
    assert {tensor.dtype for tensor in tensors_in(out).values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_logits_that_differ_are_told(convert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.models.gpt2 import huggingface

    save_model(tmp_path / "run", config_of("gpt2", activation="gelu"))
    monkeypatch.setitem(huggingface._THEIR_ACTIVATIONS, "gelu", "gelu_new")
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out", "--verify")
    assert code == 3 and "the logits of our model and of" in output


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("t5", {"position_embedding_type": "learned"}, "learned positions"),
        ("t5", {"hidden_bias": True}, "no biases"),
        ("gpt2", {"activation": "gated-gelu", "kv_hidden_size": 4}, "got gated-gelu; --num-attention-heads times"),
        ("gpt2", {"apply_residual_connection_post_layernorm": True}, "residual"),
    ],
)
def test_a_model_without_a_form_there_is_refused_with_the_reasons(
    family: str, values: dict[str, Any], reason: str, convert: Run, tmp_path: Path
) -> None:
    save_model(tmp_path / "run", config_of(family, **values))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 3 and "no Hugging Face format" in output and reason in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_every_tensor_that_does_not_fit_is_in_one_error(convert: Run, tmp_path: Path) -> None:
    save_model(tmp_path / "run", config_of("gpt2"))
    folder = tmp_path / "theirs"
    convert("export", "--load", tmp_path / "run", "--output", folder)
    held = load_file(folder / "model.safetensors")
    del held["transformer.ln_f.bias"]
    held["transformer.wpe.weight"] = torch.zeros(13, 16)
    held["transformer.h.2.ln_1.weight"] = torch.zeros(16)
    save_file(held, folder / "model.safetensors")
    code, output = convert("import", "--input", folder, "--output", tmp_path / "out")
    assert code == 3 and "(3 tensors)" in output
    assert "transformer.ln_f.bias: missing" in output
    assert "transformer.h.2.ln_1.weight: no such tensor" in output
    assert "transformer.wpe.weight: [13, 16], but the model needs [12, 16]" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("way", "words", "code", "reason"),
    [
        ("export", ["--load", "nowhere"], 3, "nowhere does not exist"),
        ("export", ["--load", "full"], 3, "no checkpoint found"),
        ("import", ["--input", "full"], 3, "full is not a Hugging Face folder: config.json"),
        ("import", ["--input", "opt"], 3, "got 'opt'. This architecture is not supported"),
        ("import", ["--input", "pickled"], 3, "pytorch_model.bin can contain code"),
        ("import", ["--input", "nothing"], 3, "lacks 'n_layer'"),
        ("import", ["--input", "pickled", "--output", "full"], 2, "--output must be a new or empty folder"),
    ],
)
def test_what_cannot_be_converted_is_named(
    way: str, words: list[str], code: int, reason: str, convert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"full": None, "opt": {"model_type": "opt"}, "pickled": {"model_type": "gpt2", **GPT2},
                          "nothing": {"model_type": "gpt2"}}.items():  # fmt: skip
        Path(name).mkdir()
        Path(name, "config.json" if content else "x").write_text(json.dumps(content))
    Path("pickled/pytorch_model.bin").touch()
    found, output = convert(way, *(["--output", "out"] if "--output" not in words else []), *words)
    assert (found, "Traceback" in output) == (code, False) and reason in output
    assert not Path("out").exists()


def test_verify_without_transformers_says_how_to_get_it_before_anything_is_written(
    convert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "run", config_of("gpt2"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out", "--verify")
    assert code == 2 and "pip install" in output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["convert_hf", "inspect_checkpoint"])
def test_help_needs_neither_torch_nor_transformers(tool: str) -> None:
    code = (
        f"import sys; sys.argv = ['x', '--help']\nfrom tools import {tool}\n"
        f"try: {tool}.main()\nfinally: assert not {{'torch', 'transformers', 'safetensors'}} & {{*sys.modules}}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_a_tokenizer_travels_both_ways(convert: Run, tmp_path: Path) -> None:
    import transformers

    made = make_tokenizer(tmp_path)
    names = {"tokenizer_path": str(tmp_path / "t.json"), "vocab_size": made.vocab_size + 4}
    save_model(tmp_path / "run", config_of("gpt2", **names))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "theirs")
    assert code == 0 and "warning" not in output
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert all(theirs.encode(text) == made.encode(text) for text in TEXTS)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert theirs.eos_token_id == made.eod_id == config["eos_token_id"] and config["vocab_size"] == names["vocab_size"]
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[1]
    assert f"--tokenizer-path {tmp_path}/back/tokenizer" in output
    back = tokenizer.build(tokenizer_path=tmp_path / "back/tokenizer")
    assert back.identity == made.identity  # so that token files made with one are read with the other
    code, output = convert("export", "--load", tmp_path / "back", "--output", tmp_path / "again")
    assert code == 0 and json.loads((tmp_path / "again/config.json").read_text()) == config


def test_the_vocabulary_of_a_bert_folder_is_imported_with_its_case(convert: Run, tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "lamp", "灯", "##s"]
    save_model(tmp_path / "run", config_of("bert"))
    assert convert("export", "--load", tmp_path / "run", "--output", tmp_path / "theirs")[0] == 0
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "bare")[1]
    assert "--tokenizer" not in output and not (tmp_path / "bare/tokenizer").exists()
    (tmp_path / "theirs/vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (tmp_path / "theirs/tokenizer_config.json").write_text('{"do_lower_case": false}')
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[1]
    assert f"--tokenizer-type BertWordPiece --tokenizer-path {tmp_path}/back/tokenizer" in output
    back, theirs = (
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path / name) for name in ("back/tokenizer", "theirs")
    )
    assert back.identity == theirs.identity and back.encode("the lamps The灯") == [5, 6, 8, 1, 7]
    assert convert("export", "--load", tmp_path / "back", "--output", tmp_path / "again")[0] == 0
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    again = tokenizer.build("BertWordPiece", tokenizer_path=tmp_path / "again")
    assert again.encode("the lamps The灯") == [5, 6, 8, 1, 7]
    output = convert("import", "--input", tmp_path / "again", "--output", tmp_path / "last")[1]
    assert f"--tokenizer-type BertWordPiece --tokenizer-path {tmp_path}/last/tokenizer" in output


def t5_pieces() -> bytes:
    """Return a SentencePiece model with T5's own settings."""
    model = io.BytesIO()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_writer=model, vocab_size=30, minloglevel=2, **ids
    )
    return model.getvalue()


@pytest.mark.parametrize("kind", ["TokenizersJSON", "T5SentencePiece"])
def test_sentinels_have_the_ids_there_that_the_run_gave_them(kind: str, convert: Run, tmp_path: Path) -> None:
    import transformers

    if kind == "TokenizersJSON":
        path, extra = tmp_path / "t.json", 7
        make_tokenizer(tmp_path)
    else:
        path, extra = tmp_path / "t.model", 100
        path.write_bytes(t5_pieces())
    made = tokenizer.build(kind, tokenizer_path=path)
    size = made.vocab_size + (extra if kind == "TokenizersJSON" else 0)
    data = {"tokenizer_type": kind, "tokenizer_path": str(path), "vocab_extra_ids": extra, "vocab_size": size}
    save_model(tmp_path / "run", config_of("t5", **data, max_position_embeddings=0))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 0 and "warning" not in output, output
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [theirs.convert_tokens_to_ids(f"<extra_id_{i}>") for i in range(extra)] == [
        size - 1 - i for i in range(extra)
    ]
    assert all(theirs.encode(text, add_special_tokens=False) == made.encode(text) for text in TEXTS)


def test_a_vocabulary_that_their_class_would_read_otherwise_is_a_warning(convert: Run, tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(train.MODELS["unigram"](TEXTS * 20, 287, ["</s>", "<pad>"]))  # bytes, no prefix
    data = {"tokenizer_type": "T5SentencePiece", "tokenizer_path": str(tmp_path / "t.model"), "vocab_size": 420}
    save_model(tmp_path / "run", config_of("t5", **data, max_position_embeddings=0))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 0 and "would split text differently" in output
    assert (tmp_path / "out/spiece.model").exists() and not (tmp_path / "out/tokenizer_config.json").exists()


def test_a_tokenizer_that_is_gone_is_a_warning_and_one_that_is_named_an_error(convert: Run, tmp_path: Path) -> None:
    save_model(tmp_path / "run", config_of("gpt2", tokenizer_path=str(tmp_path / "gone.json")))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 0 and "warning: no tokenizer is exported" in output
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] is None
    named = ["--tokenizer-path", tmp_path / "gone.json"]
    assert convert("export", "--load", tmp_path / "run", "--output", tmp_path / "other", *named)[0] == 2
    make_tokenizer(tmp_path)
    named = ["--tokenizer-path", tmp_path / "t.json"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "other", *named)
    assert code == 2 and "more tokens than the model" in output


@pytest.mark.slow
def test_a_run_starts_from_what_was_imported(convert: Run, tmp_path: Path) -> None:
    made = make_tokenizer(tmp_path)
    write(tmp_path / "c", TEXTS * 20, made)
    names = {"tokenizer_path": str(tmp_path / "t.json"), "vocab_size": made.vocab_size}
    save_model(tmp_path / "ours", config_of("gpt2", **names))
    convert("export", "--load", tmp_path / "ours", "--output", tmp_path / "theirs")
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[1]
    words = [*output.split("pretrain_gpt2.py ")[1].split(), "--seq-length", "12", "--data-path", str(tmp_path / "c")]
    words += "--batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-30 --device cpu --progress plain".split()
    command = [sys.executable, str(ROOT / "pretrain_gpt2.py"), *words, "--save", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = open_folder(tmp_path / "run")
    assert ran.step == 1 and same(read_weights(ran), read_weights(open_folder(tmp_path / "ours")))


def test_the_ways_may_be_named_by_what_they_lead_to() -> None:
    for words, way in (
        ("--to checkpoint --input a --output b", "import"),
        ("--to=checkpoint --input a --output b", "import"),
        ("--to hf --load a --output b", "export"),
        ("import --input a --output b", "import"),
    ):
        assert convert_hf.parse_args(words.split()).way == way
    with pytest.raises(SystemExit, match="2"):
        convert_hf.parse_args("--to gguf --load a --output b".split())
