"""`Fp8Padding`, `Fp8Unpadding`: rows of groups filled up with zeros to what a recipe's formats want, and back.

Both are a split and one concatenation, as their derivatives are. Splits given as a tensor on a GPU cost a copy to the
host, which has to know the result's size; a list costs none.
"""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.quantized import up
from te_torch.autocast import active, get_default_recipe
from te_torch.availability import get_align_size_for_quantization
from te_torch.base.options import check_values
from te_torch.runtime import nested, outside_autocast
from te_torch.values import NamedOptions, splits_of


class _Aligned(NamedOptions, torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        check_values(type(self).__name__, {"num_gemms": num_gemms, "align_size": align_size})
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _sizes(self, m_splits: Any) -> tuple[list[int], list[int]]:
        """(rows, rows when padded) of each group. The first call settles an alignment that nobody gave."""
        if self.align_size is None:
            region = active.region
            self.align_size = get_align_size_for_quantization(get_default_recipe() if region is None else region.recipe)
        sizes = splits_of(type(self).__name__, m_splits)
        assert len(sizes) == self.num_gemms, (
            f"{type(self).__name__}: m_splits has {len(sizes)} entries, and the module is for {self.num_gemms} groups"
        )
        if any(m < 0 for m in sizes):
            raise ArgumentError(type(self).__name__, f"m_splits={sizes}", "no negative sizes", "correct m_splits")
        return sizes, [up(m, self.align_size) for m in sizes]

    def _check(self, inp: torch.Tensor, rows: int, meaning: str) -> None:
        if isinstance(inp, torch.Tensor) and inp.is_nested:
            raise nested(type(self).__name__)
        if not isinstance(inp, torch.Tensor) or inp.ndim != 2 or inp.shape[0] != rows:
            raise ArgumentError(
                type(self).__name__,
                f"an input of shape {tuple(inp.shape)}" if isinstance(inp, torch.Tensor) else f"an input {inp!r}",
                f"[{rows}, K]: {meaning}",
                "correct m_splits, or reshape the input to a matrix",
            )

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Aligned):
    """Fills each group of rows up with zeros to a multiple of `align_size` (None: what the first call's recipe needs).

    Example:
        rows, sizes = te.Fp8Padding(2, align_size=16)(torch.randn(30, 64), [20, 10])  # 48 rows of groups [32, 16]
    """

    def forward(self, inp: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, Any]:
        """(padded [sum of padded sizes, K], padded sizes, a list or tensor as m_splits is)."""
        sizes, padded = self._sizes(m_splits)
        self._check(inp, sum(sizes), "the sum of m_splits")
        if sizes == padded:
            return inp, m_splits
        zeros = inp.new_zeros(max(p - m for m, p in zip(sizes, padded, strict=True)), inp.shape[1])
        pieces = []
        for piece, m, p in zip(inp.split(sizes), sizes, padded, strict=True):
            pieces += [piece, zeros[: p - m]]
        with outside_autocast(inp):
            rows = torch.cat(pieces)
        return rows, m_splits.new_tensor(padded) if isinstance(m_splits, torch.Tensor) else padded


class Fp8Unpadding(_Aligned):
    """Takes the zero rows out again: the inverse of `Fp8Padding`, given the sizes without padding."""

    def forward(self, inp: torch.Tensor, m_splits: Any) -> torch.Tensor:
        """[sum of m_splits, K] of inp [sum of padded sizes, K]."""
        sizes, padded = self._sizes(m_splits)
        self._check(inp, sum(padded), f"the sum of m_splits, each up to a multiple of {self.align_size}")
        if sizes == padded:
            return inp
        bounds = [n for m, p in zip(sizes, padded, strict=True) for n in (m, p - m)]
        with outside_autocast(inp):
            return torch.cat(inp.split(bounds)[::2])
