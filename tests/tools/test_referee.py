"""``tools/referee.py`` and its hook: exit codes, output, and dumps of real gradients of a sharded model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.harness import run_ranks
from tests.helpers.referee_dumps import Rank, write_pair
from tools import referee_hook
from tools.referee import main, read_batch

ROOT = Path(__file__).resolve().parents[2]


def double_norms(ranks: list[Rank]) -> None:
    """Double the gradients of both norms, and let the ranks of tp differ in the loss."""
    for rank in ranks:
        for layer in (0, 1):
            rank["tensors"][f"layers.{layer}.norm.weight"]["grad"] *= 2
        rank["loss"] += rank["rank"]


def test_equal_dumps_exit_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, many = write_pair(tmp_path, tp=2)
    assert main([str(one), str(many), "--all"]) == 0
    output = capsys.readouterr().out
    assert "verdict: all 10 gradients agree (worst error 0.0e+00" in output
    assert output.count(" 2 x 1 ") == 8 and output.count(" 1 x 2 ") == 2


def test_different_dumps_exit_with_1_and_name_first_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, many = write_pair(tmp_path, double_norms, tp=2)
    assert main([str(one), str(many)]) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == (
        "verdict: the loss is wrong: the ranks of tp compute different losses; 2 of 10 gradients are wrong; first in "
        "the forward pass layers.0.norm.weight; first in the backward pass layers.1.norm.weight"
    )
    assert output.count("x 2 (x tp: it counts twice)") == 2
    assert "embedding.weight" not in output


def test_json_has_faults_as_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, many = write_pair(tmp_path, double_norms, tp=2)
    assert main([str(one), str(many), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["equal"], data["first_wrong_forward"]) == (False, "layers.0.norm.weight")
    faults = {
        item["name"]: (item["fault"], item["factor"], item["axis"]) for item in data["gradients"] if item["fault"]
    }
    assert faults == {f"layers.{layer}.norm.weight": ("factor", pytest.approx(2), "tp") for layer in (0, 1)}
    assert data["loss"]["axis"] == "tp"


def test_bad_input_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, many = write_pair(tmp_path, tp=2)
    assert main([str(one), str(tmp_path / "none")]) == 2
    assert "has no dump" in capsys.readouterr().err
    assert main([str(one), str(many), "--axes", "tp=4"]) == 2
    assert "number of ranks, 2" in capsys.readouterr().err
    assert main([str(one), str(many), "--batch", "batch.pt"]) == 2
    assert "Hugging Face folder" in capsys.readouterr().err
    for words in (
        ["--axes", "tp"], ["--rtol", "-1"], ["--all", "--json"], ["--rename", "(", ""], ["--rename", "norm", r"\2"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as error:
            main([str(one), str(many), *words])
        assert error.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (b"text", "must be written by torch.save"),
        ([1, 2], "must be written by torch.save"),
        ({"tokens": torch.zeros(2, 4)}, "KeyError: 'labels'"),
        ({"tokens": [1, 2], "labels": [1, 2]}, "AttributeError"),
        ({"tokens": torch.zeros(2, 4), "labels": torch.zeros(2, 3)}, "got [2, 4] and [2, 3]"),
        (
            {"tokens": torch.full((2, 4), 50), "labels": torch.zeros(2, 4)},
            "tokens must be ids from 0 to 49, got 50 to 50",
        ),
        (
            {"tokens": torch.zeros(2, 4), "labels": torch.full((2, 4), -1)},
            "labels must be ids from 0 to 49, got -1 to -1",
        ),
    ],
)
def test_batch_that_cannot_be_used_is_one_error(tmp_path: Path, batch: object, message: str) -> None:
    path = tmp_path / "batch.pt"
    if isinstance(batch, bytes):
        path.write_bytes(batch)
    else:
        torch.save(batch, path)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_batch(path, 50)


def test_batch_may_ignore_labels(tmp_path: Path) -> None:
    torch.save({"tokens": torch.zeros(2, 4, dtype=torch.int32), "labels": torch.full((2, 4), -100)}, tmp_path / "b.pt")
    tokens, labels = read_batch(tmp_path / "b.pt", 50)
    assert tokens.dtype == labels.dtype == torch.int64


class Block(nn.Module):
    """Two linear layers around an activation. ``up`` is defined after ``down``, but called first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(8), nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def train_block(rank: int, folder: Path, num_ranks: int, forgets_sum: bool = False) -> None:
    """Dump one step of a block over tensor ranks; ``forgets_sum`` makes each rank's gradient of the norm partial."""
    torch.manual_seed(3)
    model = Block().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if num_ranks > 1:
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    x = torch.randn(4, 8, dtype=torch.float64)
    referee_hook.CALLS.clear()
    referee_hook.referee(folder, model, order=True)
    loss = model(x).square().mean()
    loss.backward()
    if forgets_sum:
        parts = (0.25, 0.75)
        for parameter in model.norm.parameters():
            assert parameter.grad is not None
            parameter.grad *= parts[rank]
    referee_hook.referee(folder, model, loss, tp=(rank, num_ranks))
    grads = [parameter.grad for parameter in model.parameters()]
    full_grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.cat([grad.flatten() for grad in full_grads if grad is not None]).norm()
    for grad in grads:
        assert grad is not None
        grad *= 1e-3 / norm
    referee_hook.referee(folder, norm=norm)


