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
from tests.helpers.huggingface_models import make_family_config, random_values, save_model
from tests.helpers.small_corpora import TEXTS, make_tokenizer, write_token_files
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
EXPECTED_DIFFERENCES = {
    "GPT2": {"n_inner"},  # null: 4 h
    "T5": {"tie_word_embeddings"},  # transformers 5 calls every T5 tied
    "MT5": {"tie_word_embeddings"},
}
ConvertCommand = Callable[..., tuple[int, str]]


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> ConvertCommand:
    """Run the tool in this process; returns its exit code and what it said."""

    def run(*args: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["convert_hf.py", *map(str, args)])
        code = convert_hf.main()
        return code, capsys.readouterr().err

    return run


def save_huggingface_model(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a random model as Hugging Face does; return its state dict."""
    import transformers

    torch.manual_seed(0)
    class_prefix, settings = MODELS[name]
    head = "LMHeadModel" if class_prefix == "GPT2" else "ForConditionalGeneration"
    model = getattr(transformers, class_prefix + head)(getattr(transformers, f"{class_prefix}Config")(**settings))
    if name in ("t5-v1.1", "mt5"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms away from 0 and 1, so that each matters
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.state_dict()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return sorted(first) == sorted(second) and all(
        first[n].dtype == second[n].dtype and first[n].equal(second[n]) for n in first
    )


@pytest.mark.parametrize("name", MODELS)
def test_huggingface_round_trip_is_bitwise_equal(name: str, convert: ConvertCommand, tmp_path: Path) -> None:
    state = save_huggingface_model(name, tmp_path / "theirs")
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0, output
    args = ["--max-shard-bytes", 20_000, "--verify"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", *args)
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    exported = read_tensors(tmp_path / "back")
    assert (
        are_equal(exported, {key: state[key] for key in exported})
        and (tmp_path / "back/model.safetensors.index.json").exists()
    )
    assert all(any(tensor is state[key] or tensor.equal(t) for t in exported.values()) for key, tensor in state.items())
    hf_model, ours = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back"))
    differing = {key for key in ours if key in hf_model and ours[key] != hf_model[key]}
    assert differing <= EXPECTED_DIFFERENCES[MODELS[name][0]]


def test_import_prints_flags_of_checkpoint_model(convert: ConvertCommand, tmp_path: Path) -> None:
    save_huggingface_model("t5-v1.1", tmp_path / "theirs")
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")[1]
    args = output.split("pretrain_t5.py ")[1].split()
    assert args[:3] == ["--load", str(tmp_path / "run"), "--finetune"]
    parsed = parse([*args, "--data-path", "x", "--dry-run"], world_size=1, family="t5")
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
def test_sharded_model_round_trip_is_bitwise_equal(
    family: str, values: dict[str, Any], convert: ConvertCommand, tmp_path: Path
) -> None:
    config = make_family_config(family, **values)
    path = save_model(tmp_path / "run", config, num_ranks=2)  # 29 tokens: one row of padding
    code, output = convert("export", "--load", path, "--output", tmp_path / "theirs", "--verify")
    assert code == 0, output
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")
    assert code == 0, output
    reimported = open_folder(tmp_path / "back")
    weights = read_weights(reimported)
    assert are_equal(weights, {name: random_values(name, tuple(t.shape)) for name, t in weights.items()})
    assert are_equal(weights, read_weights(open_folder(path)))
    assert reimported.metadata["model"] == config.identity()
    hf_model = json.loads((tmp_path / "theirs/config.json").read_text())
    assert hf_model["vocab_size"] == 29 and hf_model["dtype"] == "float32"
    assert read_tensors(tmp_path / "theirs")["lm_head.weight" if config.model.untie_embeddings else
                                           "transformer.wte.weight"].shape == (29, 16)  # fmt: skip


def test_export_writes_requested_dtype(convert: ConvertCommand, tmp_path: Path) -> None:
    save_model(tmp_path / "run", make_family_config("gpt2"))
    out = tmp_path / "out"
    assert convert("export", "--load", tmp_path / "run", "--output", out, "--dtype", "bf16", "--verify")[0] == 0
    assert {tensor.dtype for tensor in read_tensors(out).values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_verify_reports_different_logits(
    convert: ConvertCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.models.gpt2 import huggingface

    save_model(tmp_path / "run", make_family_config("gpt2", activation="gelu"))
    monkeypatch.setitem(huggingface._HF_ACTIVATIONS, "gelu", "gelu_new")
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out", "--verify")
    assert code == 3 and "the logits of our model and of" in output


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("t5", {"position_embedding_type": "learned"}, "learned positions"),
        ("t5", {"hidden_bias": True}, "--hidden-bias is not supported"),
        ("gpt2", {"activation": "gated-gelu", "kv_hidden_size": 4}, "got gated-gelu; --num-attention-heads times"),
        ("gpt2", {"apply_residual_connection_post_layernorm": True}, "residual"),
    ],
)
def test_export_rejects_unsupported_model_with_reasons(
    family: str, values: dict[str, Any], reason: str, convert: ConvertCommand, tmp_path: Path
) -> None:
    save_model(tmp_path / "run", make_family_config(family, **values))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 3 and "no Hugging Face format" in output and reason in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_import_lists_all_mismatched_tensors(convert: ConvertCommand, tmp_path: Path) -> None:
    save_model(tmp_path / "run", make_family_config("gpt2"))
    folder = tmp_path / "theirs"
    convert("export", "--load", tmp_path / "run", "--output", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.ln_f.bias"]
    tensors["transformer.wpe.weight"] = torch.zeros(13, 16)
    tensors["transformer.h.2.ln_1.weight"] = torch.zeros(16)
    save_file(tensors, folder / "model.safetensors")
    code, output = convert("import", "--input", folder, "--output", tmp_path / "out")
    assert code == 3 and "(3 tensors)" in output
    assert "transformer.ln_f.bias: missing" in output
    assert "transformer.h.2.ln_1.weight: no such tensor" in output
    assert "transformer.wpe.weight: [13, 16], but the model needs [12, 16]" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("direction", "args", "code", "reason"),
    [
        ("export", ["--load", "nowhere"], 3, "nowhere does not exist"),
        ("export", ["--load", "full"], 3, "no checkpoint found"),
        ("import", ["--input", "full"], 3, "full is not a Hugging Face folder: config.json"),
        ("import", ["--input", "opt"], 3, "got 'opt'. This architecture is not supported"),
        ("import", ["--input", "pickled"], 3, "pytorch_model.bin can contain code"),
        ("import", ["--input", "nothing"], 3, "n_layer, n_embd, n_head, vocab_size missing"),
        ("import", ["--input", "pickled", "--output", "full"], 2, "--output must be a new or empty folder"),
    ],
)
def test_invalid_input_exits_with_reason(
    direction: str,
    args: list[str],
    code: int,
    reason: str,
    convert: ConvertCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"full": None, "opt": {"model_type": "opt"}, "pickled": {"model_type": "gpt2", **GPT2},
                          "nothing": {"model_type": "gpt2"}}.items():  # fmt: skip
        Path(name).mkdir()
        Path(name, "config.json" if content else "x").write_text(json.dumps(content))
    Path("pickled/pytorch_model.bin").touch()
    actual_code, output = convert(direction, *(["--output", "out"] if "--output" not in args else []), *args)
    assert (actual_code, "Traceback" in output) == (code, False) and reason in output
    assert not Path("out").exists()


def test_verify_without_transformers_exits_before_writing(
    convert: ConvertCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "run", make_family_config("gpt2"))
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else original(name))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out", "--verify")
    assert code == 2 and "pip install" in output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["convert_hf", "inspect_checkpoint"])
def test_help_imports_neither_torch_nor_transformers(tool: str) -> None:
    code = (
        f"import sys; sys.argv = ['x', '--help']\nfrom tools import {tool}\n"
        f"try: {tool}.main()\nfinally: assert not {{'torch', 'transformers', 'safetensors'}} & {{*sys.modules}}"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "usage:" in result.stdout, result.stderr


def test_tokenizer_is_exported_and_imported(convert: ConvertCommand, tmp_path: Path) -> None:
    import transformers

    vocab = make_tokenizer(tmp_path)
    overrides = {"tokenizer_path": str(tmp_path / "t.json"), "vocab_size": vocab.vocab_size + 4}
    save_model(tmp_path / "run", make_family_config("gpt2", **overrides))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "theirs")
    assert code == 0 and "warning" not in output
    hf_model = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert all(hf_model.encode(text) == vocab.encode(text) for text in TEXTS)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert (
        hf_model.eos_token_id == vocab.eod_id == config["eos_token_id"]
        and config["vocab_size"] == overrides["vocab_size"]
    )
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[1]
    assert f"--tokenizer-path {tmp_path}/back/tokenizer" in output
    reimported = tokenizer.build(tokenizer_path=tmp_path / "back/tokenizer")
    assert reimported.identity == vocab.identity  # so that token files made with one are read with the other
    code, output = convert("export", "--load", tmp_path / "back", "--output", tmp_path / "again")
    assert code == 0 and json.loads((tmp_path / "again/config.json").read_text()) == config


def test_bert_vocabulary_is_imported_with_case_setting(convert: ConvertCommand, tmp_path: Path) -> None:
    args = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "lamp", "灯", "##s"]
    save_model(tmp_path / "run", make_family_config("bert"))
    assert convert("export", "--load", tmp_path / "run", "--output", tmp_path / "theirs")[0] == 0
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "bare")[1]
    assert "--tokenizer" not in output and not (tmp_path / "bare/tokenizer").exists()
    (tmp_path / "theirs/vocab.txt").write_text("\n".join(args) + "\n", encoding="utf-8")
    (tmp_path / "theirs/tokenizer_config.json").write_text('{"do_lower_case": false}')
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[1]
    assert f"--tokenizer-type BertWordPiece --tokenizer-path {tmp_path}/back/tokenizer" in output
    reimported, hf_model = (
        tokenizer.build("BertWordPiece", tokenizer_path=tmp_path / name) for name in ("back/tokenizer", "theirs")
    )
    assert reimported.identity == hf_model.identity and reimported.encode("the lamps The灯") == [5, 6, 8, 1, 7]
    assert convert("export", "--load", tmp_path / "back", "--output", tmp_path / "again")[0] == 0
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    reexported = tokenizer.build("BertWordPiece", tokenizer_path=tmp_path / "again")
    assert reexported.encode("the lamps The灯") == [5, 6, 8, 1, 7]
    output = convert("import", "--input", tmp_path / "again", "--output", tmp_path / "last")[1]
    assert f"--tokenizer-type BertWordPiece --tokenizer-path {tmp_path}/last/tokenizer" in output


def train_t5_sentencepiece() -> bytes:
    """Return a SentencePiece model with T5's own settings."""
    model = io.BytesIO()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_writer=model, vocab_size=30, minloglevel=2, **ids
    )
    return model.getvalue()


