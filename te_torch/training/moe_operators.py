"""What `moe.py` calls: maps and moves of rows, differentiable, in eager code and as operators that compilers see.

Each is one function of this file. Eager code (`EAGER`) runs it inside an autograd function; traced code (`TRACED`)
calls the operator `te_runtime::moe_<name>`, whose derivative is the same rule, in operators. Its shapes are written
out, and not a run on the meta backend: rows that are counted as a program runs are a size without a number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from te_core import dtypes
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.quantized import up
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.runtime import FLOATS, check_dtype, runtime_for, shape_runtime, to_core, to_core_shape, to_torch
from te_torch.tensors import kinds
from te_torch.tensors.buffers import Buffers
from te_torch.values import integer

Maybe = torch.Tensor | None
Pair = tuple[torch.Tensor, torch.Tensor]


# --------------------------------------------------------------------------------------------- what is run


def _core(first: torch.Tensor, *others: Maybe) -> tuple[Runtime, list[Any]]:
    """The runtime, and views of dense tensors."""
    if first.is_meta:
        return shape_runtime(first.device), [None if t is None else to_core_shape(t) for t in (first, *others)]
    return runtime_for(first), [None if t is None else to_core(t.contiguous()) for t in (first, *others)]


def _torch(t: Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if t is None else to_torch(t)


def mask_map(routing: torch.Tensor) -> Pair:
    """(the map of a mask, int32 [tokens, 2 * experts + 1]; where its experts begin, int32 [experts + 1])."""
    rt, (given,) = _core(routing)
    starts = rt.empty((routing.shape[1] + 1,), dtypes.int32)
    return to_torch(ops.mask_row_map(rt, given, starts=starts)), to_torch(starts)


def index_map(experts: torch.Tensor, rows: int) -> torch.Tensor:
    """The map of expert ids, int32 [slots * tokens]."""
    rt, views = _core(experts)
    return to_torch(ops.index_row_map(rt, *views, rows=rows))


def chunk_map(sizes: torch.Tensor, order: torch.Tensor, rows: int) -> torch.Tensor:
    """Where each row goes when chunks are put in order, int32 [rows]."""
    rt, views = _core(sizes, order)
    return to_torch(ops.chunk_row_map(rt, *views, rows=rows))


def _permute(
    inp: torch.Tensor,
    row_map: torch.Tensor,
    probs: Maybe,
    pad_offsets: Maybe,
    starts: Maybe,
    rows: int,
    fill_rows: bool,
) -> Pair:
    rt, (x, to, p, pad, first) = _core(inp, row_map, probs, pad_offsets, starts)
    out, row_probs = ops.permute(rt, x, to, rows=rows, probs=p, pad_offsets=pad, starts=first, fill=fill_rows)
    return to_torch(out), _torch(row_probs, inp)


def _permute_backward(
    grad: torch.Tensor, row_map: torch.Tensor, probs: Maybe, grad_probs: Maybe, pad_offsets: Maybe, tokens: int
) -> Pair:
    rt, (dy, of, p, d_rows, pad) = _core(grad, row_map, probs, grad_probs, pad_offsets)
    dx, d_probs = ops.unpermute(rt, dy, of, tokens=tokens, gates=p, row_probs=d_rows, pad_offsets=pad)
    return to_torch(dx), _torch(d_probs, grad)


def permute_quantized(
    operation: str,
    tokens: Any,
    row_map: torch.Tensor,
    probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    starts: torch.Tensor | None,
    rows: int,
) -> tuple[Any, Any]:
    """`te_core.ops.permute` of a tensor in FP8: (the rows in its class, their probabilities or None).

    Rows are moved as they are: codes and scales, the rowwise copy.
    Rows that no token goes to, and those of probability 0, are codes of 0.
    """
    form = getattr(tokens, "_format", None)
    if form is None or form.scaling not in ("tensor", "block", "mxfp8") or form.tiled:
        raise ArgumentError(
            operation,
            f"Unsupported FP8 recipe: a {type(tokens).__name__}",
            "Float8Tensor, Float8BlockwiseQTensor with 1x128 pieces, MXFP8Tensor",
            "dequantize() the tokens first",
        )
    q, scale = core_of(tokens), tokens._buffers.row_scale
    if q.rowwise is None or scale is None:
        raise ArgumentError(
            operation, "tokens without a rowwise copy", "one along the rows", "quantize with rowwise=True"
        )
    rt, count = runtime_for(scale), q.shape[0]
    codes = q.rowwise.rows(0, count).view_as(dtypes.uint8)  # the rows that hold tokens, as bytes
    given = (row_map, probs, pad_offsets, starts)
    to, p, pad, first = (None if t is None else to_core(t.contiguous()) for t in given)
    assert to is not None
    stored = up(rows, form.pad)
    data, row_probs = ops.permute(rt, codes, to, rows=stored, probs=p, pad_offsets=pad, starts=first)

    def moved(scales: torch.Tensor, count: int) -> torch.Tensor:
        out, _ = ops.permute(rt, to_core(scales.contiguous()), to, rows=count, pad_offsets=pad, starts=first)
        return to_torch(out)

    if form.scaling == "block":  # a column a token
        scale = moved(scale[:, :count].t(), stored).t().contiguous()
    elif form.scaling == "mxfp8":
        scale = moved(scale[:count], up(rows, 128))
    quantizer = tokens._quantizer
    if quantizer is not None:
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=False)
    made = kinds.of_class(type(tokens)).tensor._of(
        (rows, tokens.shape[-1]), tokens.dtype, form, Buffers(to_torch(data), scale), quantizer, tokens._options
    )
    return made, None if row_probs is None else to_torch(row_probs)[:rows]


def _unpermute(
    inp: torch.Tensor, row_map: torch.Tensor, weights: Maybe, pad_offsets: Maybe, tokens: int
) -> torch.Tensor:
    rt, (x, of, w, pad) = _core(inp, row_map, weights, pad_offsets)
    out, _ = ops.unpermute(rt, x, of, tokens=tokens, weights=w, pad_offsets=pad)
    return to_torch(out)


def _unpermute_backward(
    grad: torch.Tensor, inp: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor, pad_offsets: Maybe
) -> Pair:
    rt, (dy, x, of, w, pad) = _core(grad, inp, row_map, weights, pad_offsets)
    dx, d_weights = ops.unpermute_backward(rt, dy, x, of, w, pad_offsets=pad)
    return to_torch(dx), to_torch(d_weights)


# What operators give, in shapes.


def _mask_map_shapes(routing: torch.Tensor) -> Pair:
    tokens, experts = routing.shape
    row_map = routing.new_empty((tokens, 2 * experts + 1), dtype=torch.int32)
    return row_map, routing.new_empty((experts + 1,), dtype=torch.int32)


def _permute_shapes(inp: torch.Tensor, row_map: torch.Tensor, probs: Maybe, *others: Any) -> Pair:
    rows = others[2]
    out = inp.new_empty((rows, inp.shape[1]))
    return out, inp.new_empty(0) if probs is None else probs.new_empty((rows,))


def _permute_backward_shapes(grad: torch.Tensor, row_map: torch.Tensor, probs: Maybe, *others: Any) -> Pair:
    grad_probs, _, tokens = others
    dx = grad.new_empty((tokens, grad.shape[1]))
    return dx, grad.new_empty(0) if probs is None or grad_probs is None else probs.new_empty(probs.shape)


#: By name: what runs, whose annotations are the operator's schema, and what gives its shapes.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mask_map": (mask_map, _mask_map_shapes),
    "index_map": (
        index_map,
        lambda experts, rows: experts.new_empty((experts.shape[0] * experts.shape[1],), dtype=torch.int32),
    ),
    "chunk_map": (chunk_map, lambda sizes, order, rows: sizes.new_empty((rows,), dtype=torch.int32)),
    "permute": (_permute, _permute_shapes),
    "permute_backward": (_permute_backward, _permute_backward_shapes),
    "unpermute": (_unpermute, lambda inp, *others: inp.new_empty((others[-1], inp.shape[1]))),
    "unpermute_backward": (
        _unpermute_backward,
        lambda grad, inp, row_map, weights, pad: (inp.new_empty(inp.shape), weights.new_empty(weights.shape)),
    ),
}


def _operator(name: str, *args: Any) -> Any:
    return getattr(torch.ops.te_runtime, f"moe_{name}")(*args)


def _direct(name: str, *args: Any) -> Any:
    return _OPERATORS[name][0](*args)


# --------------------------------------------------------------------------------------------- derivatives
# One rule each, for eager code and for operators: `run` is what runs a function of the table.


def _keep_permute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    inp, row_map, probs, pad_offsets, _, rows, _ = inputs
    ctx.save_for_backward(row_map, probs, pad_offsets)
    ctx.tokens, ctx.rows, ctx.like = inp.shape[0], rows, (inp.dtype, inp.device)
    ctx.set_materialize_grads(False)


def _permute_gradients(
    ctx: Any, run: Callable[..., Any], first: int, d_rows: Maybe, d_row_probs: Maybe
) -> tuple[Any, ...]:
    """Of the inputs from the `first` on."""
    row_map, probs, pad_offsets = ctx.saved_tensors
    wants = ctx.needs_input_grad[first:]
    dx = d_probs = None
    used = d_row_probs is not None and probs is not None and wants[2]
    if d_rows is not None and wants[0] or used:
        if d_rows is None or not wants[0]:  # the probabilities alone
            d_rows = torch.empty((ctx.rows, 0), dtype=ctx.like[0], device=ctx.like[1])
        elif isinstance(d_rows, QuantizedTorch):
            d_rows = d_rows.dequantize()
        found = run("permute_backward", d_rows, row_map, probs, d_row_probs if used else None, pad_offsets, ctx.tokens)
        dx = found[0] if wants[0] and d_rows.shape[1] else None
        d_probs = found[1] if used else None
    return dx, None, d_probs, None, None, None, None


def _keep_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    inp, row_map, weights, pad_offsets, _ = inputs
    ctx.save_for_backward(None if weights is None else inp, row_map, weights, pad_offsets)
    ctx.rows = inp.shape[0]
    ctx.set_materialize_grads(False)


def _unpermute_gradients(ctx: Any, run: Callable[..., Any], dy: Maybe) -> tuple[Any, ...]:
    inp, row_map, weights, pad_offsets = ctx.saved_tensors
    if dy is None:
        return None, None, None, None, None
    if weights is None:
        if isinstance(dy, QuantizedTorch):
            dx, _ = permute_quantized("moe_unpermute's backward", dy, row_map, None, pad_offsets, None, ctx.rows)
        else:
            dx, _ = run("permute", dy, row_map, None, pad_offsets, None, ctx.rows, True)
        return dx, None, None, None, None
    if isinstance(dy, QuantizedTorch):
        dy = dy.dequantize()
    dx, d_weights = run("unpermute_backward", dy, inp, row_map, weights, pad_offsets)
    wants = ctx.needs_input_grad
    return dx if wants[0] else None, None, d_weights if wants[2] else None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _permute(*inputs)
        _keep_permute(ctx, inputs, output)
        if inputs[2] is None:
            ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()
        return _permute_gradients(ctx, _direct, 0, *grads)


class _PermuteQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: str, *inputs: Any) -> Any:
        out, row_probs = permute_quantized(operation, *inputs)
        _keep_permute(ctx, (*inputs, True), None)
        return out, row_probs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()
        found = _permute_gradients(ctx, _direct, 1, *grads)
        return None, *found[:6]


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _unpermute(*inputs)
        _keep_unpermute(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()
        return _unpermute_gradients(ctx, _direct, *grads)


#: Function.apply looks for functorch's wrappers in every argument, which takes 3 us; there are none outside of them.
_base: Any = torch.autograd.Function
_quick_apply: dict[Any, Any] = {cls: super(_base, cls).apply for cls in (_Permute, _PermuteQuantized, _Unpermute)}
_functorch_active = torch._C._are_functorch_transforms_active


def _apply(cls: Any, run: Callable[..., Any], first: int, *args: Any) -> Any:
    """`run`, differentiable in rows and probabilities where these need it; the rows are argument `first`."""
    rows, probs = args[first], args[first + 2]
    if not (torch.is_grad_enabled() and (rows.requires_grad or (probs is not None and probs.requires_grad))):
        return run(*args)
    return cls.apply(*args) if _functorch_active() else _quick_apply[cls](*args)


def _refuse_in_capture(op: str, t: torch.Tensor, what: str) -> None:
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        got = f"{what} in the capture of a CUDA graph, which cannot wait for a number"
        raise UnsupportedError(op, got, "a number of Python's", "pass num_out_tokens, the number of rows of the result")


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():  # only create_graph=True runs a backward in grad mode
        raise UnsupportedError(
            "moe_permute's backward", "create_graph=True", "first derivatives", "use index_select and index_add_"
        )


_library = torch.library.Library("te_runtime", "FRAGMENT")


for _name, (_run, _shapes) in _OPERATORS.items():
    _library.define(f"moe_{_name}{torch.library.infer_schema(_run, mutates_args=())}")
    _library.impl(f"moe_{_name}", _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"te_runtime::moe_{_name}", _shapes, lib=_library)

torch.library.register_autograd(
    "te_runtime::moe_permute",
    lambda ctx, *grads: _permute_gradients(ctx, _operator, 0, *grads),
    setup_context=_keep_permute,
    lib=_library,
)
torch.library.register_autograd(
    "te_runtime::moe_unpermute",
    lambda ctx, dy: _unpermute_gradients(ctx, _operator, dy),
    setup_context=_keep_unpermute,
    lib=_library,
)


# ----------------------------------------------------------------------------------------- what the doors choose from


class Moves:
    """What the functions of `moe.py` are made of, in eager code."""

    mask_map, index_map, chunk_map = staticmethod(mask_map), staticmethod(index_map), staticmethod(chunk_map)
    permute_plain = staticmethod(partial(_apply, _Permute, _permute, 0))
    permute_quantized = staticmethod(partial(_apply, _PermuteQuantized, permute_quantized, 1))  # in the class of tokens
    unpermute = staticmethod(partial(_apply, _Unpermute, _unpermute, 0))

    def permute(
        self,
        op: str,
        inp: torch.Tensor,
        row_map: torch.Tensor,
        starts: Maybe = None,
        probs: Maybe = None,
        pad_offsets: Maybe = None,
        *,
        rows: int,
        fill: bool = True,
    ) -> tuple[torch.Tensor, Any]:
        """(rows, their probabilities; nothing without `probs`) of plain or quantized tokens; differentiable in both."""
        given = None if probs is None else in_core(probs)
        if isinstance(inp, QuantizedTorch):
            out, row_probs = self.permute_quantized(op, inp, row_map, given, pad_offsets, starts, rows)
        else:
            check_dtype(op, inp)
            out, row_probs = self.permute_plain(inp, row_map, given, pad_offsets, starts, rows, fill)
        return out, row_probs if given is probs else row_probs.to(probs.dtype)  # type: ignore[union-attr]

    def is_empty(self, inp: torch.Tensor) -> bool:
        """Whether there is nothing to move."""
        return not inp.numel()

    def number(self, op: str, name: str, value: Any) -> int:
        """An argument that is an integer of any kind. A tensor on a GPU makes the host wait, once."""
        if isinstance(value, torch.Tensor):
            _refuse_in_capture(op, value, f"{name} in a tensor")
        return integer(op, name, value)

    def exceeds(self, rows: int, entries: int) -> bool:
        """Whether rows may be left that no entry of a map goes to."""
        return rows > entries

    def count(self, op: str, routing: torch.Tensor) -> int:
        """The rows that a mask sends. To count them is to wait for the device."""
        _refuse_in_capture(op, routing, "num_out_tokens=-1")
        return int(torch.count_nonzero(routing).item())

    def sums(self, op: str, sums: torch.Tensor, counts: torch.Tensor, routing_map: torch.Tensor) -> list[int]:
        """These numbers, for which the host waits. The same wait shows whether the counts are the mask's.

        The rows of an expert that has more would lie in those of the next, or nowhere.
        """
        if counts.device != routing_map.device or routing_map.ndim != 2:
            return sums.tolist()
        sent = (routing_map != 0).sum(0)
        *found, wrong = torch.cat((sums, (sent != counts).sum().view(1))).tolist()
        if wrong:
            got = f"tokens_per_expert={counts.tolist()} for a mask that sends {sent.tolist()}"
            raise ArgumentError(op, got, "how many tokens the mask sends to each expert", "pass routing_map.sum(dim=0)")
        return found


class _Traced(Moves):
    """The same in traced code. It checks no number, which a program has only as it runs."""

    mask_map, index_map, chunk_map, permute_plain, unpermute = (
        staticmethod(getattr(torch.ops.te_runtime, f"moe_{name}"))
        for name in ("mask_map", "index_map", "chunk_map", "permute", "unpermute")
    )

    def permute_quantized(self, op: str, inp: torch.Tensor, *others: Any) -> Any:
        allowed = "float32, bfloat16 or float16 under torch.compile"
        raise UnsupportedError(op, f"a {type(inp).__name__}", allowed, "permute outside of the compiled function")

    def is_empty(self, inp: torch.Tensor) -> bool:
        """Rows that a program only counts as it runs do not tell: operators take none."""
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(inp.numel() == 0)

    def number(self, op: str, name: str, value: Any) -> int:
        if isinstance(value, (np.ndarray, np.generic)):  # to a compiler, NumPy's numbers are arrays
            value = torch.as_tensor(value)
        if not isinstance(value, torch.Tensor):
            return integer(op, name, value)
        number = int(value.item())
        torch._check(number > 0)
        return number

    def exceeds(self, rows: int, entries: int) -> bool:
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(rows > entries)

    def count(self, op: str, routing: torch.Tensor) -> int:
        rows = int(torch.count_nonzero(routing).item())
        torch._check(rows >= 0)
        return rows

    def sums(self, op: str, sums: torch.Tensor, counts: torch.Tensor, routing_map: torch.Tensor) -> list[int]:
        return sums.tolist()


EAGER, TRACED = Moves(), _Traced()


def in_core(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities in a type that kernels read."""
    return probs if probs.dtype in FLOATS else probs.float()
