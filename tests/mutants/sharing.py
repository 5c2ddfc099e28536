"""Mistakes in modules that layers of several stages share."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

EQUAL = "tests/tds/test_sharing.py::test_gradients_and_norm_equal_one_process[2]"

SHARING = (
    Mutant(
        "gradients of shared modules are not summed over the stages",
        "tds/module.py",
        "return {**super().index_tied_modules(), **index_shared_modules(self)}",
        "index_shared_modules(self)\n        return super().index_tied_modules()",
        (EQUAL,),
    ),
    Mutant(
        "the norm counts a shared module on each stage",
        "tds/shared_layers.py",
        "module.global_rank != ranks[0]",
        "False",
        (EQUAL,),
    ),
    Mutant(
        "each layer builds what it should share",
        "tds/shared_layers.py",
        "if shared.key not in modules:",
        "if True:",
        (EQUAL,),
    ),
    Mutant(
        "replicas sum a shared module before the stages have",
        "tds/engine/build.py",
        "if dist.get_world_size(group) > 1]",
        "if dist.get_world_size(group) > 9]",
        ("tests/tds/test_sharing.py::test_replicas_add_up_what_is_shared_once[2]",),
    ),
    Mutant(
        "the decoder draws the encoder's dropout masks in a pipeline",
        "megatron/models/t5/pipeline.py",
        "            side=self.side,\n",
        '            side="encoder",\n',
        ("tests/parity/test_t5_layouts.py::test_dropout_draws_the_masks_of_one_process_and_again_in_recompute",),
    ),
    Mutant(
        "no layer of T5 is recomputed",
        "megatron/models/t5/pipeline.py",
        "    layer_classes = (EncoderLayerPipe, DecoderLayerPipe)\n",
        "    layer_classes = ()\n",
        ("tests/models/t5/test_pipeline.py::test_recompute_runs_each_layer_of_both_sides_twice",),
    ),
)
