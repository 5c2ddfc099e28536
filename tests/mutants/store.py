"""Mistakes in saving in the background, in checking a checkpoint's bytes, and in what ranks tell each other."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BEHIND = "tests/checkpoint/test_background.py"
CAUSES = "tests/checkpoint/test_causes.py"
DAMAGE = "tests/checkpoint/test_damage.py"
FOLDERS = "tests/checkpoint/test_folders.py"
LATE = "tests/checkpoint/test_visibility.py"
SHARED = "tests/checkpoint/test_verify.py::test_ranks_share_one_file_and_any_of_them_finds_the_byte"
SAME_BYTES = f"{BEHIND}::test_its_bytes_are_those_of_a_save_that_is_waited_for_whatever_training_does_meanwhile"

STORE = (
    Mutant(
        "the background save writes the tensors that training changes",
        "megatron/checkpoint/saving.py",
        "            copies[place] = replace(record, tensor=held)\n",
        "            copies[place] = record\n",
        (f"{SAME_BYTES}[1]",),
    ),
    Mutant(
        "the background save writes the state that training changes",
        "megatron/checkpoint/saving.py",
        "copy.deepcopy(state) if",
        "state if",
        (f"{SAME_BYTES}[1]",),
    ),
    Mutant(
        "the next background save copies over what is being written",
        "megatron/checkpoint/saving.py",
        "        self._join()\n        waited_s = ",
        "        waited_s = ",
        (f"{BEHIND}::test_the_next_save_waits_for_the_one_under_way_and_uses_its_memory_again",),
    ),
    Mutant(
        "a failed background save is forgotten",
        "megatron/checkpoint/saving.py",
        "            self._outcomes.append(error)\n",
        "            del error\n",
        (f"{BEHIND}::test_a_failure_on_one_rank_is_told_once_on_all_and_the_next_save_succeeds",),
    ),
    Mutant(
        "a rank that cannot copy leaves the others to wait",
        "megatron/checkpoint/saving.py",
        "            return partial(_raise, error), 0\n",
        "            raise\n",
        (f"{BEHIND}::test_a_failure_on_one_rank_is_told_once_on_all_and_the_next_save_succeeds",),
        refuses=True,
    ),
    Mutant(
        "each rank verifies the segments of rank 0",
        "megatron/checkpoint/loading.py",
        "own[world.rank :: world.size]",
        "own[0 :: world.size]",
        (f"{SHARED}[3]",),
    ),
    Mutant(
        "the last segment of a file is read to its end only by luck",
        "megatron/checkpoint/loading.py",
        "    starts = range(0, max(size, 1), SEGMENT_BYTES)\n",
        "    starts = range(0, max(size - SEGMENT_BYTES, 1), SEGMENT_BYTES)\n",
        (f"{SHARED}[1]",),
    ),
    Mutant(
        "checksums are joined as if all segments were one byte",
        "megatron/files.py",
        "_x_to(8 * second_bytes)",
        "_x_to(8)",
        ("tests/test_files.py::test_the_crc_of_a_long_piece_follows_as_that_of_a_short_one",),
    ),
    Mutant(
        "a missing shard of a local disk is waited for",
        "megatron/checkpoint/shard_file.py",
        "_is_visible(path, size) or not is_on_network(path)",
        "_is_visible(path, size)",
        (f"{LATE}::test_on_a_local_disk_nobody_waits",),
    ),
    Mutant(
        "each file is waited for anew",
        "megatron/checkpoint/shard_file.py",
        "        self._end = self._end or time.monotonic() + WAIT_S\n",
        "        self._end = time.monotonic() + WAIT_S\n",
        (f"{LATE}::test_files_that_never_come_are_waited_for_together",),
    ),
    Mutant(
        "a shard that is there in part is taken for whole",
        "megatron/checkpoint/shard_file.py",
        "        return path.stat().st_size >= size\n",
        "        return path.exists()\n",
        (f"{LATE}::test_a_shard_that_is_late_on_nfs_is_waited_for[5]",),
        refuses=True,
    ),
    Mutant(
        "an older checkpoint serves where the newest must",
        "megatron/checkpoint/loading.py",
        "            if strict:\n",
        "            if strict and one == candidates[-1]:\n",
        (f"{DAMAGE}::test_strictly_nothing_older_is_taken[rank-00000.safetensors]",),
    ),
    Mutant(
        "a checkpoint without a manifest is passed over in silence",
        "megatron/checkpoint/folders.py",
        "[*ahead, *whole, *(path for path in broken if path not in ahead)]",
        "[*whole, *broken]",
        (f"{DAMAGE}::test_strictly_nothing_older_is_taken[manifest.json]",),
    ),
    Mutant(
        "a sequence number is taken as it stands",
        "megatron/checkpoint/manifest.py",
        "_SECOND_LINE.search(content[:256]) if is_whole(content) else None",
        "_SECOND_LINE.search(content[:256])",
        (f"{DAMAGE}::test_a_digit_of_the_newest_sequence_number_costs_it_its_place_and_is_told[steps0]",),
    ),
    Mutant(
        "a checkpoint of a lower step counts as older",
        "megatron/checkpoint/folders.py",
        "step_of(path) >= step_of(other) or _written_at(path) > _written_at(other)",
        "step_of(path) >= step_of(other)",
        (f"{DAMAGE}::test_a_digit_of_the_newest_sequence_number_costs_it_its_place_and_is_told[steps1]",),
    ),
    Mutant(
        "the number of those that nobody asked for holds for all",
        "megatron/checkpoint/folders.py",
        "is_one = self.last is not None or bool(content.state.get(AUTOMATIC))",
        "is_one = True",
        (f"{FOLDERS}::test_of_those_that_nobody_asked_for_the_last_few_stay_beside_all_others",),
    ),
    Mutant(
        "the number of those that nobody asked for counts more than a flag",
        "megatron/checkpoint/folders.py",
        "    number = keep.automatic if keep.last is None else keep.last\n",
        "    number = keep.automatic or keep.last\n",
        (f"{FOLDERS}::test_whoever_says_what_to_keep_gets_that",),
    ),
    Mutant(
        "the steps to keep for ever are deleted",
        "megatron/checkpoint/folders.py",
        "            return True\n        return self.loaded",
        "            return False\n        return self.loaded",
        (f"{FOLDERS}::test_every_so_many_steps_one_stays_whatever_came_after_it",),
    ),
    Mutant(
        "one rank reads before another has found a tensor missing",
        "megatron/checkpoint/loading.py",
        "        self._load(list(records), self._world)\n",
        "        self._load(list(records), SINGLE)\n",
        (f"{CAUSES}::test_a_tensor_that_one_rank_misses_stops_all_before_anything_is_read",),
    ),
    Mutant(
        "an error goes to the other ranks as it is",
        "megatron/checkpoint/rank_errors.py",
        "            raise CheckpointError(cause(error)).with_traceback(error.__traceback__) from error\n",
        "            raise\n",
        (f"{CAUSES}::test_an_error_that_cannot_travel_is_told_all_the_same",),
        refuses=True,
    ),
)
