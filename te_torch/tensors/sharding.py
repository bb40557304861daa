"""What FSDP2's hooks have to know of shards: whether ranks' bytes can stand one after another, and what fills them up.

FSDP2 cuts a parameter along its first dimension into pieces of one size, of which the last ones may be smaller, or
empty. Each rank decides by the parameter's size and the number of pieces, which all know: one that judged its own piece
would leave the others waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import FrameType
from typing import Any

import torch

from te_core.errors import UnsupportedError
from te_core.quantized import BLOCK
from te_torch.module_names import name_of
from te_torch.runtime import is_dtensor
from te_torch.tensors.buffers import Buffers, are_held, memory_of, rows_of
from te_torch.tensors.views import OfOneTensor


def rows_of_a_shard(shard: Any, mesh: Any, whole: Sequence[int] | None, module: Any) -> int:
    """The rows that each rank sends of a parameter of this shape: a rank that has fewer fills up."""
    if mesh is None or whole is None:
        return int(shard.shape[0])
    _refuse(shard, whole, mesh.size(), tuple(shard.shape[1:]) == tuple(whole[1:]), lambda: _held_by(module, shard))
    return -(-whole[0] // mesh.size())


@dataclass(slots=True, eq=False)
class Shards:
    """The processes that hold a parameter together. A copy of a shard is one of theirs: nothing of this is copied."""

    group: Any

    def __deepcopy__(self, memo: Any) -> Shards:
        return self


def refuse_what_cannot_be_gathered(t: Any, dim: int) -> None:
    """While `fully_shard` cuts a parameter: raise at once, and on every rank, what its first all-gather would."""
    found = _being_sharded()
    if found is not None:
        ranks, name, _ = found
        _refuse(t, t.shape, ranks, dim == 0, lambda: name)


def tell_of_shards(t: Any, whole: Any) -> None:
    """While `fully_shard` makes a shard: who holds the others, and whether any has run, before one is written to."""
    found = _being_sharded()
    if found is not None and found[2] is not None:
        t._note_shards(found[2])
        t._memory.state = whole._memory.state


class Sharded:
    """A plain parameter that is spread over processes, to become a quantized one: `fully_shard` of a module on the meta
    device cuts its weights before they are quantized.
    """

    @classmethod
    def of(cls, weight: torch.Tensor | None) -> Sharded | None:
        """What there is to know of a DTensor; None of anything else."""
        return cls(weight) if is_dtensor(weight) else None

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.local: torch.Tensor = weight.to_local().detach()
        self.sides = [(i, p.dim) for i, p in enumerate(weight.placements) if p.is_shard()]
        self.group = weight.device_mesh.get_group(self.sides[0][0]) if len(self.sides) == 1 else None

    def quantized(self, quantizer: Any, module: Any) -> torch.Tensor:
        """The same parameter of quantized shards."""
        mesh, whole = self.weight.device_mesh, self.weight.shape
        if len(self.sides) > 1:
            raise UnsupportedError(
                "quantized_model_init",
                f"{_held_by(module, self.weight)}, spread over {len(self.sides)} dimensions of a mesh",
                "weights spread over one dimension",
                "construct this layer outside quantized_model_init",
            )
        made = quantizer(self.local)
        for i, dim in self.sides:
            _refuse(made, whole, mesh.size(i), dim == 0, lambda: _held_by(module, self.weight))
            made._note_shards(self.group)
            made._requantize(self.local)  # with the scale that all agree on
        kind: Any = type(self.weight.data)
        return kind.from_local(
            made, mesh, self.weight.placements, run_check=False, shape=whole, stride=self.weight.stride()
        )


def _being_sharded() -> tuple[int, str, Any] | None:
    """Into how many shards FSDP2 is cutting a parameter, which, and over which group; None where nobody does.

    The call stack knows (`FSDPParam` of torch 2.6 to 2.13): a tensor that is cut is not told by whom.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_init_sharded_param" and frame.f_globals["__name__"].startswith("torch."):
            param = frame.f_locals["self"]
            where = param._module_info
            name, info = f"{name_of(where.module)}.{where.param_name}", param.mesh_info
            return getattr(info, "shard_mesh_size", 1), name, getattr(info, "shard_process_group", None)
        frame = frame.f_back
    return None


def _held_by(module: Any, shard: Any) -> str:
    """What a shard's parameter is called: that of its module over this very tensor."""
    found = (n for n, p in module._parameters.items() if p is shard or getattr(p, "_local_tensor", None) is shard)
    return f"{name_of(module)}.{next(found, 'weight')}"


