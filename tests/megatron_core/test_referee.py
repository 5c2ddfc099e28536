"""The referee finds and names silent faults of megatron-core that Megatron-LM #7452 lists, on CPUs over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.debug.referee.dump_reader import read_dump
from megatron.debug.referee.verdict import Verdict, judge_step
from tests.helpers.megatron_core import requires_megatron_core, run_megatron_core

pytestmark = [pytest.mark.slow, requires_megatron_core]
CASES = [
    "correct", "sequence-parallel", "label-smoothing", "gathered-logits", "attention-sinks", "gated-delta-net",
    "router", "router-padding",
]  # fmt: skip


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the dumps of all cases, with one and with two tensor ranks."""
    folder = tmp_path_factory.mktemp("dumps")
    for tensor in (1, 2):
        run_megatron_core("tests.megatron_core.referee_program", folder, num_ranks=tensor, cases=CASES, tensor=tensor)
    return folder


def judge(dumps: Path, case: str) -> Verdict:
    """Return the verdict on a case with two tensor ranks."""
    return judge_step(read_dump(dumps / f"{case}-tp1"), read_dump(dumps / f"{case}-tp2"))


@pytest.mark.parametrize("case", ["correct", "sequence-parallel", "router-padding"])
def test_correct_layouts_are_equal(dumps: Path, case: str) -> None:
    verdict = judge(dumps, case)
    assert verdict.is_equal, verdict.wrong
    assert max(item.error for item in verdict.gradients) < 1e-12
    assert verdict.gradients[0].name == "embedding.word_embeddings.weight"
    names = [item.name for item in verdict.gradients]
    # The forward pass calls the projections in this order; the model defines them in the other.
    assert names.index("decoder.layers.0.self_attention.linear_qkv.weight") + 1 == names.index(
        "decoder.layers.0.self_attention.linear_proj.weight"
    )


def test_finding_1_label_smoothing_makes_tensor_ranks_compute_different_losses(dumps: Path) -> None:
    verdict = judge(dumps, "label-smoothing")
    assert verdict.loss.fault is not None
    assert (verdict.loss.fault.axis, verdict.loss.fault.text) == ("tp", "the ranks of tp compute different losses")
    assert len(verdict.wrong) == len(verdict.gradients)


def test_finding_2_gathered_logits_add_log_tp_to_the_loss(dumps: Path) -> None:
    verdict = judge(dumps, "gathered-logits")
    assert verdict.loss.fault is not None
    assert (verdict.loss.fault.fault_type, verdict.loss.fault.axis) == ("shift", "tp")
    assert verdict.wrong[-1].name == "output_layer.weight"


def test_finding_8_norm_lacks_the_sinks_of_the_second_rank(dumps: Path) -> None:
    verdict = judge(dumps, "attention-sinks")
    assert not verdict.wrong and verdict.loss.fault is None
    assert verdict.norm.fault is not None
    assert verdict.norm.fault.fault_type == "shards left out"
    pattern = "decoder.layers.*.self_attention.core_attention.softmax_offset"
    assert verdict.norm.fault.text == f"only the first shard of {pattern} counts"


def test_finding_11_output_norm_of_gated_delta_net_lacks_the_sum_over_tp(dumps: Path) -> None:
    verdict = judge(dumps, "gated-delta-net")
    assert [item.name for item in verdict.wrong] == [
        f"decoder.layers.{layer}.self_attention.out_norm.weight" for layer in range(2)
    ]
    for item in verdict.wrong:
        assert item.fault is not None
        assert (item.fault.fault_type, item.fault.axis) == ("missing sum", "tp")
    assert verdict.loss.fault is None


def test_finding_10_auxiliary_loss_without_padding_is_divided_by_tp(dumps: Path) -> None:
    """With padded tokens, the gradient is tp times as large, which equals one process."""
    verdict = judge(dumps, "router")
    assert verdict.wrong[-1].name == "decoder.layers.1.mlp.router.weight"
    for item in verdict.wrong:
        assert item.fault is not None
        assert (item.fault.fault_type, item.fault.axis) == ("factor", "tp")
        assert item.fault.factor == pytest.approx(0.5)
