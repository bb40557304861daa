"""What a line of a declaration asks for, and what it says where that is not so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.ops.declare import Operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor, cuda_device

CPU = Runtime.cpu()
KINDS = ("one", "other")
LIMIT = 8


def probe(
    rt: Runtime,
    x: Tensor,
    y: Tensor | None = None,
    *,
    kind: str = "one",
    rows: Tensor | None = None,
    free: Tensor | None = None,
    like: Tensor | None = None,
    out: Tensor | None = None,
) -> str:
    """Says that it ran."""
    return "ran"


TEXT = """
    kind in KINDS: Which it is.
    x [M, N] act: Input.
    y? [2 * N + 1, M] x: Beside it,
        with two lines.
    rows? [M, N] f32|i32 rows
    free? [...] strided
    like? =x
    out? [M] f32 written: Where the result is written.
    must M <= LIMIT: up to {LIMIT} rows; split them
"""
OPERATION = Operation(probe, (TEXT,), ("probe",), True)
CHECKED = OPERATION.checked()


def tensor(
    *shape: int, dtype: Any = np.float32, turned: bool = False, device: Any = None, lent: bool = False
) -> Tensor:
    array = np.zeros(shape, dtype)
    array.flags.writeable = not lent
    t = CPU.tensor(array) if not lent else Tensor(1, shape, dtypes.float32, CPU.device, array)
    strides = tuple(np.cumprod((1, *shape[:-1])).tolist()) if turned else None
    return Tensor(t.ptr, t.shape, t.dtype, device or t.device, t.owner, strides)


def call(**given: Any) -> str:
    said: str = CHECKED(CPU, given.pop("x", tensor(3, 4)), **given)
    return said


def test_what_is_declared_may_come() -> None:
    x = tensor(3, 4, dtype=np.float16)
    lines = Tensor(x.ptr, (3, 4), dtypes.int32, CPU.device, x.owner, (7, 1))
    given = {"rows": lines, "free": tensor(2, 3, 4, turned=True), "like": x, "out": tensor(3)}
    assert call(x=x, y=tensor(9, 3, dtype=np.float16), kind="other", **given) == "ran"
    assert CHECKED(CPU, x, None) == "ran"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "third"}, "got kind='third'. Allowed: one or other"),
        ({"x": tensor(3, 4, 5)}, r"Allowed: a dense tensor of shape \[M, N\] of dtype float32.*\(input\).*flatten the"),
        ({"x": tensor(3, 4, turned=True)}, "To do: make x contiguous"),
        ({"x": tensor(3, 4, dtype=np.int32)}, "got x = .*float32, bfloat16 or float16 .*To do: correct x"),
        ({"x": tensor(3, 4, device=cuda_device(0))}, "the runtime's"),
        ({"x": tensor(9, 4)}, r"got M=9. Allowed: up to 8 rows. To do: split them"),
        ({"x": np.zeros((3, 4))}, r"got x of type numpy.ndarray.*from_dlpack"),
        ({"y": tensor(9, 4)}, r"y = .*shape \[2 \* N \+ 1, M\] = \[9, 3\].*\(beside it, with two lines"),
        ({"y": tensor(9, 3, dtype=np.float16)}, "y = .*of dtype float32"),
        ({"rows": tensor(3, 4, turned=True)}, "side by side.*To do: make rows contiguous"),
        ({"rows": tensor(3, 4, dtype=np.float16)}, "of dtype float32 or int32, the elements"),
        ({"free": tensor(2, device=cuda_device(1))}, "the runtime's"),
        ({"like": tensor(4, 3)}, r"shape \[3, 4\] of dtype float32"),
        ({"like": tensor(3, 4, dtype=np.float16)}, r"shape \[3, 4\] of dtype float32"),
        ({"out": tensor(3, lent=True)}, "may be written to"),
        ({"out": tensor(4)}, "To do: correct out, or leave it out"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=f"(?s)^probe: .*{said}"):
        call(**given)


def test_what_is_said_of_arguments() -> None:
    said = OPERATION.described()
    assert said["x"] == "Input. A dense tensor of shape [M, N] of dtype float32, bfloat16 or float16."
    assert said["y"].endswith("with two lines. A dense tensor of shape [2 * N + 1, M] of x's dtype.")
    assert said["kind"] == "Which it is. One of one, other."
    assert said["out"] == "Where the result is written. A dense tensor of shape [M] of dtype float32."


@pytest.mark.parametrize("line", ["z [M] f32", "x [M f32", "x? (M) f32"])
def test_lines_without_meaning(line: str) -> None:
    with pytest.raises(ValueError, match=r"no argument z|without meaning"):
        Operation(probe, (line,), (), True)
