"""Mistakes in what goes to object stores and comes from there."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UPLOADED = "tests/data/test_token_upload.py"
RANGES = "tests/data/test_range_cache.py"
CHECKPOINTS = "tests/checkpoint/test_remote.py"
RUNS = "tests/training/test_store_runs.py"
STORES = (
    Mutant(
        "the index of token files is uploaded first",
        "megatron/data/token_upload.py",
        'ORDER = (".bin", ".meta.json", ".idx")',
        'ORDER = (".idx", ".bin", ".meta.json")',
        (f"{UPLOADED}::test_the_store_gets_the_bytes_of_the_disk_and_the_index_last",),
    ),
    Mutant(
        "what was uploaded is not read back",
        "megatron/object_store.py",
        "        if crc32 is not None and checksum(path, size) != crc32:\n",
        "        if crc32 is not None and size < 0:\n",
        (f"{UPLOADED}::test_an_upload_that_fails_is_sent_again_and_what_fails_for_good_is_no_index",),
    ),
    Mutant(
        "the size of what was uploaded is not looked at",
        "megatron/object_store.py",
        "        if found != size:\n",
        "        if found is None:\n",
        (f"{CHECKPOINTS}::test_an_object_that_came_short_is_sent_again",),
    ),
    Mutant(
        "a block is taken without its checksum",
        "megatron/data/range_cache.py",
        '            if len(content) < 4 or zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little"):\n',
        "            if len(content) < 4:\n",
        (f"{RANGES}::test_a_damaged_block_is_fetched_again_and_said",),
    ),
    Mutant(
        "the cache grows beyond its size",
        "megatron/data/range_cache.py",
        "            if used[0] + num_bytes > self.limit_bytes:\n",
        "            if used[0] > 2 * self.limit_bytes:\n",
        (f"{RANGES}::test_the_cache_never_holds_more_than_it_may_and_gives_the_same_tokens",),
    ),
    Mutant(
        "a block that two processes fetched counts twice",
        "megatron/data/range_cache.py",
        "                used[0] -= gone\n                gone = 0\n",
        "                gone = 0\n",
        (f"{RANGES}::test_a_block_that_comes_twice_counts_once",),
    ),
    Mutant(
        "tokens that were written again come from the cache",
        "megatron/data/range_cache.py",
        'f"{path}\\n{size}\\n{version}"',
        'f"{path}\\n{size}"',
        (f"{RANGES}::test_tokens_that_were_written_again_are_others",),
        refuses=True,
    ),
    Mutant(
        "a reader hears of samples that another one reads",
        "megatron/data/data_loader.py",
        "range(num_readers, depth + 1, num_readers)",
        "range(1, depth + 1, num_readers)",
        (f"{RANGES}::test_each_reader_is_told_of_what_it_will_read",),
    ),
    Mutant(
        "samples are fetched ahead by their number in the mixture",
        "megatron/data/data_loader.py",
        "            part.prefetch(place)\n",
        "            part.prefetch(index)\n",
        (f"{RANGES}::test_of_a_mixture_the_samples_that_come_are_fetched",),
    ),
    Mutant(
        "a checkpoint counts as whole without its files",
        "megatron/checkpoint/remote.py",
        "    missing = {name: size for name, (size, _) in named.items() if held.get(name) != size}\n",
        "    missing = {name: size for name, (size, _) in named.items() if size < 0}\n",
        (f"{CHECKPOINTS}::test_the_manifest_comes_last_and_what_is_half_there_is_not_found",),
    ),
    Mutant(
        "the manifest is uploaded while ranks still send",
        "megatron/checkpoint/uploading.py",
        "        if self._rank or [file.name for file in folder.iterdir()] not in ([marker.name], []):\n",
        "        if self._rank:\n",
        (f"{CHECKPOINTS}::test_each_rank_sends_its_files_and_the_marker_waits_for_all",),
    ),
    Mutant(
        "an older manifest stays while its files are overwritten",
        "megatron/checkpoint/uploading.py",
        "        object_store.remove(object_store.join(self._target, kind, name, MARKERS[kind]))\n",
        "        object_store.join(self._target, kind, name, MARKERS[kind])\n",
        (f"{CHECKPOINTS}::test_a_marker_of_the_same_name_goes_ahead_of_the_files",),
    ),
    Mutant(
        "what is downloaded is not compared with the manifest",
        "megatron/checkpoint/downloading.py",
        '    return "" if found == crc32 else',
        '    return "" if found else',
        (f"{CHECKPOINTS}::test_damaged_bytes_are_found_and_an_older_one_is_taken_unless_strict",),
    ),
    Mutant(
        "the files of an old checkpoint are deleted ahead of its manifest",
        "megatron/checkpoint/remote.py",
        "key=lambda name: name != last)",
        "key=lambda name: name == last)",
        (f"{CHECKPOINTS}::test_old_ones_are_deleted_manifest_first",),
    ),
    Mutant(
        "the checkpoint of the highest step is taken for the newest",
        "megatron/checkpoint/remote.py",
        "key=lambda one: (one.sequence, one.step)",
        "key=lambda one: (one.step, one.sequence)",
        (f"{CHECKPOINTS}::test_what_was_uploaded_is_downloaded_to_the_byte",),
    ),
    Mutant(
        "a failed upload is forgotten",
        "megatron/checkpoint/uploading.py",
        "            self._failed.clear()\n            self._looks_until",
        "            self._looks_until",
        (f"{CHECKPOINTS}::test_an_upload_that_fails_is_said_and_goes_with_the_next_save",),
    ),
    Mutant(
        "a run is uploaded among the checkpoints of another one",
        "megatron/training/run_folder.py",
        "    if found and not _is_own_store(flags) and",
        "    if not found and not _is_own_store(flags) and",
        (f"{RUNS}::test_a_store_with_another_run_is_refused",),
    ),
    Mutant(
        "an older checkpoint of the store is taken before a newer one of the run folder",
        "megatron/training/run_folder.py",
        "    if is_own and last_sequence(saved) >= newest:\n",
        "    if is_own and last_sequence(saved) > 10 * newest:\n",
        (f"{RUNS}::test_what_a_store_gives_to_a_start",),
    ),
)
