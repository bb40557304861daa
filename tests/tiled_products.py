"""Products on the CPU whose bits do not depend on how many rows and columns there are.

BLAS libraries pick a kernel by the size of a product, on some processors for the sizes that tests have. What splits a
product then gives other bits than the whole one, though nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from te_core.backends.cpu import gemm

_TILE = 64


def tiled(left: Any, right: Any, out: Any) -> Any:
    """left right, tile by tile, where tiles divide it."""
    (m, _), n = left.shape, right.shape[1]
    rows, columns = (_TILE if size % _TILE == 0 and size else size for size in (m, n))
    for i in range(0, m, rows or 1):
        for j in range(0, n, columns or 1):
            out[i : i + rows, j : j + columns] = left[i : i + rows] @ right[:, j : j + columns]
    return out


@contextmanager
def tiled_products() -> Iterator[None]:
    """Products are made of tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_product", lambda ex, spec, operands, out, turned: tiled(*operands, out))
        yield
