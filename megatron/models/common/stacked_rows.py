"""StackedRows: a tensor that some Hugging Face folders store inside a larger one, such as the weight of an expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Readable(Protocol):
    """A tensor in memory, or a tensor in a file. Indexing a tensor in a file reads only the requested part."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class StackedRows:
    """The rows ``start`` to ``stop`` of element ``index`` of the first dimension of a larger tensor [E, n, ...]."""

    index: int
    start: int
    stop: int

    def of(self, tensor: Readable) -> Readable:
        """Return these rows [stop - start, ...] of ``tensor``, without reading them if it is in a file."""
        import torch

        if isinstance(tensor, torch.Tensor):
            return tensor[self.index, self.start : self.stop]
        return _RowsInFile(tensor, self)


@dataclass(frozen=True)
class _RowsInFile:
    """Rows of a tensor in a file."""

    tensor: Readable
    rows: StackedRows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.stop - self.rows.start, *self.tensor.shape[2:]

    @property
    def dtype(self) -> Any:
        return self.tensor.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.shape[0])
        element = slice(self.rows.index, self.rows.index + 1)
        return self.tensor[(element, slice(self.rows.start + start, self.rows.start + stop), *columns)][0]
