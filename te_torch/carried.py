"""Quantized tensors between two operators of a compiled program: in memory of a plain tensor of their shape and dtype.

To a compiler, and to autograd, it is that plain tensor; its first bytes are the quantized data, then the scale. Only
layers that were told read it (`Carried`), and a gradient may come back to it in the same way. Tensors with one scale
only: FP8 rows are a multiple of 16 wide, and every activation dtype has room for twice the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import UnsupportedError
from te_core.ops import raw as ops
from te_core.quantized import Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.export.handed import Handed, StandIn
from te_torch.runtime import TO_CORE, constant_at_trace, runtime_for, to_torch
from te_torch.tensors.buffers import Buffers, core_of, of_core

_SCALE = 4  # bytes
HANDING = "|"  # what `handing` gives begins with it


class Carried(StandIn):
    """In traced code, in the place of a quantized tensor.

    `form` is the name of its element type, `grad` that of its gradient; "": its gradient is plain. `giver`: the state
    whose scale it has (None: no state), and the columns of that scale and of its gradient's there.
    """

    def __init__(self, t: torch.Tensor, form: str, grad: str, giver: tuple[Any, int, int]) -> None:
        super().__init__(t)
        self.form, self.grad, self.giver = form, grad, giver

    def text(self) -> str:
        """What an operator is told of it."""
        return f"{self.form}:{self.grad}:{self.giver[2]}"

    @property
    def dtype(self) -> torch.dtype:
        """What they are to other calls."""
        return self.t.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient comes back."""
        return self.t.requires_grad

    def view(self, *shape: int) -> Carried:
        """The same values in another shape."""
        return Carried(self.t.view(*shape), self.form, self.grad, self.giver)

    def values(self) -> torch.Tensor:
        """In its dtype; their gradient is plain, as `grad` has to say."""
        assert not self.grad
        found: torch.Tensor = _Values.apply(self.t, self.form)
        return found

    def reshape(self, *shape: int) -> Carried:
        """The same values in another shape."""
        return Carried(self.t.reshape(*shape), self.form, self.grad, self.giver)


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, form: str) -> Any:
        return torch.ops.te_runtime.values_of_carried(t, form)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, None


def form_name(form: Format) -> str:
    """The name of a format of one scale."""
    return form.dtype.name


def handing(form: str, grad: str) -> str:
    """What is said, behind its name, to a call whose first output is to be carried."""
    return f"{HANDING}{form}{HANDING}{grad}"


def apart(key: str) -> tuple[str, str, str]:
    """(a call's name, the form of its first output, that of its gradient); "": plain."""
    name, _, rest = key.partition(HANDING)
    form, _, grad = rest.partition(HANDING)
    return name, form, grad


def carry(t: Any, text: str, giver: Any) -> Any:
    """The first output of a call that was told this by `handing`; in an export it is a tensor's stand-in already."""
    if isinstance(t, Handed):
        return t
    _, form, grad = _apart_at_trace(text)
    return Carried(t, form, grad, giver)


_apart_at_trace = constant_at_trace(apart)


@constant_at_trace
def inputs_carried(forms: tuple[str, ...]) -> str:
    """What an operator is told of its inputs: "place:form:gradient's form:its column" of each that is carried."""
    return " ".join(f"{i}:{text}" for i, text in enumerate(forms) if text)


@constant_at_trace
def saved_carried(carried: str, origins: tuple[int | None, ...]) -> str:
    """The same of what is saved, by the inputs that it comes from."""
    forms = parsed(carried)
    given = ((i, forms.get(o)) for i, o in enumerate(origins) if o is not None and o >= 0)
    return " ".join(f"{i}:{found[0]}:{found[1]}:" for i, found in given if found is not None)


def parsed(text: str) -> dict[int, tuple[str, str]]:
    """{place: (form, its gradient's form)}."""
    found = [part.split(":") for part in text.split(" ") if part]
    return {int(place): (form, grad) for place, form, grad, _ in found}


@constant_at_trace
def column_of_gradient(text: str) -> int:
    """Of the one carried input whose gradient is: where the scale of that is in the state of who gave the input."""
    found = [part.split(":") for part in text.split(" ")]
    return next(int(column) for _, _, grad, column in found if grad)


# ------------------------------------------------------------------------------------------- inside of an operator


def opened(t: torch.Tensor, name: str, shapes_only: bool) -> QuantizedTensor:
    """The quantized matrix that lies in a tensor."""
    t = t.contiguous()
    width = t.shape[-1]
    rows = prod(t.shape[:-1])
    flat = t.view(-1).view(torch.uint8)
    data, end = flat[: rows * width].view(rows, width), rows * width
    scale = flat[end : end + _SCALE].view(torch.float32)
    made = core_of(Format(dtypes.dtype(name)), (rows, width), Buffers(data, scale), shapes_only)
    made.owner = t
    return made


def closed(q: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype, name: str, fake: bool) -> torch.Tensor:
    """A tensor of this shape and dtype in which a quantized matrix lies; `name` is the form that was agreed on."""
    if q.format is not Format(dtypes.dtype(name)) or shape[-1] % 16:
        raise UnsupportedError(
            "torch.compile",
            f"a quantized tensor {tuple(shape)} of {q.format.dtype.name} with scaling {q.format.scaling!r}",
            "FP8 with one scale a tensor, in rows a multiple of 16 wide, from one compiled layer to the next",
            "leave fp8_output, or fp8_mha, out where the module is compiled",
        )
    buffers = of_core(q)
    assert buffers.row_data is not None and buffers.row_scale is not None
    made = torch.empty(tuple(shape), dtype=dtype, device=buffers.row_data.device)
    if not fake:
        flat, end = made.view(-1).view(torch.uint8), prod(shape)
        flat[:end].copy_(buffers.row_data.reshape(-1)[:end])
        flat[end : end + _SCALE].copy_(buffers.row_scale.reshape(-1).view(torch.uint8)[:_SCALE])
    return made


def plain_or_closed(
    rt: Runtime, t: Tensor | QuantizedTensor, name: str, shape: Sequence[int], dtype: torch.dtype, fake: bool
) -> torch.Tensor:
    """What an operator returns of a gradient: carried if that was agreed on, else its values."""
    if isinstance(t, QuantizedTensor):
        if name:
            return closed(t, shape, dtype, name, fake)
        t = ops.dequantize(rt, t, TO_CORE[dtype]).reshape(*shape)
    if name:
        raise UnsupportedError(
            "torch.compile", "a plain gradient", f"one of {name}, as was agreed on", "report this as a bug, please"
        )
    return to_torch(t)


def _values_op(t: torch.Tensor, form: str) -> torch.Tensor:
    made = ops.dequantize(runtime_for(t), opened(t, form, False), TO_CORE[t.dtype])
    return to_torch(made).view(t.shape)


_library = torch.library.Library("te_runtime", "FRAGMENT")
_library.define("values_of_carried(Tensor t, str form) -> Tensor")
_library.impl("values_of_carried", _values_op, "CompositeExplicitAutograd")
torch.library.register_fake(
    "te_runtime::values_of_carried", lambda t, form: torch.empty(t.shape, dtype=t.dtype, device=t.device), lib=_library
)
