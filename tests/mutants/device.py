"""Mistakes in the seam to devices, in adaptors and plug-ins, and in the choice of fused kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADAPTORS = "tests/test_adaptors.py"
REGISTRY = "tests/test_accelerators.py"
OPENED = "tests/training/test_accelerator.py"
FUSED = "tests/training/test_fused.py"
SIMULATED = "tests/examples/test_accelerator_sim.py"

DEVICE = (
    Mutant(
        "DeepSpeed is told of the CPU while adaptors are applied",
        "megatron/training/device_setup.py",
        'plugin.name if plugin.deepspeed is None else "cpu"',
        '"cpu"',
        (f"{REGISTRY}::test_deepspeed_is_told_of_the_device_ahead_of_the_adaptors_which_may_import_it",),
    ),
    Mutant(
        "a rank takes a device behind the last one",
        "megatron/device.py",
        "    if local_rank >= number:\n",
        "    if local_rank > number:\n",
        ("tests/test_device.py::test_a_rank_without_a_device_of_its_own_is_told_how_many_it_sees",),
    ),
    Mutant(
        "an attribute that was inherited stays on the class",
        "megatron/accelerators.py",
        "            elif patch.old is _MISSING:\n                delattr(patch.owner, patch.attribute)\n",
        "            elif patch.old is _MISSING:\n                pass\n",
        (f"{ADAPTORS}::test_all_attributes_are_replaced_and_put_back_as_they_were",),
    ),
    Mutant(
        "a static method comes back as a plain function",
        "megatron/accelerators.py",
        "            old = vars(owner).get(attribute, _MISSING)\n",
        "            old = getattr(owner, attribute) if attribute in vars(owner) else _MISSING\n",
        (f"{ADAPTORS}::test_all_attributes_are_replaced_and_put_back_as_they_were",),
    ),
    Mutant(
        "DISABLE_ADAPTOR=1 leaves adaptors on",
        "megatron/accelerators.py",
        '    return _switch(env, ALL_OFF, "0") == "0" and _switch',
        "    return _switch",
        (f"{ADAPTORS}::test_the_environment_switches_parts_off",),
    ),
    Mutant(
        "all parts have the switch of torch",
        "megatron/accelerators.py",
        'f"ENABLE_{self.part.upper()}_ADAPTOR"',
        '"ENABLE_TORCH_ADAPTOR"',
        (f"{ADAPTORS}::test_the_environment_switches_parts_off",),
    ),
    Mutant(
        "a failing replacement leaves the others applied",
        "megatron/accelerators.py",
        "    except BaseException:\n        applied.disable()\n",
        "    except BaseException:\n",
        (f"{ADAPTORS}::test_a_replacement_that_fails_takes_the_others_back",),
    ),
    Mutant(
        "auto prefers the CPU to a plug-in",
        "megatron/device.py",
        "tuple(reversed(accelerators.names()))",
        "accelerators.names()",
        (f"{REGISTRY}::test_auto_takes_the_last_plug_in_that_has_a_device",),
    ),
    Mutant(
        "a plug-in's hook answers for the CPU too",
        "megatron/device.py",
        "        plugin = accelerators.find(place if isinstance(place, str) else place.type)\n",
        "        plugin = next(iter(accelerators.registered()), None)\n",
        (f"{REGISTRY}::test_hooks_take_the_place_of_the_seams_functions_for_their_device_alone",),
    ),
    Mutant(
        "plug-ins of the environment come after the check",
        "megatron/arguments/parser.py",
        "    problems = own + found.problems + _plugin_problems(env) + find_problems(config, world_size)\n",
        "    problems = own + found.problems + find_problems(config, world_size) + _plugin_problems(env)\n",
        (f"{REGISTRY}::test_the_environment_imports_plug_ins_ahead_of_the_check",),
        refuses=True,
    ),
    Mutant(
        "a plug-in is opened at every call",
        "megatron/training/device_setup.py",
        "        if plugin is not None and accelerators.applied(kind) is None:\n",
        "        if plugin is not None:\n",
        (f"{OPENED}::test_a_plug_in_is_opened_once_in_order_and_deepspeed_gets_its_object",),
    ),
    Mutant(
        "adaptors are applied before DeepSpeed has the device",
        "megatron/training/device_setup.py",
        "    device.prepare(plugin.name)\n",
        "    device.prepare(plugin.name)\n    accelerators.adapt(plugin.name)\n",
        (f"{OPENED}::test_a_plug_in_is_opened_once_in_order_and_deepspeed_gets_its_object",),
    ),
    Mutant(
        "moved parameters are new ones",
        "tds/device.py",
        "        if made.device != parameter.device:\n",
        "        if False:\n",
        (f"{OPENED}::test_moved_parameters_stay_the_objects_that_they_are",),
    ),
    Mutant(
        "apex's steps are counted from the start again",
        "megatron/training/device_setup.py",
        '                group["step"] = counts[0] if counts else 0\n',
        "                pass\n",
        (f"{FUSED}::test_adam_of_apex_moves_weights_as_torchs_and_a_resume_in_the_other_goes_on",),
    ),
    Mutant(
        "auto takes apex's norms",
        "megatron/training/device_setup.py",
        '    if config.parallel.fused_kernels != "apex":\n        return 0\n',
        '    if config.parallel.fused_kernels == "torch":\n        return 0\n',
        (f"{FUSED}::test_norms_use_apex_where_it_is_chosen_and_has_a_kernel",),
    ),
    Mutant(
        "layer norms without a shift get apex's kernel",
        "megatron/training/device_setup.py",
        "isinstance(norm, LayerNorm) and norm.bias is not None:",
        "isinstance(norm, LayerNorm):",
        (f"{FUSED}::test_norms_use_apex_where_it_is_chosen_and_has_a_kernel",),
    ),
    Mutant(
        "the collectives of the simulated device do nothing",
        "examples/accelerator_sim/megatron_accelerator_sim/kernels.py",
        "            kernel = _redirected(getattr(torch.ops.c10d, operation).default)\n",
        "            kernel = _redirected(getattr(torch.ops.c10d, operation).default)\n"
        '            if operation == "allreduce_":\n'
        "                redirected, kernel = kernel, lambda x, *a: (x, redirected([y.clone() for y in x], *a)[1])\n",
        (f"{SIMULATED}::test_gpt2_trains_on_two_tensor_ranks_to_the_numbers_of_the_cpu",),
    ),
    Mutant(
        "a CPU has 1 threads",
        "megatron/device.py",
        "{threads} thread{'' if threads == 1 else 's'}",
        "{threads} threads",
        ("tests/test_device.py::test_a_cpu_is_named_with_its_threads",),
    ),
)