def _refuse(t: Any, whole: Sequence[int], ranks: int, along_rows: bool, name: Callable[[], str]) -> None:
    """Raise for a parameter of this shape in so many shards, unless these can be put together again.

    `t` is the parameter or any shard of it: by what each rank knows alike, all ranks decide alike.
    """
    formats = {p._format for p in getattr(t, "_parts", (t,)) if getattr(p, "_format", None) is not None}
    step = max([BLOCK.get(form.scaling, 1) for form in formats], default=1)
    rows, one_scale = -(-whole[0] // ranks), step == 1 and formats and not hasattr(t, "_parts")
    if ranks == 1 or (along_rows and (one_scale or whole[0] % (step * ranks) == 0)):
        return
    allowed = f"rows that are a multiple of {step * ranks} ({step} a block, {ranks} ranks)"
    first = "shard over fewer ranks (a mesh of two dimensions replicates over the rest), choose another size"
    if not along_rows:
        why = "shards of another dimension than rows"
        allowed, first = "quantized weights cut along their first dimension", "leave it out in shard_placement_fn"
    elif rows % step:
        why = f"shards of {rows} rows cut through a block of {step}"
    elif whole[0] % step:
        why = f"the last of the shards of {rows} rows has {whole[0] % rows} and ends inside a block of {step}"
    else:
        why = "the last shards are smaller"
    raise UnsupportedError(
        "fully_shard",
        f"{name()}, a {type(t).__name__} of {whole[0]} rows ({' x '.join(map(str, whole))}) over {ranks} ranks: {why}",
        allowed,
        f"{first}, or construct this layer outside quantized_model_init",
    )


def filled(sent: torch.Tensor, rows: int) -> torch.Tensor:
    """The data of a shard as that of one of so many rows."""
    made = sent.new_zeros((rows, *sent.shape[1:]))
    made[: sent.shape[0]] = sent
    return made


def in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of several buffers in one: of a mesh of one rank FSDP2 (torch 2.13) takes the first buffer alone."""
    return torch.cat([t.view(-1).view(torch.uint8) for t in tensors])


def apart(one: torch.Tensor, like: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """Such buffers again, as views."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in like]
    return [t.view(d).view(s) for t, (s, d) in zip(one.view(-1).split(sizes), like, strict=True)]


def same_memory(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both are the same view of the same memory, wherever that is now."""
    return a is not None and b is not None and a.shape == b.shape and memory_of(a) == memory_of(b)


def first_rows(form: Any, shape: tuple[int, int], buffers: Buffers, rows: int) -> Buffers:
    """The buffers of a gathered matrix without the rows that filled up."""
    if shape[0] == rows:
        return buffers
    if form.scaling != "tensor":
        found = rows_of(form, shape, buffers, 0, rows)
        assert found is not None  # whole blocks were gathered
        return found
    row = buffers.row_data
    assert row is not None and buffers.col_data is None
    return buffers._replace(row_data=row[:rows])


@dataclass(slots=True, eq=False)
class Sent(OfOneTensor):
    """What a shard sends in each all-gather: views of its buffers, and what the whole parameter needs besides."""

    held: tuple[torch.Tensor | None, ...]
    tensors: tuple[torch.Tensor, ...]
    metadata: Any
    format: Any
    options: Any
    quantizer: Any
    mesh: Any
    whole: Any
    nominal: torch.dtype

    @classmethod
    def of(cls, shard: Any, mesh: Any, whole: Any, tensors: Sequence[torch.Tensor], metadata: Any) -> Sent | None:
        """That which was made now; None if some of it is a copy, which a change of the shard would not reach."""
        held = _held(shard)
        if not held or not all(any(_starts_as(t, h) for h in held if h is not None) for t in tensors):
            return None
        of_shard = (shard._format, shard._options, shard._quantizer)
        return cls(held, tuple(tensors), metadata, *of_shard, mesh, whole, shard._dtype)

    def fits(self, shard: Any, mesh: Any, whole: Any) -> bool:
        """Whether the shard holds the same, of the same parameter on the same mesh."""
        return (
            self.mesh is mesh
            and self.whole == whole
            and self.quantizer is shard._quantizer
            and self.format is shard._format
            and self.options is shard._options
            and self.nominal is shard._dtype
            and are_held(self.held, shard)
        )


@dataclass(slots=True, eq=False)
class Arrived(OfOneTensor):
    """What came last of all shards, where a parameter's buffers are views of it."""

    held: tuple[torch.Tensor | None, ...]
    metadata: Any
    order: tuple[Any, ...]

    @classmethod
    def of(cls, whole: Any, gathered: Sequence[torch.Tensor], metadata: Any) -> Arrived | None:
        """That of a parameter over what was gathered; None where its buffers are copies of some of it."""
        held = _held(whole)
        order = [
            next((h for h in held if h is not None and g.numel() == h.numel() and _starts_as(g, h)), None)
            for g in gathered
        ]
        known = [*order, metadata.get("fp8_scale_inv")]
        if not held or any(h is None for h in order):
            return None
        if any(h is not None and not any(h is k for k in known) for h in held):  # made of what was gathered
            return None
        return cls(held, metadata, tuple(order))

    def fits(self, whole: Any, gathered: Sequence[torch.Tensor], metadata: Any) -> bool:
        """Whether the same has come again, into the memory of the same buffers."""
        if self.metadata is not metadata or not are_held(self.held, whole):
            return False
        for g, h in zip(gathered, self.order, strict=True):
            if g.data_ptr() != h.data_ptr() or g.numel() != h.numel():
                return False
        return True

    def note(self, whole: Any) -> None:
        """Note that other bytes are in the buffers' memory, which may have been freed and be elsewhere now."""
        views = whole._core_views
        if views is not None and not views.follow():
            whole._core_views = None
        whole._wrote()


def _held(t: Any) -> tuple[torch.Tensor | None, ...]:
    """The buffers of a tensor that has any of its own, as they are held."""
    return () if t._format is None else (t._row_data, t._row_scale, t._row_amax, t._col_data, t._col_scale, t._col_amax)


def _starts_as(t: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether a tensor is a view of all of a buffer, or of its first rows."""
    return t.numel() > 0 and t.data_ptr() == held.data_ptr() and t.dtype is held.dtype


class Hook:
    """A method whose signature FSDP2 asks for in each all-gather of each parameter: known here, which of a bound method
    Python works out anew (30 calls).
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        given = signature(method)
        self._signature = given.replace(parameters=list(given.parameters.values())[1:])
        self.__doc__ = method.__doc__

    def __get__(self, t: Any, owner: Any = None) -> Any:
        if t is None:
            return self._method
        bound: Any = partial(self._method, t)
        bound.__signature__ = self._signature
        return bound
