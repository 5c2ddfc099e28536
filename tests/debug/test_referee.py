"""The referee names the fault of each kind that is put into a correct dump, and rejects dumps it cannot compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.debug.referee.dump_reader import BadDumpError, Dump, Parameter, RankDump, read_dump
from megatron.debug.referee.placement import place_shards
from megatron.debug.referee.verdict import Verdict, judge_step
from tests.helpers.referee_dumps import SHAPES, Rank, make_ranks, make_whole, norm_of, write_dump, write_pair

NORM, UP, DOWN = "layers.0.norm.weight", "layers.0.up.weight", "layers.1.down.weight"
Mutation = Callable[[list[Rank]], None]


def judge(folder: Path, mutate: Mutation = lambda ranks: None, **sizes: int) -> Verdict:
    """Return the verdict on a layout (default tp 2 x dp 2) with a fault."""
    one, many = write_pair(folder, mutate, **(sizes or {"tp": 2, "dp": 2}))
    return judge_step(read_dump(one), read_dump(many))


def scale(name: str, factor: float, ranks: tuple[int, ...] = (0, 1, 2, 3), rows: slice = slice(None)) -> Mutation:
    """Return a mutation that multiplies a gradient by a factor on some ranks, in some rows."""

    def mutate(dumps: list[Rank]) -> None:
        for rank in ranks:
            dumps[rank]["tensors"][name]["grad"][rows] *= factor

    return mutate


def split_into_parts(name: str, groups: list[tuple[int, ...]], combine: str) -> Mutation:
    """Return a mutation that replaces the copies on each group of ranks by random parts of their sum."""

    def mutate(dumps: list[Rank]) -> None:
        generator = torch.Generator().manual_seed(1)
        for group in groups:
            whole = dumps[group[0]]["tensors"][name]["grad"].clone()
            parts = [torch.randn(whole.shape, generator=generator, dtype=torch.float64) for _ in group[1:]]
            parts.append(whole - sum(parts))
            for rank, part in zip(group, parts, strict=True):
                grads = {"sum": part, "average": part * len(group), "twice": whole + part}
                grads["weighted"] = part * (0.75 if rank == group[0] else 1.5)
                dumps[rank]["tensors"][name]["grad"] = grads[combine]

    return mutate


def set_grad(name: str, rank: int, value: float | None) -> Mutation:
    """Return a mutation that removes a gradient (None) or sets its first element."""

    def mutate(dumps: list[Rank]) -> None:
        if value is None:
            dumps[rank]["tensors"][name]["grad"] = None
        else:
            dumps[rank]["tensors"][name]["grad"].flatten()[0] = value

    return mutate


TP_GROUPS, DP_GROUPS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


def test_correct_layout_is_equal(tmp_path: Path) -> None:
    verdict = judge(tmp_path)
    assert verdict.is_equal
    assert [item.name for item in verdict.gradients] == list(SHAPES)
    assert max(item.error for item in verdict.gradients) == 0
    up = verdict.gradients[2]
    assert (up.num_shards, up.num_copies) == (2, 2)


@pytest.mark.parametrize(
    ("mutation", "fault_type", "name", "axis", "factor", "text"),
    [
        (scale(UP, 2), "factor", UP, "tp or dp", 2, "x tp or x dp: it counts twice"),
        (scale(DOWN, 0.25), "factor", DOWN, "tp x dp", 0.25, "/ tp x dp"),
        (scale(NORM, 0), "factor", NORM, None, 0, "zero"),
        (scale(NORM, -1), "factor", NORM, None, -1, "sign"),
        (scale(NORM, 0.7), "factor", NORM, None, 0.7, "x 0.7"),
        (scale(NORM, math.sqrt(0.5)), "factor", NORM, "tp or dp", math.sqrt(0.5), "/ sqrt(tp)"),
        (scale(NORM, 0, (1, 3)), "rank factors", NORM, None, None, "right on ranks 0, 2, zero on ranks 1, 3"),
        (split_into_parts(NORM, TP_GROUPS, "sum"), "missing sum", NORM, "tp", None, "the sum over tp is missing"),
        (split_into_parts(UP, DP_GROUPS, "sum"), "missing sum", UP, "dp", None, "the sum over dp is missing"),
        (split_into_parts(NORM, [(0, 1, 2, 3)], "sum"), "missing sum", NORM, "tp x dp", None, "over tp x dp"),
        (split_into_parts(UP, DP_GROUPS, "average"), "missing average", UP, "dp", None, "average over dp"),
        (split_into_parts(UP, DP_GROUPS, "twice"), "counted twice", UP, "dp", None, "own part counts twice"),
        (split_into_parts(UP, DP_GROUPS, "weighted"), "weighted parts", UP, "dp", None, "1.333 x rank 0"),
        (set_grad(DOWN, 2, None), "none", DOWN, None, None, "no gradient on rank 2"),
        (set_grad(DOWN, 1, math.nan), "not finite", DOWN, None, None, "rank 1"),
        (set_grad(DOWN, 0, 5.0), "unknown", DOWN, None, None, "no factor"),
    ],
)  # fmt: skip
def test_fault_of_one_gradient_is_named(
    tmp_path: Path, mutation: Mutation, fault_type: str, name: str, axis: str | None, factor: float | None, text: str
) -> None:
    verdict = judge(tmp_path, mutation)
    assert [item.name for item in verdict.wrong] == [name]
    fault = verdict.wrong[0].fault
    assert fault is not None
    assert (fault.fault_type, fault.axis) == (fault_type, axis), fault
    assert fault.factor == pytest.approx(factor) if factor is not None else fault.factor is None
    assert text in fault.text


def test_factor_of_some_rows_names_the_rows(tmp_path: Path) -> None:
    """A fused parameter may be wrong in one of its parts, on one shard."""
    verdict = judge(tmp_path, scale("embedding.weight", 2, (1, 3), slice(2, 5)))
    assert verdict.wrong[0].rows == "rows 8-10 of 12"
    assert verdict.wrong[0].fault is not None
    assert verdict.wrong[0].fault.factor == pytest.approx(2)


def test_missing_sum_in_some_rows(tmp_path: Path) -> None:
    def mutate(dumps: list[Rank]) -> None:
        for rank in range(2):
            dumps[rank]["tensors"]["layers.0.norm.weight"]["grad"][5:] *= (0.3, 0.7)[rank]

    verdict = judge(tmp_path, mutate, tp=2)
    assert (verdict.wrong[0].rows, verdict.wrong[0].fault.fault_type) == ("rows 5-7 of 8", "missing sum")  # type: ignore[union-attr]


def test_faults_are_listed_in_forward_order(tmp_path: Path) -> None:
    def mutate(dumps: list[Rank]) -> None:
        scale("head.weight", 2)(dumps)
        scale(NORM, 2)(dumps)

    assert [item.name for item in judge(tmp_path, mutate).wrong] == [NORM, "head.weight"]


def test_gradient_where_one_process_has_none(tmp_path: Path) -> None:
    one, many = write_pair(tmp_path, tp=2)
    ranks = make_ranks(make_whole(), tp=1)
    ranks[0]["tensors"][NORM]["grad"] = None
    write_dump(one, ranks)
    verdict = judge_step(read_dump(one), read_dump(many))
    assert [(item.name, item.fault and item.fault.fault_type) for item in verdict.wrong] == [(NORM, "not zero")]


def squares(names: list[str], rows: slice = slice(None)) -> float:
    """Return the squared norm of gradients; ``rows`` restricts dimension 0."""
    whole = make_whole()
    return sum(float(whole[name]["grad"][rows].norm()) ** 2 for name in names)


def norm_with(change: float) -> float:
    """Return the norm of all gradients after a change of its square."""
    return math.sqrt(norm_of(make_whole()) ** 2 + change)


@pytest.mark.parametrize(
    ("norm", "fault_type", "text"),
    [
        (
            lambda: norm_with(-squares(["layers.0.up.bias", "layers.1.up.bias"], slice(8, 16))),
            "shards left out", "only the first shard of layers.*.up.bias counts",
        ),
        (
            lambda: norm_with(squares([NORM, "layers.1.norm.weight"])),
            "copies counted", "layers.*.norm.weight counts 2 times",
        ),
        (
            lambda: norm_with(-squares(["head.weight"])),
            "shards left out", "head.weight is left out",
        ),
        (lambda: 2 * norm_of(make_whole()), "factor", "x tp"),
    ],
)  # fmt: skip
def test_fault_of_the_norm_is_named(tmp_path: Path, norm: Callable[[], float], fault_type: str, text: str) -> None:
    def mutate(dumps: list[Rank]) -> None:
        for rank in dumps:
            rank["norm"] = norm()

    verdict = judge(tmp_path, mutate, tp=2, dp=3)
    assert not verdict.wrong
    assert not verdict.is_equal
    assert verdict.norm.fault is not None
    assert verdict.norm.fault.fault_type == fault_type
    assert text in verdict.norm.fault.text


def test_right_norm_of_wrong_gradients_is_no_fault_of_the_norm(tmp_path: Path) -> None:
    def mutate(dumps: list[Rank]) -> None:
        scale(NORM, 2)(dumps)
        for rank in dumps:
            rank["norm"] = norm_with(3 * squares([NORM]))

    verdict = judge(tmp_path, mutate)
    assert verdict.wrong
    assert verdict.norm.fault is None


@pytest.mark.parametrize(
    ("losses", "fault_type", "text"),
    [
        ((2.5 + math.log(2),) * 4, "shift", "+ log(tp)"),
        ((5.0,) * 4, "factor", "x tp"),
        ((2.0, 3.0, 2.0, 3.0), "unknown", "the ranks of tp compute different losses"),
        ((2.0, 2.0, 3.0, 3.0), None, ""),
        ((2.0, 2.0, 3.5, 3.5), "factor", "x 1.1"),
        ((None, None, 2.5, 2.5), None, ""),
        ((math.nan,) * 4, "not finite", "NaN"),
    ],
)
def test_fault_of_the_loss_is_named(
    tmp_path: Path, losses: tuple[float | None, ...], fault_type: str | None, text: str
) -> None:
    def mutate(dumps: list[Rank]) -> None:
        for rank, loss in zip(dumps, losses, strict=True):
            rank["loss"] = loss

    verdict = judge(tmp_path, mutate)
    fault = verdict.loss.fault
    assert (fault and fault.fault_type) == fault_type
    assert fault is None or text in fault.text
    assert verdict.is_equal == (fault is None)


def test_interleaved_shards_are_found_by_their_values(tmp_path: Path) -> None:
    """Each rank has half of the gate and half of the up projection; the bias of zeros follows the weight."""

    def interleave(dumps: list[Rank]) -> None:
        whole = make_whole()
        for rank in dumps:
            tp = rank["axes"]["tp"][0]
            rows = torch.cat([torch.arange(4 * tp, 4 * tp + 4), torch.arange(8 + 4 * tp, 12 + 4 * tp)])
            for name in (UP, "layers.0.up.bias"):
                rank["tensors"][name] = {key: tensor[rows].clone() for key, tensor in whole[name].items()}

    assert judge(tmp_path, interleave).is_equal
    verdict = judge(tmp_path, lambda dumps: (interleave(dumps), scale(UP, 2, (1, 3))(dumps))[0])
    assert verdict.wrong[0].rows == "rows 4-7, 12-15 of 16"


def test_layers_of_a_pipeline_stage_are_found_by_their_values(tmp_path: Path) -> None:
    """Stage 1 calls its layer 0, and its norm has the values of every other norm."""

    def split_stages(dumps: list[Rank]) -> None:
        for rank in dumps:
            stage = rank["axes"]["pp"][0]
            names = [
                name
                for name in SHAPES
                if (name.startswith(("layers.1", "head")) if stage else name < "head" or "layers.0" in name)
            ]
            rank["tensors"] = {name.replace("layers.1", "layers.0"): rank["tensors"][name] for name in names}

    assert judge(tmp_path, split_stages, tp=2, pp=2).is_equal
    verdict = judge(tmp_path, lambda dumps: (split_stages(dumps), scale(NORM, 2, (2, 3))(dumps))[0], tp=2, pp=2)
    assert [item.name for item in verdict.wrong] == ["layers.1.norm.weight"]
    assert (2, NORM, "layers.1.norm.weight") in verdict.renamed


def test_chunks_of_an_interleaved_pipeline_may_have_the_same_names(tmp_path: Path) -> None:
    """Stage 0 has the embedding, layer 0 and the head, in two chunks; both chunks and stage 1 call their layer 0."""

    def interleave(dumps: list[Rank]) -> None:
        for rank in dumps:
            chunks = ("embedding", "layers.0", "layers.1", "head") if rank["rank"] == 0 else ("layers.1",)
            rank["tensors"] = {
                f"chunk{int(part in ('layers.1', 'head') and rank['rank'] == 0)}.module."
                f"{name.replace('layers.1', 'layers.0')}": rank["tensors"][name].copy()
                for part in chunks for name in SHAPES if name.startswith(part)
            }  # fmt: skip

    assert judge(tmp_path, interleave, dp=2).is_equal
    verdict = judge(
        tmp_path,
        lambda dumps: (interleave(dumps), scale("chunk1.module.layers.0.norm.weight", 2, (0,))(dumps))[0],
        dp=2,
    )
    assert [(item.name, item.fault and item.fault.text) for item in verdict.wrong] == [
        ("layers.1.norm.weight", "x 2 (x dp: it counts twice) on rank 0, right on rank 1")
    ]
    assert (0, "chunk1.layers.0.norm.weight", "layers.1.norm.weight") in verdict.renamed


def test_two_models_with_the_same_names(tmp_path: Path) -> None:
    """A list of two models, such as a generator and a discriminator, in both runs."""

    def dump(rank: int, num_ranks: int, factor: float = 1.0) -> Rank:
        models = [
            make_whole(),
            {name: {key: -tensor for key, tensor in pair.items()} for name, pair in make_whole().items()},
        ]
        tensors = {f"chunk{idx}.{name}": pair for idx, model in enumerate(models) for name, pair in model.items()}
        tensors[f"chunk1.{NORM}"]["grad"] *= factor
        return {"rank": rank, "axes": {"dp": (rank, num_ranks)}, "loss": 2.5, "norm": None, "tensors": tensors}

    one = write_dump(tmp_path / "one", [dump(0, 1)])
    verdict = judge_step(read_dump(one), read_dump(write_dump(tmp_path / "many", [dump(0, 2, 2.0), dump(1, 2, 2.0)])))
    assert len(verdict.gradients) == 2 * len(SHAPES)
    assert [item.name for item in verdict.wrong] == [f"chunk1.{NORM}"]


def test_dtensors_with_fewer_rows_than_ranks(tmp_path: Path) -> None:
    """Over 5 ranks, 8 rows are chunks of 2, 2, 2, 2, 0; a norm of ones has only its placement to say which rows."""
    whole = make_whole()

    def shard(factor: float) -> list[Rank]:
        ranks = make_ranks(whole, dp=5)
        for rank in ranks:
            for name, pair in rank["tensors"].items():
                for key, tensor in list(pair.items()):
                    chunks = tensor.chunk(5)
                    pair[key] = chunks[rank["rank"]].clone() if rank["rank"] < len(chunks) else tensor[:0].clone()
                pair |= {"value_placements": ["Shard(dim=0)"], "mesh": [0, 1, 2, 3, 4], "shape": list(SHAPES[name])}
            rank["tensors"][NORM]["grad"] *= factor
            rank["tensors"]["embedding.weight"]["grad"] *= factor
        return ranks

    one = write_dump(tmp_path / "one", make_ranks(whole, tp=1))
    assert judge_step(read_dump(one), read_dump(write_dump(tmp_path / "right", shard(1.0)))).is_equal
    verdict = judge_step(read_dump(one), read_dump(write_dump(tmp_path / "wrong", shard(5.0))))
    assert [(item.name, item.fault and item.fault.text) for item in verdict.wrong] == [
        ("embedding.weight", "x 5 (x dp)"), (NORM, "x 5 (x dp)")
    ]  # fmt: skip


def test_factor_is_named_although_a_shard_has_no_gradient(tmp_path: Path) -> None:
    """No token of the batch is in the second half of the vocabulary."""
    whole = make_whole()
    whole["embedding.weight"]["grad"][6:] = 0
    ranks = make_ranks(whole, tp=2)
    ranks[0]["tensors"]["embedding.weight"]["grad"] *= 2
    one, many = write_dump(tmp_path / "one", make_ranks(whole, tp=1)), write_dump(tmp_path / "many", ranks)
    verdict = judge_step(read_dump(one), read_dump(many))
    assert [(item.name, item.fault and item.fault.factor) for item in verdict.wrong] == [
        ("embedding.weight", pytest.approx(2))
    ]


def test_shards_of_two_dimensions_are_found_as_chunks() -> None:
    """Experts [E, h, f] are sharded over ep in dimension 0 and over tp in dimension 2."""
    whole = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))
    ranks = []
    for rank in range(4):
        value = whole.chunk(2, 0)[rank // 2].chunk(2, 2)[rank % 2].clone()
        axes = {"tp": (rank % 2, 2), "ep": (rank // 2, 2)}
        ranks.append(RankDump(rank, axes, None, None, (Parameter("experts", value, None),)))
    placements = place_shards({"experts": whole}, Dump(Path(), tuple(ranks)))
    indices = [[positions.tolist() for positions in shard.index] for shard in placements.shards["experts"]]
    assert indices == [
        [[2 * ep, 2 * ep + 1], [0, 1, 2], [3 * tp, 3 * tp + 1, 3 * tp + 2]] for ep in (0, 1) for tp in (0, 1)
    ]


def test_dtensor_placements_and_partial_gradients(tmp_path: Path) -> None:
    """With equal rows, only the placement says which shard a rank has."""
    whole = make_whole()
    whole["embedding.weight"]["value"][:] = whole["embedding.weight"]["value"][:1].clone()
    ranks = make_ranks(whole, tp=2)
    for rank in ranks:
        rank["tensors"]["embedding.weight"] |= {
            "value_placements": ["Shard(dim=0)"], "mesh": [1, 0], "shape": [12, 8],
            "value": whole["embedding.weight"]["value"].chunk(2)[0],
            "grad": whole["embedding.weight"]["grad"].chunk(2)[1 - rank["rank"]].clone(),
        }  # fmt: skip
        rank["tensors"][NORM]["grad_placements"] = ["Partial(sum)"]
        rank["tensors"][NORM]["grad"] *= (0.25, 0.75)[rank["rank"]]
    one, many = write_dump(tmp_path / "one", make_ranks(whole, tp=1)), write_dump(tmp_path / "many", ranks)
    verdict = judge_step(read_dump(one), read_dump(many))
    assert [item.name for item in verdict.wrong] == [NORM]
    assert verdict.wrong[0].fault is not None
    assert "Partial; each rank has its own part only" in verdict.wrong[0].fault.text


def test_other_weights_on_one_copy_are_a_fault(tmp_path: Path) -> None:
    def mutate(dumps: list[Rank]) -> None:
        dumps[1]["tensors"][NORM]["value"] = torch.full((8,), 1.5, dtype=torch.float64)

    verdict = judge(tmp_path, mutate)
    assert [(item.name, item.fault and item.fault.fault_type) for item in verdict.wrong] == [(NORM, "weights")]


def test_bound_follows_the_coarsest_format(tmp_path: Path) -> None:
    def to_fp32(dumps: list[Rank]) -> None:
        for rank in dumps:
            for entry in rank["tensors"].values():
                entry["value"], entry["grad"] = entry["value"].float(), entry["grad"].float()

    verdict = judge(tmp_path, to_fp32)
    assert verdict.is_equal
    assert verdict.rtol == 1e-4
    assert 0 < max(item.error for item in verdict.gradients) < 1e-7


def truncate(folder: Path) -> None:
    path = folder / "rank-00001.pt"
    path.write_bytes(path.read_bytes()[:200])


def rewrite(mutate: Mutation) -> Callable[[Path], None]:
    """Return a change of the layout's dump before it is written."""

    def change(folder: Path) -> None:
        ranks = make_ranks(make_whole(), tp=2)
        mutate(ranks)
        write_dump(folder, ranks)

    return change


