"""A user's functions of the scores: as operations of a cuDNN graph (`score_mod`), or of torch (`torch_score_mod`).

    score_mod(graph, score, tensors) -> score                 FusedAttention on a GPU; score_mod_bprop is its gradient's
    torch_score_mod(score, b, h, q_idx, kv_idx) -> score      UnfusedDotProductAttention; autograd differentiates it

Both are given scores that are scaled already, in float32, and what they give goes into the softmax as it is. A cuDNN
graph is kept where `callback_key` can tell functions apart.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from te_core.attention import ScoreMod
from te_core.layers.attention import AttentionInputs
from te_core.ops import raw as ops
from te_core.ops.attention_scored import Kept
from te_torch.attention.choose import UNFUSED, NoBackendError
from te_torch.attention.fused import Results, aligned
from te_torch.attention.plan import OPERATION, Plan, wrong
from te_torch.runtime import runtime_for, to_core, to_torch

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)


class Functions(NamedTuple):
    """What a call was given to modify its scores with: the graph's functions and tensors, or one of torch."""

    graph: ScoreMod | None = None
    tensors: Mapping[str, torch.Tensor] = {}
    backward_tensors: Mapping[str, torch.Tensor] = {}
    pointwise: Callable[..., torch.Tensor] | None = None  # of torch
    q_idx: torch.Tensor | None = None  # [b, sq]: where queries stood that were moved; None: where they are
    kv_idx: torch.Tensor | None = None


def functions(
    score_mod: Any, score_mod_bprop: Any, score_mod_tensors: Any, score_mod_bprop_tensors: Any, torch_score_mod: Any
) -> Functions | None:
    """The functions of a call, if there are any and they are what they have to be."""
    given = {
        "score_mod_bprop": score_mod_bprop,
        "score_mod_tensors": score_mod_tensors,
        "score_mod_bprop_tensors": score_mod_bprop_tensors,
    }
    if score_mod is None:
        for name, value in given.items():
            if value is not None:
                raise wrong(f"{name} without score_mod", "both", "pass score_mod, or leave it out")
    for name, value in (
        ("score_mod", score_mod),
        ("torch_score_mod", torch_score_mod),
        ("score_mod_bprop", score_mod_bprop),
    ):
        if value is not None and not callable(value):
            raise wrong(f"{name}={value!r}", "a function", f"pass a function as {name}")
    if torch_score_mod is not None:
        if score_mod is not None:
            raise wrong("score_mod and torch_score_mod", "one of the two", "leave one out")
        return Functions(pointwise=torch_score_mod)
    if score_mod is None:
        return None
    if score_mod_bprop is None and score_mod_bprop_tensors is not None:
        raise wrong(
            "score_mod_bprop_tensors without score_mod_bprop", "both", "pass score_mod_bprop, or leave them out"
        )
    if torch.onnx.is_in_onnx_export():
        raise wrong("score_mod in an ONNX export", "a model without", "use torch_score_mod, or export without it")
    tensors = _tensors("score_mod_tensors", score_mod_tensors)
    keys = callback_key(score_mod), None if score_mod_bprop is None else callback_key(score_mod_bprop)
    told = keys[0] is not None and (score_mod_bprop is None or keys[1] is not None)
    mod = ScoreMod(score_mod, score_mod_bprop, ("score_mod", *keys) if told else None)
    return Functions(mod, tensors, _tensors("score_mod_bprop_tensors", score_mod_bprop_tensors))


def _tensors(name: str, given: Any) -> Mapping[str, torch.Tensor]:
    """The tensors of a function, as they were given."""
    if given is None:
        return {}
    named = isinstance(given, dict) and all(isinstance(key, str) for key in given)
    if not named or not all(isinstance(t, torch.Tensor) for t in given.values()):
        raise wrong(f"{name} of {type(given).__name__}: {given!r:.80}", "a dict of str: Tensor", f"correct {name}")
    for key, t in given.items():
        if t.requires_grad and torch.is_grad_enabled():
            raise wrong(f"{name}[{key!r}] with requires_grad", "tensors without gradients", "detach it: it gets none")
    return given


# ------------------------------------------------------------------------------------------------- a cuDNN graph


def run_graph(plan: Plan, inputs: AttentionInputs, functions: Functions) -> Results:
    """(out, None) by a cuDNN graph with the functions in it."""
    q = inputs.a
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NoBackendError(
            OPERATION,
            "No dot product attention backend is available: score_mod in a capture of a CUDA graph",
            "score_mod in eager steps",
            f"leave the capture, or use torch_score_mod ({UNFUSED})",
        )
    q, k, v = (aligned(t.contiguous()) for t in (q, inputs.b, inputs.c))
    tensors, others = (
        {name: _beside(q, name, t) for name, t in given.items()}
        for given in (functions.tensors, functions.backward_tensors)
    )
    out: torch.Tensor = _Scored.apply(plan, functions.graph, tensors, others, q, k, v)
    return out.flatten(-2), None


