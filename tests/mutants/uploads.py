"""Mistakes in the copies of data beside the computation: read too early, too late, of other numbers, or waited for."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COPIES = "tests/mpu/test_uploads.py"
AWAITED = f"{COPIES}::test_copies_start_at_once_and_the_device_waits_for_them_when_they_are_asked_for"
CHANGED = f"{COPIES}::test_to_a_program_it_is_what_was_read_and_its_changes_count"
AHEAD = "tests/training/test_uploads.py"
ORDER = f"{AHEAD}::test_a_step_copies_the_first_data_of_the_next_one_before_the_host_waits"
FAILED = f"{AHEAD}::test_an_error_of_what_is_read_ahead_is_raised_when_it_is_asked_for"
CROSSING = "tests/training/test_host_reads.py::test_between_host_and_device_go_the_data_and_what_the_host_reads[gpt2]"

UPLOADS = (
    Mutant(
        "the computation does not wait for the data",
        "megatron/device.py",
        "    current.wait_event(uploaded)\n",
        "",
        (AWAITED,),
    ),
    Mutant(
        "the memory of data is free before they are read",
        "megatron/device.py",
        "    for copy in copies:\n        copy.record_stream(current)",
        "    for copy in ():\n        copy.record_stream(current)",
        (AWAITED,),
    ),
    Mutant(
        "the host waits for each copy of data",
        "megatron/device.py",
        "tensor.to(place, non_blocking=True) for name, tensor in tensors.items()}\n    return copies, beside",
        "tensor.to(place) for name, tensor in tensors.items()}\n    return copies, beside",
        (AWAITED,),
    ),
    Mutant(
        "a device without streams copies while nobody awaits it",
        "megatron/device.py",
        "        return {name: tensor.to(place) for name",
        "        return {name: tensor.to(place, non_blocking=True) for name",
        (f"{COPIES}::test_without_streams_the_copies_are_plain_ones",),
    ),
    Mutant(
        "what a program has put into a micro-batch is not seen",
        "megatron/mpu/data.py",
        "        if self._read.get(name) != (id(tensor), tensor._version):\n",
        "        if name not in self._read:\n",
        (CHANGED,),
    ),
    Mutant(
        "what a program has written into a tensor is not seen",
        "megatron/mpu/data.py",
        "self._read.get(name) != (id(tensor), tensor._version):\n",
        "self._read.get(name, (0,))[0] != id(tensor):\n",
        (CHANGED,),
    ),
    Mutant(
        "the copies are made and not taken",
        "megatron/mpu/data.py",
        "(data.on_device(name) if isinstance(data, Upload) else tensor).to",
        "tensor.to",
        (AWAITED,),
    ),
    Mutant(
        "what was read ahead is lost",
        "megatron/training/data.py",
        "        return self._upload() if ahead is None else ahead\n",
        "        return self._upload()\n",
        (f"{AHEAD}::test_reading_ahead_changes_nothing_of_what_is_given_and_reads_one",),
    ),
    Mutant(
        "a sample that cannot be read ends the step before its own",
        "megatron/training/data.py",
        "        except Exception as error:\n            self._error = error\n",
        "        except KeyError as error:\n            self._error = error\n",
        (FAILED,),
        refuses=True,
    ),
    Mutant(
        "an error of what was read ahead is forgotten",
        "megatron/training/data.py",
        "        if error is not None:\n            raise error\n        ahead",
        "        ahead",
        (FAILED,),
        refuses=True,
    ),
    Mutant(
        "reading beside the device's work counts as a wait",
        "megatron/training/data.py",
        "        if device.is_busy(self._place):\n            self._waited_s = waited_s\n",
        "",
        (f"{AHEAD}::test_reading_while_the_device_has_work_is_no_wait[True]",),
    ),
    Mutant(
        "one stage reads ahead behind the host's wait",
        "megatron/training/train_step.py",
        "        read_ahead(data)\n        read_with_norm(self.optimizer, agreement)\n",
        "        read_with_norm(self.optimizer, agreement)\n        read_ahead(data)\n",
        (f"{ORDER}[1]",),
    ),
    Mutant(
        "a pipeline does not read ahead",
        "tds/engine/engine.py",
        "    if source is not None:\n        source.read_ahead()\n",
        "",
        (f"{ORDER}[2]",),
    ),
    Mutant(
        "shapes of data are read of the device",
        "megatron/mpu/data.py",
        "    dist.broadcast(table, src",
        "    dist.broadcast(table if not tensors else table.to(tensors[0].device), src",
        ("tests/mpu/test_data.py::test_shapes_are_told_over_the_host_and_numbers_over_the_device",),
    ),
    Mutant(
        "shapes go over the device's group",
        "megatron/mpu/initialize.py",
        'is_on_host = _device.type == "cpu"',
        "is_on_host = True",
        ("tests/mpu/test_initialize.py::test_the_tensor_group_has_a_group_over_the_host_of_its_own_unless_it_is_one",),
    ),
    Mutant(
        "a table is copied to the device in every step",
        "megatron/data/gpt_dataset.py",
        '        "loss_mask": has_loss.float(),\n        "position_ids"',
        '        "loss_mask": has_loss * torch.ones(has_loss.shape[1]).to(tokens.device),\n        "position_ids"',
        (CROSSING,),
    ),
    Mutant(
        "layers are compiled to CUDA graphs where the environment says so",
        "megatron/training/compile.py",
        "    if inductor.triton.cudagraphs:\n",
        "    if inductor.triton.cudagraphs and device.type == 'cpu':\n",
        ("tests/training/test_compiled.py::test_cuda_graphs_are_refused_on_a_gpu_and_do_not_matter_to_a_cpu",),
        refuses=True,
    ),
)