@pytest.mark.parametrize("tokenizer_type", ["TokenizersJSON", "T5SentencePiece"])
def test_exported_sentinels_keep_their_ids(tokenizer_type: str, convert: ConvertCommand, tmp_path: Path) -> None:
    import transformers

    if tokenizer_type == "TokenizersJSON":
        path, num_sentinels = tmp_path / "t.json", 7
        make_tokenizer(tmp_path)
    else:
        path, num_sentinels = tmp_path / "t.model", 100
        path.write_bytes(train_t5_sentencepiece())
    vocab = tokenizer.build(tokenizer_type, tokenizer_path=path)
    size = vocab.vocab_size + (num_sentinels if tokenizer_type == "TokenizersJSON" else 0)
    overrides = {
        "tokenizer_type": tokenizer_type,
        "tokenizer_path": str(path),
        "vocab_extra_ids": num_sentinels,
        "vocab_size": size,
    }
    save_model(tmp_path / "run", make_family_config("t5", **overrides, max_position_embeddings=0))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 0 and "warning" not in output, output
    hf_model = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [hf_model.convert_tokens_to_ids(f"<extra_id_{i}>") for i in range(num_sentinels)] == [
        size - 1 - i for i in range(num_sentinels)
    ]
    assert all(hf_model.encode(text, add_special_tokens=False) == vocab.encode(text) for text in TEXTS)


