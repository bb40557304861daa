"""`GroupedLinear` as tracing compilers see it: two operators that are told the rows of each group as they run.

Nothing in a program depends on these rows. So what backward reads is not what forward quantized, whose shapes do: it
keeps the inputs, and the scales that were read, and quantizes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from te_core.errors import ArgumentError
from te_core.layers import grouped_linear as core
from te_core.layers.product import gradient_dtype
from te_core.ops.gemm_grouped import group_offsets, takes_offsets
from te_core.quantize.state import Scales
from te_torch import state as scaling
from te_torch import updates
from te_torch.calls import Call, call_of
from te_torch.compiled_runs import Traced, note_run, scale_to_read
from te_torch.export.mode import exporting, not_exported
from te_torch.operators import core_views, each_once, flattened, merge, new_maxima, world
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_TORCH, constant_at_trace, runtime_for, to_core, to_torch
from te_torch.tensors.dispatch import keeps
from te_torch.values import splits_of
from te_torch.weight_copies import Copies, for_backward, made_of, own_and_given, ready_for

_library = torch.library.Library("te_runtime", "FRAGMENT")
_SIZES = "SymInt[] sizes, Tensor? counts"
_library.define(
    f"grouped_forward(Tensor?[] inputs, {_SIZES}, Tensor? scale, Tensor? scale_bwd, str key, str rule, "
    'str held="", str copies="") -> Tensor[]'
)
_library.define(
    f"grouped_backward(Tensor dy, Tensor?[] inputs, {_SIZES}, Tensor? scale, Tensor? scale_bwd, str key, "
    'str held="", str copies="") -> Tensor[]'
)


def rows_of(inp: torch.Tensor) -> int:
    """The rows of the matrix that an input is."""
    return inp.numel() // inp.shape[-1] if inp.shape[-1] else inp.shape[0]


#: Told of every forward that copies its splits from a GPU.
on_host_copy: list[Callable[[], None]] = []


def checked_sizes(count: int, rows: int, m_splits: Sequence[int] | torch.Tensor) -> core.Sizes:
    """The rows of each group, on the host."""
    if isinstance(m_splits, torch.Tensor):
        if exporting.on:
            raise not_exported("m_splits in a tensor", "a list of numbers, which are part of the file", "pass a list")
        if m_splits.device.type not in ("cpu", "meta"):
            if torch.cuda.is_current_stream_capturing():
                raise ArgumentError(
                    "GroupedLinear.forward",
                    "sizes on the GPU in a CUDA graph, for products that read them on the host",
                    "bfloat16 and float16, plain or with delayed, current or block scaling, on Hopper",
                    "choose one of these, or pass a list of numbers, which the graph keeps",
                )
            for tell in on_host_copy:
                tell()
    sizes = splits_of("GroupedLinear.forward", m_splits)
    if len(sizes) != count or min(sizes, default=0) < 0 or sum(sizes) != rows:
        raise ArgumentError(
            "GroupedLinear.forward",
            f"m_splits={sizes} with an input of {rows} rows",
            f"{count} sizes, none negative, that add up to the rows",
            "correct m_splits",
        )
    return core.Sizes(sizes)


def groups_of(
    call: Call, x: torch.Tensor, weight: Any, m_splits: core.Sizes | Sequence[int] | torch.Tensor
) -> core.Groups:
    """The groups of a call: on the device where its products read them there, else known to the host.

    `weight`: one of them all, or all in one tensor. Numbers of the host are part of a captured graph, as they are of a
    program.
    """
    count, rows, counts = len(call.spec.parts), rows_of(x), None
    if isinstance(m_splits, torch.Tensor) and m_splits.is_cuda:
        counts = m_splits
    spec = call.spec
    able = not x.is_meta and spec.by_offsets and not (spec.plain and isinstance(weight, QuantizedTorch))
    if able and (counts is not None or not (x.is_cuda and torch.cuda.is_current_stream_capturing())):
        rt, (n, k) = runtime_for(x), weight.shape[-2:]
        if takes_offsets(rt, spec.dtype, n, k, count, spec.formats):
            offsets = torch.empty(count + 1, dtype=torch.int32, device=x.device)
            if counts is not None:
                _check_counts(count, counts)
                group_offsets(rt, to_core(counts.contiguous()), rows, to_core(offsets))
            else:
                known = m_splits if isinstance(m_splits, core.Sizes) else checked_sizes(count, rows, m_splits)
                ends = torch.tensor([0, *[stop for _, stop in known.bounds]], dtype=torch.int32)
                offsets.copy_(ends, non_blocking=True)  # which is staged: nobody waits
            return core.Groups(None, offsets=to_core(offsets))
    return core.Groups(m_splits if isinstance(m_splits, core.Sizes) else checked_sizes(count, rows, m_splits))


def _check_counts(count: int, m_splits: torch.Tensor) -> None:
    """Refuse sizes on a GPU that are not an integer for each group."""
    if m_splits.dtype not in (torch.int32, torch.int64) or m_splits.shape != (count,):
        raise ArgumentError(
            "GroupedLinear.forward",
            f"m_splits of {m_splits.dtype}, of shape {tuple(m_splits.shape)}",
            f"a list of {count} integers, or an int32 or int64 tensor of shape ({count},)",
            "pass the rows of each group",
        )


def _forward_op(
    inputs: list[torch.Tensor | None],
    sizes: list[int],
    counts: torch.Tensor | None,
    scale: torch.Tensor | None,
    scale_bwd: torch.Tensor | None,
    key: str,
    rule: str,
    held: str = "",
    copies: str = "",
    fake: bool = False,
) -> list[torch.Tensor]:
    """y, copies of weights that are kept; with a scale also the one that was read, which the next update changes, and
    the maxima."""
    call, x = call_of(key), inputs[0]
    assert x is not None
    rt, convert = world(x, fake)
    views = core_views(inputs, held, convert)
    if not fake:
        note_run(call, views, scale_bwd, rule)
    maxima = new_maxima(rt, scale)
    scales = None if scale is None or maxima is None else Scales(convert(scale), maxima, maxima, None)
    given = sizes if counts is None else counts
    options = call.options if fake else {"splits": groups_of(call, x, inputs[1], given), **call.options}
    kept: list[torch.Tensor] = []
    if copies:
        views, ready, kept = ready_for(rt, call, copies, views, scales, check=not fake)
        options = {**options, "ready": ready}
    if fake:  # the rows of the groups are not known, but those of the output are the input's
        y = x.new_empty((*x.shape[:-1], views[1].shape[0]), dtype=TO_TORCH[call.spec.dtype])
    else:
        (made,), _ = call.layer.forward(rt, *views, spec=call.spec, scales=scales, **options)
        y = to_torch(made)
    return [y, *kept] if scale is None or maxima is None else [y, *kept, scale.clone(), to_torch(maxima)]


def _backward_op(
    dy: torch.Tensor,
    inputs: list[torch.Tensor | None],
    sizes: list[int],
    counts: torch.Tensor | None,
    scale: torch.Tensor | None,
    scale_bwd: torch.Tensor | None,
    key: str,
    held: str = "",
    copies: str = "",
    fake: bool = False,
) -> list[torch.Tensor]:
    """The gradients of `given`, then the maxima."""
    call, x = call_of(key), inputs[0]
    assert x is not None
    rt, convert = world(x, fake)
    views = core_views(inputs, held, convert)
    if fake:  # as `_groups` would say of no values
        parts = list(zip(call.spec.parts, views[1:], strict=False))
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format)] if parts[0][0].needs.input else []
        for part, w in parts:
            if part.needs.weight:
                grads.append(x.new_empty(w.shape, dtype=TO_TORCH[gradient_dtype(part, w)]))
        for part, w in parts:
            if part.needs.bias:
                grads.append(x.new_empty((w.shape[0],), dtype=TO_TORCH[gradient_dtype(part, w)]))
        return grads if scale_bwd is None else [*grads, torch.empty_like(scale_bwd)]
    splits = groups_of(call, x, inputs[1], sizes if counts is None else counts)
    unused, maxima = new_maxima(rt, scale), new_maxima(rt, scale_bwd)
    scales = None
    if scale is not None and scale_bwd is not None:
        scales = Scales(convert(scale), unused, convert(scale_bwd), maxima)
        if (state := scaling.of_tensor(scale_bwd)) is not None:
            updates.ran_backward(state)
    spec, options = call.spec, {"scales": scales, "splits": splits, **call.options}
    ready = None
    if copies:
        views, ready, _ = ready_for(rt, call, copies, views, scales, check=False)
    saved = core.kept(rt, *views, spec=spec, ready=ready, **options)
    found = call.layer.backward(rt, convert(dy.contiguous()), saved, spec=spec, **options)
    grads = [to_torch(t) for t in found if t is not None]
    return grads if maxima is None else [*grads, to_torch(maxima)]


for _name, _run in (("forward", _forward_op), ("backward", _backward_op)):
    _library.impl(f"grouped_{_name}", _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"te_runtime::grouped_{_name}", partial(_run, fake=True), lib=_library)


@keeps(torch.ops.te_runtime.grouped_forward.default)
def _forward_of_held(func: Any, inputs: Sequence[Any], sizes: Any, counts: Any, scale: Any, *others: Any) -> Any:
    flat, held = flattened(inputs, call_of(others[1]).layer.weights)
    return func(flat, sizes, counts, scale, *others[:3], held, *others[4:])


@keeps(torch.ops.te_runtime.grouped_backward.default)
def _backward_of_held(func: Any, dy: Any, inputs: Sequence[Any], sizes: Any, counts: Any, *others: Any) -> Any:
    flat, held = flattened(inputs, call_of(others[2]).layer.weights)
    return func(dy, flat, sizes, counts, *others[:3], held, *others[4:])


@constant_at_trace
def _given(key: str) -> tuple[bool, ...]:
    """Which inputs backward gives a gradient."""
    parts = call_of(key).spec.parts
    return (parts[0].needs.input, *[p.needs.weight for p in parts], *[p.needs.bias for p in parts])


def apply_traced(
    key: str,
    given: Traced | None,
    recompute: bool,
    splits: Sequence[int] | torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    copies: Copies | None = None,
) -> torch.Tensor:
    """The output, as traced code computes it."""
    if isinstance(splits, np.ndarray):
        splits = torch.from_numpy(splits)
    sizes, counts = ([], splits) if isinstance(splits, torch.Tensor) else (list(splits), None)
    text, more = ("", []) if copies is None else (copies.text, copies.tensors)
    inputs = each_once(inputs)
    if given is None:
        out, *made = _Traced.apply(key, "", sizes, counts, text, None, None, None, *inputs, *more)
    else:
        state, (scale, rule) = given.state, scale_to_read(given, recompute)
        history = state.amax_history_bwd
        out, *made, maxima = _Traced.apply(
            key, rule, sizes, counts, text, scale, state.scale_bwd, history, *inputs, *more
        )
        if not recompute:
            merge(state.amax_history_fwd, maxima)
    if copies is not None and made:
        copies.keep(made)
    return out


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: str,
        rule: str,
        sizes: list[int],
        counts: Any,
        copies: str,
        scale: Any,
        scale_bwd: Any,
        history_bwd: Any,
        *inputs: Any,
    ) -> Any:
        dense = [t if t is None or isinstance(t, QuantizedTorch) else t.contiguous() for t in inputs]
        own = scale_bwd if rule else None
        results = torch.ops.te_runtime.grouped_forward(dense, sizes, counts, scale, own, key, rule, "", copies)
        made = results[1 : 1 + made_of(copies)]
        used = None if scale is None else results[-2]
        read = list(inputs)
        ctx.copies = ""
        if copies:
            read, given = own_and_given(copies, inputs)
            ctx.copies, read = for_backward(copies), read + (made or given)
        ctx.save_for_backward(*read, counts, used, scale_bwd, history_bwd)
        ctx.key, ctx.sizes, ctx.inputs = key, sizes, len(inputs)
        if scale is None:
            ctx.mark_non_differentiable(*made)
            return (results[0], *made)
        ctx.mark_non_differentiable(*made, results[-1])
        return (results[0], *made, results[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *inputs, counts, used, scale_bwd, history_bwd = ctx.saved_tensors
        results = torch.ops.te_runtime.grouped_backward(
            grads[0], inputs, ctx.sizes, counts, used, scale_bwd, ctx.key, "", ctx.copies
        )
        if scale_bwd is not None:
            merge(history_bwd, results[-1])
        fresh = iter(results)
        found = [next(fresh) if g else None for g in _given(ctx.key)]
        return (None,) * 8 + (*found, *[None] * (ctx.inputs - len(found)))