def drop_second_shard(dumps: list[Rank]) -> None:
    dumps[1]["tensors"][UP] = {key: tensor.clone() for key, tensor in dumps[0]["tensors"][UP].items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: [path.unlink() for path in folder.iterdir()], "has no dump"),
        (lambda folder: (folder / "rank-00001.pt").unlink(), "lacks the dumps of ranks [1] of 2"),
        (truncate, "rank-00001.pt is damaged"),
        (lambda folder: torch.save([1], folder / "rank-00000.pt"), "is not a dump of the hook"),
        (lambda folder: (folder / "rank-00000.norm.pt").write_bytes(b"no"), "norm.pt is damaged"),
        (lambda folder: write_dump(folder, make_ranks(make_whole(), tp=1)), "mixes dumps of 1 and 2 ranks"),
        (rewrite(lambda ranks: ranks[0]["tensors"].clear()), "has no parameters"),
        (rewrite(lambda ranks: [rank["tensors"].pop(DOWN) for rank in ranks]), f"no rank of {{}} has {DOWN}"),
        (rewrite(lambda ranks: [rank["tensors"][UP]["value"].add_(1) for rank in ranks]), "are not those of"),
        (rewrite(drop_second_shard), "are 64 of 128 elements"),
        (rewrite(lambda ranks: ranks[0]["tensors"][UP].update(grad=torch.ones(3))), "Dump full gradients"),
        (rewrite(lambda ranks: ranks[0].update(axes={"tp": (0, 1)})), "name different axes"),
        (rewrite(lambda ranks: ranks[0].update(axes={"tp": 2})), "must be (index of this rank, size), got tp=2"),
        (rewrite(lambda ranks: ranks[0].update(axes={"tp": (2, 1)})), "size), got tp=(2, 1). Call the hook with tp="),
    ],
)  # fmt: skip
def test_bad_dump_is_rejected(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    one, many = write_pair(tmp_path, tp=2)
    change(many)
    with pytest.raises(BadDumpError) as error:
        judge_step(read_dump(one), read_dump(many))
    assert message.format(many) in str(error.value)


def test_layout_as_first_dump_is_rejected(tmp_path: Path) -> None:
    _, many = write_pair(tmp_path, tp=2)
    with pytest.raises(BadDumpError, match="must be of one process"):
        judge_step(read_dump(many), read_dump(many))


def test_names_that_differ_are_listed_and_can_be_renamed(tmp_path: Path) -> None:
    def rename(dumps: list[Rank]) -> None:
        for rank in dumps:
            rank["tensors"] = {f"chunk0.module.model.{name}": entry for name, entry in rank["tensors"].items()}

    one, many = write_pair(tmp_path, rename, tp=2)
    with pytest.raises(BadDumpError, match=r"only .* has model\.layers\.0\.norm\.weight, .*--rename"):
        judge_step(read_dump(one), read_dump(many))
    assert judge_step(read_dump(one), read_dump(many, renames=[(r"^model\.", "")])).is_equal


def test_axes_can_be_given(tmp_path: Path) -> None:
    def forget_axes(dumps: list[Rank]) -> None:
        split_into_parts(NORM, TP_GROUPS, "sum")(dumps)
        for rank in dumps:
            rank["axes"] = {}

    one, many = write_pair(tmp_path, forget_axes, tp=2, dp=2)
    unnamed = judge_step(read_dump(one), read_dump(many)).wrong[0].fault
    assert unnamed is not None
    assert unnamed.axis != "tp"
    named = judge_step(read_dump(one), read_dump(many, {"tp": 2, "dp": 2})).wrong[0].fault
    assert named is not None
    assert (named.fault_type, named.axis) == ("missing sum", "tp")
    with pytest.raises(BadDumpError, match="number of ranks, 4"):
        read_dump(many, {"tp": 2})
