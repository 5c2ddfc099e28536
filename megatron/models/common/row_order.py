"""RowOrder: a Hugging Face weight whose rows are in another order than ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class RowOrder:
    """The order of the rows of a Hugging Face weight, which repeats every ``period`` rows.

    Subclasses define ``_sort_periods``.

    Attributes:
        period: number of rows after which the order repeats, such as the rows of a head.
    """

    period: int

    def to_ours(self, rows: torch.Tensor) -> torch.Tensor:
        """Return Hugging Face's rows [n, ...], of complete periods, in our order."""
        return rows[self._order(len(rows), rows.device)]

    def to_hf(self, rows: torch.Tensor) -> torch.Tensor:
        """Return our rows [n, ...], of complete periods, in Hugging Face's order."""
        return rows[self._order(len(rows), rows.device).argsort()]

    def enclosing(self, rows: slice) -> slice:
        """Return the smallest range of complete periods that contains ``rows``."""
        return slice(rows.start // self.period * self.period, -(-rows.stop // self.period) * self.period)

    def _order(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return the Hugging Face index of each of our rows: int64 [num_rows]."""
        import torch  # takes half a second; a dry run that reads only settings does not need it

        if device.type == "meta":
            device = torch.device("cpu")
        return self._sort_periods(torch.arange(num_rows, device=device).view(-1, self.period)).flatten()

    def _sort_periods(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the Hugging Face indices [n, period] of the rows of each period, in our order."""
        raise NotImplementedError
