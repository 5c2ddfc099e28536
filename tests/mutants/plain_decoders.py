"""Mistakes in where a family's parts are found, and in the model that is built of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_REGISTRY, _TOY = "tests/models/test_registry.py", "tests/models/test_toy_family.py"
_BUILT = f"{_REGISTRY}::test_the_stages_of_a_run_are_cut_as_it_says"
_BESIDE = f"{_REGISTRY}::test_what_travels_beside_hidden_states"

PLAIN_DECODERS = (
    Mutant(
        "a decoder has the plain decoder's part though it has its own",
        "megatron/models/registry.py",
        " and importlib.util.find_spec(own) is None\n",
        "\n",
        (f"{_REGISTRY}::test_a_part_of_its_own_comes_first",),
    ),
    Mutant(
        "a family that is no decoder has the plain decoder's parts",
        "megatron/models/registry.py",
        'family.kind == "decoder" and part in PLAIN',
        "part in PLAIN",
        (f"{_REGISTRY}::test_what_is_no_decoder_must_have_its_parts",),
    ),
    Mutant(
        "the model of a plain decoder says that it is a GPT-2",
        "megatron/models/common/decoder.py",
        '**{"family": config.family, **switches}',
        "**switches",
        (f"{_TOY}::test_its_parts_are_its_own",),
    ),
    Mutant(
        "the model of a run recomputes nothing",
        "megatron/models/registry.py",
        "model_args(config, **switches)",
        "model_args(config)",
        (f"{_REGISTRY}::test_the_model_of_a_run_recomputes_what_the_run_says_and_one_that_is_looked_at_does_not",),
    ),
    Mutant(
        "stages are not cut by what layers cost",
        "megatron/models/registry.py",
        'if partition == "balanced":',
        'if partition == "costs":',
        (f"{_BUILT}[balanced-False-gpt2]",),
    ),
    Mutant(
        "layers are timed on one side's length",
        "megatron/models/registry.py",
        "(batch.batch_size, *config.own.sequence_lengths(batch))",
        "(batch.batch_size, batch.seq_length)",
        (f"{_BUILT}[profile-True-t5]",),
    ),
    Mutant(
        "stages are not told how a micro-batch becomes their inputs",
        "megatron/models/registry.py",
        "    stages._megatron_batch_fn = get_batch_pipe\n",
        "    stages._megatron_batch_fn = None\n",
        (f"{_BUILT}[balanced-False-gpt2]",),
    ),
    Mutant(
        "positions that begin anew do not travel through LLaMA's stages",
        "megatron/models/common/pipeline.py",
        '"has_positions": travel',
        '"has_positions": False',
        (_BESIDE,),
    ),
    Mutant(
        "the padding of BERT's samples does not travel",
        "megatron/models/bert/pipeline.py",
        'return {"has_segments": config.own.pads_samples}',
        'return {"has_segments": config.data.keeps_documents_apart}',
        (_BESIDE,),
    ),
)
