"""Mistakes in reading token files, in the order of documents and in what a host keeps of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ORDER = "tests/data/test_document_order.py"
_CACHE = "tests/data/test_cache.py"
_LARGE = "tests/data/test_large_index.py"
_HASH = "tests/data/test_document_hash.py"
_READERS = "tests/data/test_readers.py"

READING = (
    Mutant(
        "what is still outside the range is not walked on",
        "megatron/data/permutation.py",
        "            outside = outside[again >= size]\n",
        "            outside = outside[:0]\n",
        ("tests/data/test_permutation.py::test_every_index_appears_once_and_both_forms_agree",),
    ),
    Mutant(
        "each part of a long order starts at its beginning",
        "megatron/data/permutation.py",
        "np.arange(start + begin, start + begin + len(part), dtype=np.uint64)",
        "np.arange(start, start + len(part), dtype=np.uint64)",
        ("tests/data/test_permutation.py::test_block_borders_change_nothing",),
    ),
    Mutant(
        "a segment's blocks are found without the tokens of the segments before it",
        "megatron/data/sample_index.py",
        'starts.searchsorted(start - base, "right")',
        'starts.searchsorted(start, "right")',
        (f"{_ORDER}::test_pieces_of_any_stretch_equal_the_order_written_out",),
    ),
    Mutant(
        "documents of a split by hash are taken as a range",
        "megatron/data/sample_index.py",
        "            part[:] = numbers_at(self._documents, part)\n",
        "            part[:] = numbers_at((0, self._count), part)\n",
        (f"{_ORDER}::test_pieces_of_any_stretch_equal_the_order_written_out",),
    ),
    Mutant(
        "the name of an order leaves out the documents",
        "megatron/data/sample_index.py",
        "source.fingerprint, documents_key(documents), seed)",
        "source.fingerprint, seed)",
        (f"{_ORDER}::test_nothing_stale_is_taken_from_the_cache",),
    ),
    Mutant(
        "the name of an order leaves out the data",
        "megatron/data/sample_index.py",
        "source.fingerprint, documents_key(documents), seed)",
        "documents_key(documents), seed)",
        (f"{_ORDER}::test_nothing_stale_is_taken_from_the_cache",),
    ),
    Mutant(
        "a file of the cache is written in place",
        "megatron/data/cache.py",
        '            temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"\n',
        "            temporary = path\n",
        (f"{_CACHE}::test_what_one_built_others_map_without_building",),
    ),
    Mutant(
        "a file of the cache is taken as it is",
        "megatron/data/cache.py",
        "                if not _fits(data):\n",
        "                if False:\n",
        (f"{_CACHE}::test_a_flipped_bit_anywhere_is_found_and_the_file_built_again",),
    ),
    Mutant(
        "a process counts from the moment when it imports the cache",
        "megatron/data/cache.py",
        "        return time.time_ns() - age_ns\n",
        "        return time.time_ns()\n",
        (f"{_CACHE}::test_the_start_of_a_process_is_known_however_late_this_module_is_imported",),
    ),
    Mutant(
        "documents come in the order of a damaged file",
        "megatron/data/cache.py",
        "                if not _fits(data):\n",
        "                if False:\n",
        (f"{_ORDER}::test_a_flipped_bit_in_the_cache_changes_no_order",),
        refuses=True,
    ),
    Mutant(
        "what an earlier job found of a file's checksum still counts",
        "megatron/data/cache.py",
        " and compared_ns >= _STARTED_NS\n",
        "\n",
        (f"{_CACHE}::test_a_flipped_bit_anywhere_is_found_and_the_file_built_again",),
    ),
    Mutant(
        "what was written to within a job is not compared again",
        "megatron/data/cache.py",
        "    return compared_ns == written_ns and",
        "    return",
        (f"{_CACHE}::test_what_was_written_to_within_a_job_is_compared_again",),
    ),
    Mutant(
        "each process compares each file",
        "megatron/data/cache.py",
        "            _note_compared(path)\n        return",
        "        return",
        (f"{_CACHE}::test_each_file_is_compared_once_by_all_processes_of_a_job",),
    ),
    Mutant(
        "the checksum leaves out the type",
        "megatron/data/cache.py",
        "    crc = zlib.crc32(data[:_CHECKED_BYTES].data, zlib.crc32(data[_HEADER_BYTES:].data))\n",
        '    crc = zlib.crc32(_MAGIC + b"<i4 " + data[8:16].tobytes(), zlib.crc32(data[_HEADER_BYTES:].data))\n',
        (f"{_CACHE}::test_a_flipped_bit_anywhere_is_found_and_the_file_built_again",),
        refuses=True,
    ),
    Mutant(
        "two processes compare one file at once",
        "megatron/data/cache.py",
        "            if not was_put_off and _claim(path).exists():",
        "            if False and _claim(path).exists():",
        (f"{_CACHE}::test_a_file_that_another_process_compares_is_left_for_later",),
    ),
    Mutant(
        "of two that build a file at once, each keeps its own",
        "megatron/data/cache.py",
        "                there = self._opened(path)\n                if there is None:\n                    files",
        "                there = None\n                if there is None:\n                    files",
        (f"{_CACHE}::test_of_two_that_build_at_once_the_later_takes_the_file_of_the_earlier",),
    ),
    Mutant(
        "a full disk ends the job",
        "megatron/data/cache.py",
        "            except OSError as error:\n                self._give_up(error)\n            finally:\n",
        "            finally:\n",
        (f"{_CACHE}::test_a_disk_that_fills_up_keeps_what_is_there",),
        refuses=True,
    ),
    Mutant(
        "anybody's folder is trusted",
        "megatron/data/cache.py",
        "(status.st_mode & 0o170022) == 0o040000",
        "(status.st_mode & 0o170000) == 0o040000",
        (f"{_CACHE}::test_the_default_is_for_this_user_alone",),
    ),
    Mutant(
        "documents of a large index start at its sampled places alone",
        "megatron/data/indexed_dataset.py",
        "start + int(self.sizes[document - rest : document].sum(dtype=np.int64)) if rest else start",
        "start",
        (f"{_LARGE}::test_large_and_small_readers_agree",),
    ),
    Mutant(
        "a document's sentences count as documents",
        "megatron/data/index_format.py",
        "        if count != self._header.num_sequences + 1:\n            return False\n",
        "        if count != self._header.num_sequences + 1:\n            return True\n",
        (f"{_LARGE}::test_files_of_both_writers_of_megatron_open",),
    ),
    Mutant(
        "the lengths of a large index are not looked at",
        "megatron/data/index_format.py",
        "            check_lengths(block, first, self._path)\n",
        "",
        (f"{_LARGE}::test_a_damaged_index_is_refused",),
    ),
    Mutant(
        "a short read is taken for a whole one",
        "megatron/data/file_io.py",
        "            filled += got\n",
        "            filled = count\n",
        (f"{_READERS}::test_short_reads_go_on",),
    ),
    Mutant(
        "pread moves a position that forked processes share",
        "megatron/data/file_io.py",
        "got = os.preadv(self._descriptor, [view[filled:]], offset + filled)",
        "got = os.lseek(self._descriptor, offset + filled, 0) * 0 + os.readv(self._descriptor, [view[filled:]])",
        (f"{_READERS}::test_forked_processes_read_what_their_parent_reads",),
        refuses=True,  # or other bytes, by which process comes first
    ),
    Mutant(
        "a document that began in an earlier block is hashed as if it began here",
        "megatron/data/split.py",
        "    scale[0] = pow(_BASE, begin - int(starts[low]), _MODULUS)",
        "    scale[0] = 1",
        (f"{_HASH}::test_hashes_equal_the_reference_in_blocks_of_any_place",),
    ),
    Mutant(
        "validation lies beside the test, so one's growth moves the other",
        "megatron/data/split.py",
        "((valid_below, test_from), (0, valid_below), (test_from, 1 << 32))",
        "((0, test_from - valid_below), (test_from - valid_below, test_from), (test_from, 1 << 32))",
        (f"{_HASH}::test_validation_and_test_that_grow_keep_what_they_had",),
    ),
)