def test_incompatible_sentencepiece_model_warns(convert: ConvertCommand, tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(train.MODELS["unigram"](TEXTS * 20, 287, ["</s>", "<pad>"]))  # bytes, no prefix
    data = {"tokenizer_type": "T5SentencePiece", "tokenizer_path": str(tmp_path / "t.model"), "vocab_size": 420}
    save_model(tmp_path / "run", make_family_config("t5", **data, max_position_embeddings=0))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 0 and "would split text differently" in output
    assert (tmp_path / "out/spiece.model").exists() and not (tmp_path / "out/tokenizer_config.json").exists()


def test_missing_tokenizer_warns_and_requested_tokenizer_fails(convert: ConvertCommand, tmp_path: Path) -> None:
    save_model(tmp_path / "run", make_family_config("gpt2", tokenizer_path=str(tmp_path / "gone.json")))
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "out")
    assert code == 0 and "warning: no tokenizer is exported" in output
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] is None
    flags = ["--tokenizer-path", tmp_path / "gone.json"]
    assert convert("export", "--load", tmp_path / "run", "--output", tmp_path / "other", *flags)[0] == 2
    make_tokenizer(tmp_path)
    flags = ["--tokenizer-path", tmp_path / "t.json"]
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "other", *flags)
    assert code == 2 and "more tokens than the model" in output


@pytest.mark.slow
def test_training_starts_from_imported_model(convert: ConvertCommand, tmp_path: Path) -> None:
    vocab = make_tokenizer(tmp_path)
    write_token_files(tmp_path / "c", TEXTS * 20, vocab)
    overrides = {"tokenizer_path": str(tmp_path / "t.json"), "vocab_size": vocab.vocab_size}
    save_model(tmp_path / "ours", make_family_config("gpt2", **overrides))
    convert("export", "--load", tmp_path / "ours", "--output", tmp_path / "theirs")
    output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "back")[1]
    args = [*output.split("pretrain_gpt2.py ")[1].split(), "--seq-length", "12", "--data-path", str(tmp_path / "c")]
    args += "--batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-30 --device cpu --progress plain".split()
    command = [sys.executable, str(ROOT / "pretrain_gpt2.py"), *args, "--save", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    trained = open_folder(tmp_path / "run")
    assert trained.step == 1 and are_equal(read_weights(trained), read_weights(open_folder(tmp_path / "ours")))


def test_to_flag_selects_direction() -> None:
    for args, direction in (
        ("--to checkpoint --input a --output b", "import"),
        ("--to=checkpoint --input a --output b", "import"),
        ("--to hf --load a --output b", "export"),
        ("import --input a --output b", "import"),
    ):
        assert convert_hf.parse_args(args.split()).way == direction
    with pytest.raises(SystemExit, match="2"):
        convert_hf.parse_args("--to gguf --load a --output b".split())