def test_hook_dumps_dtensors_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_block(0, tmp_path / "one", 1)
    run_ranks(2, train_block, tmp_path / "tp2", 2)
    assert main([str(tmp_path / "one"), str(tmp_path / "tp2"), "--rtol", "1e-12", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    modules = [item["name"].partition(".")[0] for item in data["gradients"]]
    assert modules == ["norm", "norm", "up", "up", "down", "down"]
    assert data["gradient_norm"]["one"] > 1e-2, "the dump has gradients before clipping"
    run_ranks(2, train_block, tmp_path / "wrong", 2, True)
    assert main([str(tmp_path / "one"), str(tmp_path / "wrong"), "--json"]) == 1
    wrong = {item["name"]: item["fault"] for item in json.loads(capsys.readouterr().out)["gradients"] if item["fault"]}
    assert wrong == {"norm.weight": "missing sum", "norm.bias": "missing sum"}


@pytest.mark.parametrize("page", ["docs/referee.md", "docs/zh/referee.md"])
def test_page_shows_the_hook(page: str) -> None:
    source = (ROOT / "tools/referee_hook.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert source in blocks


def test_hook_imports_only_torch() -> None:
    source = (ROOT / "tools/referee_hook.py").read_text(encoding="utf-8")
    assert re.findall(r"^(?:import|from) (\w+)", source, flags=re.MULTILINE) == ["os", "torch", "torch"]


@pytest.mark.slow
def test_our_model_is_the_one_process_of_a_hugging_face_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hugging Face's model is the other trainer; one of its gradients is doubled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    model.save_pretrained(tmp_path / "llama")
    tokens, labels = torch.randint(50, (2, 16)), torch.randint(50, (2, 16))
    labels[:, :3] = -100
    torch.save({"tokens": tokens, "labels": labels}, tmp_path / "batch.pt")
    logits = model(tokens, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    referee_hook.referee(tmp_path / "theirs", model, loss)
    command = [str(tmp_path / "llama"), str(tmp_path / "theirs"), "--batch", str(tmp_path / "batch.pt")]
    assert main(command) == 0, capsys.readouterr().out
    model.model.layers[1].self_attn.q_proj.weight.grad *= 2
    referee_hook.referee(tmp_path / "theirs", model, loss)
    assert main(command) == 1
    assert (
        "1 of 21 gradients is wrong, model.layers.1.self_attn.q_proj.weight: x 2 (it counts twice)"
        in capsys.readouterr().out
    )
