"""A run's end-of-document token: from the flag, the checkpoint, the token files, or the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron import log, object_store
from megatron.config import Config
from megatron.data import dataset_metadata
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.control_tokens import BY_NAME
from megatron.tokenizer.identity import is_same

if TYPE_CHECKING:
    from megatron.mpu.groups import Group


def choose_eod(tokenizer: Tokenizer, config: Config, world: Group | None = None) -> None:
    """Set the tokenizer's end-of-document token to the first available of these. Collective.

    1. --eod-token NAME, or the token that a resumed run was started with;
    2. the token that ends documents in the run's token files;
    3. the tokenizer's own token (``Tokenizer.eod_name``).

    Args:
        world: the run's world group; None: this process only.

    Raises:
        DataError: a token file's documents end with another token (the message names both), or a token file's sidecar
            cannot be read; raised on all ranks.
    """
    default_name, eod_name = tokenizer.eod_name, config.data.eod_token
    file_tokens = _broadcast_file_tokens(tokenizer, config, world)
    is_set_by_flag = "eod_token" in config.explicit_fields
    if eod_name is not None and not is_set_by_flag and eod_name != BY_NAME and tokenizer.token_to_id(eod_name) is None:
        log.info(f"the tokenizer has no {eod_name}, this run's end-of-document token so far: another token is selected")
        eod_name = None
    if eod_name is None and file_tokens:
        eod_name = tokenizer.name_of(file_tokens[0][1])
    if eod_name is not None:
        tokenizer.use_eod(eod_name)
    if tokenizer.eod_name != default_name and not is_set_by_flag:
        reason = "as in the token files" if config.data.eod_token is None else "as at the start of the run"
        log.info(
            f"documents end with {_format_token(tokenizer, tokenizer.eod_id)}, {reason}; the tokenizer's default is "
            f"{default_name}"
        )
    for prefix, eod_id in file_tokens:
        if eod_id != tokenizer.eod_id:
            raise DataError(
                f"the documents of {prefix} end with {_format_token(tokenizer, eod_id)}, but the end-of-document token "
                f"of the run is {_format_token(tokenizer, tokenizer.eod_id)}. Set --eod-token "
                f"'{tokenizer.name_of(eod_id)}', or rebuild the token file"
            )


def _broadcast_file_tokens(tokenizer: Tokenizer, config: Config, world: Group | None) -> list[tuple[str, int]]:
    """Call ``_read_file_tokens`` on the first rank and return the result on every rank. Collective.

    The first rank always reads the data. Other ranks' hosts, for example in the middle of a pipeline, may not have the
    files.

    Raises:
        DataError: the first rank cannot read a sidecar; raised on all ranks.
    """
    file_tokens: list[tuple[str, int]] = []
    problem: str | None = None
    if world is None or world.rank == 0:
        try:
            file_tokens = list(_read_file_tokens(tokenizer, config))
        except DataError as error:
            problem = str(error)
    if world is not None:
        file_tokens, problem = world.broadcast_object((file_tokens, problem))
    if problem is not None:
        raise DataError(problem)
    return file_tokens


def _read_file_tokens(tokenizer: Tokenizer, config: Config) -> Iterator[tuple[str, int]]:
    """Yield (prefix, end-of-document token id) for token files that were written with this tokenizer."""
    if config.data.is_script_data or config.data.is_mock:
        return
    for prefix in config.data.flag_of_prefix:
        sidecar = _read_sidecar(prefix)
        if sidecar is None or not sidecar.has_eod or sidecar.eod_id is None:
            continue
        has_other_tokenizer = bool(sidecar.tokenizer) and not is_same(sidecar.tokenizer, tokenizer.identity)
        # A token file of another tokenizer is reported when the data is opened.
        if not has_other_tokenizer and tokenizer.name_of(sidecar.eod_id) is not None:
            yield prefix, sidecar.eod_id


def _read_sidecar(prefix: str) -> dataset_metadata.DatasetMetadata | None:
    """Read a token file's metadata file, or return None if there is none."""
    name = prefix + ".meta.json"
    if not object_store.is_remote(prefix):
        return dataset_metadata.read(Path(name))
    size = object_store.size_of(name)
    return None if size is None else dataset_metadata.parse(object_store.read_range(name, 0, size), name)


def _format_token(tokenizer: Tokenizer, token: int) -> str:
    return f"{tokenizer.name_of(token)} (id {token})"
