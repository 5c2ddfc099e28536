"""Mistakes in importing checkpoints of other programs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TEST = "tests/checkpoint/legacy/test_legacy.py"
MEGATRON = f"{TEST}::test_a_gpt2_of_megatron_in_any_layout_and_version_is_the_same_model"

LEGACY = (
    Mutant(
        "a T5 with rotary positions is only said to lack a tensor",
        "megatron/checkpoint/legacy/convert.py",
        "    if positions not in known:\n",
        "    if positions in known:\n",
        (f"{TEST}::test_settings_that_a_t5_does_not_have_are_refused",),
        refuses=True,
    ),
    Mutant(
        "rows of version 0 are taken for those of version 2",
        "megatron/checkpoint/legacy/weights.py",
        "turned = rows.reshape(parts, blocks, d, *rest).transpose(0, 1)",
        "turned = rows.reshape(blocks, parts, d, *rest)",
        (f"{TEST}::test_the_released_files_of_cpm1_are_read",),
    ),
    Mutant(
        "rows are put in order after the ranks' slices are joined",
        "megatron/checkpoint/legacy/weights.py",
        "blocks, left = divmod(count, ranks)",
        "blocks, left = count, 0",
        (f"{TEST}::test_the_released_files_of_cpm1_are_read",),
    ),
    Mutant(
        "slices of a row-parallel weight are joined by rows",
        "megatron/checkpoint/legacy/weights.py",
        'return 1 if kind == "weight" and',
        'return 0 if kind == "weight" and',
        (f"{MEGATRON}[2-1-0]",),
        refuses=True,
    ),
    Mutant(
        "each stage counts its layers from 0",
        "megatron/checkpoint/legacy/weights.py",
        "{int(match[2]) + first_layers[side]}",
        "{int(match[2])}",
        (f"{MEGATRON}[2-2-3.0]",),
    ),
    Mutant(
        "the norm ahead of cross-attention is taken for that of the feed-forward part",
        "megatron/checkpoint/legacy/weights.py",
        'part = "cross_norm"',
        'part = "post_attention_norm"',
        (f"{TEST}::test_a_t5_with_learned_positions_is_read[3.0]",),
        refuses=True,
    ),
    Mutant(
        "a file's objects are built whatever they are",
        "megatron/checkpoint/legacy/files.py",
        'map_location="cpu", weights_only=True)',
        'map_location="cpu", weights_only=False)',
        (f"{TEST}::test_nothing_that_a_file_carries_is_run",),
    ),
    Mutant(
        "a file without a version is taken for one of version 0",
        "megatron/checkpoint/legacy/weights.py",
        "    return settings, None\n",
        '    return settings, "3-heads-d"\n',
        (f"{TEST}::test_without_a_version_the_order_must_be_given",),
    ),
    Mutant(
        "a distributed checkpoint is taken for a folder without one",
        "megatron/checkpoint/legacy/files.py",
        "    if pieces or all(",
        "    if not pieces and all(",
        (f"{TEST}::test_what_cannot_be_imported_is_named",),
    ),
    Mutant(
        "a checkpoint with any file of metadata is taken for a distributed one",
        "megatron/checkpoint/legacy/files.py",
        'folder.glob("*.distcp")',
        'folder.glob("*.json")',
        (f"{TEST}::test_a_checkpoint_of_ours_is_not_taken_for_one_of_megatron_core",),
    ),
    Mutant(
        "the later name of epsilon is passed over",
        "megatron/checkpoint/legacy/convert.py",
        'settings.get("norm_epsilon", settings.get("layernorm_epsilon", _EPSILON))',
        'settings.get("layernorm_epsilon", _EPSILON)',
        (f"{TEST}::test_norms_and_their_epsilon_are_known_by_their_later_names",),
    ),
)