def _beside(q: torch.Tensor, name: str, t: torch.Tensor) -> torch.Tensor:
    """A function's tensor where the graph reads it. A number of the host is copied to the device in each call."""
    t = t.detach()
    if t.numel() == 1 and t.is_cpu:
        # cuDNN computes NaN with numbers that are passed by value: they are read from memory.
        kind = torch.float32 if t.dtype == torch.float64 else t.dtype
        t = t.reshape(1, 1, 1, 1).to(q.device, kind, non_blocking=True)
    if t.device != q.device:
        allowed = f"tensors on {q.device}, or single numbers on the CPU"
        raise wrong(f"the tensor {name!r} of score_mod on {t.device}", allowed, "move it")
    if t.dtype not in _TYPES:
        allowed = ", ".join(str(kind).removeprefix("torch.") for kind in _TYPES)
        raise wrong(f"the tensor {name!r} of score_mod of {t.dtype}", allowed, "convert it")
    return t.clone() if t.data_ptr() & 15 else t


class _Scored(torch.autograd.Function):
    """One call. What its functions' tensors hold is read again in backward, and saved for it."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        mod: ScoreMod,
        tensors: dict[str, torch.Tensor],
        others: dict[str, torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        stats = any(plan.layer.needs)
        out, statistics = ops.attention_scored_forward(
            runtime_for(q), *map(to_core, (q, k, v)), spec=plan.spec, mod=mod, tensors=_core(tensors), stats=stats
        )
        made = to_torch(out)
        if statistics is not None:
            ctx.save_for_backward(q, k, v, made, to_torch(statistics), *tensors.values(), *others.values())
        ctx.plan, ctx.mod, ctx.names = plan, mod, (tuple(tensors), tuple(others))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, k, v, out, stats, *rest = ctx.saved_tensors
        forward, backward = ctx.names
        tensors = _core(dict(zip(forward, rest, strict=False)))
        others = _core(dict(zip(backward, rest[len(forward) :], strict=True)))
        grads = ops.attention_scored_backward(
            runtime_for(q),
            to_core(aligned(dy.contiguous())),
            Kept(*map(to_core, (q, k, v, out, stats))),
            spec=ctx.plan.spec,
            mod=ctx.mod,
            tensors=(tensors, others),
        )
        wanted = ctx.needs_input_grad[4:]
        return None, None, None, None, *[to_torch(g) if w else None for g, w in zip(grads, wanted, strict=True)]


def _core(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    found = {}
    for name, t in tensors.items():
        found[name] = view = to_core(t)
        if not t.is_contiguous():
            view.strides = t.stride()
    return found


# ------------------------------------------------------------------------------------------------------- its key


def callback_key(callback: Any) -> Hashable | None:
    """What tells this function from others that build another graph; None where nothing does.

    An object says it by `score_mod_graph_cache_key` (a method or an attribute): numbers, strings, and dicts, lists,
    tuples and sets of them. A function is told by its names and its code, unless it has a closure.
    """
    owner = callback.__self__ if isinstance(callback, MethodType) else callback
    own = getattr(owner, "score_mod_graph_cache_key", None)
    if own is not None:
        name = getattr(callback, "__qualname__", type(owner).__qualname__)
        return (type(owner).__module__, name, _frozen(own() if callable(own) else own))
    if isinstance(callback, BuiltinFunctionType) and callback.__self__ in (None, builtins):
        return (callback.__module__, callback.__qualname__)
    if not isinstance(callback, FunctionType) or callback.__closure__:
        return None
    defaults = (callback.__defaults__, tuple((callback.__kwdefaults__ or {}).items()))
    try:
        hash(defaults)
    except TypeError:
        return None
    # The code too: a notebook's cell that is run again defines another function of the same name.
    return (callback.__module__, callback.__qualname__, callback.__code__, defaults)


def _frozen(value: Any) -> Hashable:
    """A key in which equal parts are equal, whatever they are made of."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"score_mod_graph_cache_key: a tensor ({tuple(value.shape)}) is no part of a key. Allowed: numbers, "
            "strings, and dicts, lists, tuples and sets of them. To do: name what it stands for, and give the tensor "
            "in score_mod_tensors."
        )
    if isinstance(value, dict):
        return ("dict", frozenset((_frozen(k), _frozen(v)) for k, v in value.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(_frozen, value)))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(map(_frozen, value)))
    hash(value)
    return (type(value).__name__, value)


# --------------------------------------------------------------------------------------------------------- torch


def modified(functions: Functions, scores: torch.Tensor) -> torch.Tensor:
    """The scores [b, h, sq, skv], float32 before and after the function of torch."""
    batch, heads, sq, skv = scores.shape
    b, h, q, kv = (torch.arange(n, device=scores.device) for n in (batch, heads, sq, skv))
    rows = q.view(1, 1, -1, 1) if functions.q_idx is None else functions.q_idx[:, None, :, None]
    columns = kv if functions.kv_idx is None else functions.kv_idx[:, None, None, :]
    assert functions.pointwise is not None
    found = functions.pointwise(scores, b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), rows, columns)
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or found.shape != scores.shape:
        got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        allowed = f"a float tensor of the shape of its scores, {tuple(scores.shape)}"
        raise wrong(f"a torch_score_mod that gives {got}", allowed, "give back scores of all pairs")
    return found.float()
