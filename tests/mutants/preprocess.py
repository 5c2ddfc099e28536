"""Mistakes in turning text into token files."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACE = "megatron/data/preprocess"
JOB = "tests/data/preprocess/test_preprocess.py"
RESUMED = "tests/data/preprocess/test_preprocess_resume.py"
FAULTS = "tests/data/preprocess/test_preprocess_faults.py"
VERIFIED = "tests/data/preprocess/test_preprocess_verify.py"
WRITER = "tests/data/test_token_writer.py"
KILLED = f"{RESUMED}::test_a_kill_before_any_operation_leaves_the_old_or_the_new_pair_and_a_job_that_goes_on[14]"

PREPROCESS = (
    Mutant(
        "a limit on the size of files is told as a full disk",
        "megatron/data/preprocess/plan.py",
        "    if error.errno == errno.EFBIG:\n",
        "    if error.errno == errno.EROFS:\n",
        (
            ""
            "tests/data/preprocess/test_preprocess_faults.py::test_a_limit_on_the_size_of_files_is_named_and_not_the_room_on_the_disk",
        ),
    ),
    Mutant(
        "parts are joined in the order in which they were finished",
        "megatron/data/preprocess/progress.py",
        "for number in sorted(self._finished)]",
        "for number in self._finished]",
        (f"{JOB}::test_bytes_depend_neither_on_the_processes_nor_on_the_units_nor_on_the_chunks",),
    ),
    Mutant(
        "the small file that makes a unit finished comes before its tokens",
        "megatron/data/preprocess/shards.py",
        "        for kind in KINDS:\n            self._rename(kind)\n",
        "        for kind in KINDS[1:]:\n            self._rename(kind)\n",
        (KILLED,),
        refuses=True,
    ),
    Mutant(
        "a finished unit is taken at its word",
        "megatron/data/preprocess/shards.py",
        '        return part if is_whole else "damaged"\n',
        "        return part\n",
        (f"{RESUMED}::test_finished_units_are_not_encoded_again_and_damaged_ones_are",),
    ),
    Mutant(
        "a resumed unit is encoded again",
        "megatron/data/preprocess/workers.py",
        "if part := parts.finished(unit.number):",
        "if (part := parts.finished(unit.number)) and False:",
        (f"{RESUMED}::test_finished_units_are_not_encoded_again_and_damaged_ones_are",),
    ),
    Mutant(
        "parts of other options are gone on with",
        "megatron/data/preprocess/plan.py",
        '        "--no-append-eod": not job.append_eod,\n',
        "",
        (f"{RESUMED}::test_a_job_that_differs_is_refused_and_the_difference_named",),
    ),
    Mutant(
        "the plan of the parts is deleted before the parts",
        "megatron/data/preprocess/shards.py",
        "    for name in [*units, *locks, *plans]:\n",
        "    for name in [*plans, *units, *locks]:\n",
        (f"{RESUMED}::test_the_plan_is_deleted_last",),
    ),
    Mutant(
        "workers outlive the job that was killed",
        "megatron/data/preprocess/workers.py",
        "    die_with_parent()\n",
        "    pass\n",
        (KILLED,),
        refuses=True,
    ),
    Mutant(
        "limits are looked at when all is done",
        f"{PLACE}/job.py",
        "                limits.check(counts, tally.most_records(running, counts))\n",
        "                counts = counts\n",
        (f"{FAULTS}::test_bad_lines_end_the_job_before_all_is_read",),
        refuses=True,
    ),
    Mutant(
        "the crc32 of joined parts takes the second for as long as the first",
        "megatron/data/file_io.py",
        "self.crc32 = files.crc32_combine(self.crc32, crc32, num_bytes)",
        "self.crc32 = files.crc32_combine(self.crc32, crc32, self.size)",
        (f"{WRITER}::test_whole_files_are_laid_end_to_end[True]",),
    ),
    Mutant(
        "byte offsets start anew with each block of lengths",
        "megatron/data/index_format.py",
        "        ends = start + np.cumsum(sizes, dtype=np.int64)\n",
        "        ends = np.cumsum(sizes, dtype=np.int64)\n",
        (f"{WRITER}::test_the_index_is_that_of_the_format_however_it_is_cut[lengths2]",),
    ),
    Mutant(
        "a long document is cut after any line end",
        f"{PLACE}/encode.py",
        "        end = _lone_line_end(text, start, stop) or text.rfind",
        "        end = text.rfind",
        (f"{JOB}::test_a_long_document_has_the_ids_that_it_has_uncut",),
    ),
    Mutant(
        "the length of a document leaves out its end",
        f"{PLACE}/encode.py",
        "            sizes = sizes + 1\n",
        "            sizes = sizes + 0\n",
        (f"{JOB}::test_documents_come_back_each_with_its_end",),
        refuses=True,
    ),
    Mutant(
        "the lock is one that this process may take twice",
        "megatron/data/preprocess/job.py",
        '"flock"',
        '"lockf"',
        (f"{FAULTS}::test_the_second_job_on_a_prefix_is_refused",),
    ),
    Mutant(
        "the line numbers of bad lines start anew with each unit",
        "megatron/data/preprocess/shards.py",
        'if record.get("line") == 0:',
        'if record.get("line") == -5:',
        (f"{JOB}::test_bad_records_are_told_with_their_lines_and_left_out",),
    ),
    Mutant(
        "verifying does not compare the checksum of the tokens",
        "megatron/data/preprocess/verification.py",
        '        "crc32 of .bin": (sidecar.bin_crc32, crc32),\n',
        "",
        (f"{VERIFIED}::test_a_flipped_bit_is_found[100]",),
    ),
    Mutant(
        "a sidecar of files that were replaced stays",
        "megatron/data/indexed_dataset_builder.py",
        "        file_io.replace_together(self.prefix, written, gone)\n",
        "        file_io.replace_together(self.prefix, written)\n",
        (f"{WRITER}::test_files_of_an_unknown_vocabulary_have_no_sidecar_and_an_older_one_goes",),
        refuses=True,
    ),
)
