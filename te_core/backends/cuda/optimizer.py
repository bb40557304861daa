"""Steps of optimizers on CUDA: tables of tensors that kernels take by value, 60 and more a launch (504 and more where
driver and NVRTC are CUDA 12.1 or newer). States with scales take a launch more, which finds their maxima.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from ctypes import Array, c_char, create_string_buffer
from typing import TYPE_CHECKING, NamedTuple

from te_core import dtypes, libraries
from te_core.backends.cuda.sums import FORMATS, TYPES
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.optimizer import AdamQuantized, AdamRule, AdamSpec, AdamTensors, SgdRule, SgdTensors

#: Of common/tensors.cuh.
THREADS, ELEMENTS = 256, 16384
_SIDE = 128  # of a tile of adam_quantized.cu

_STATES = TYPES | {dtypes.float8_e4m3: "u8"}
_MASTERS = {None: "NO_MASTER", dtypes.float32: "FLOAT", dtypes.float16: "HALF", dtypes.int16: "REMAINDER"}
_RULE = "QQ10f"  # AdamRule of common/adam.cuh
_ADAM, _ADAM_TAIL = struct.Struct("=7QqII"), struct.Struct(f"={_RULE}QI4x")  # Entry and what follows, of adam.cu
_TILES, _TILES_TAIL = struct.Struct("=10Q2i2I"), struct.Struct(f"={_RULE}fiI4x")  # of adam_quantized.cu
_SGD, _SGD_TAIL = struct.Struct("=4QqII"), struct.Struct("=5f3iI4x")  # of sgd.cu
_MANY, _MANY_TAIL = struct.Struct("=2QqII"), struct.Struct("=3QqfII4x")  # of many.cu
#: Bytes of a launch's parameters: everywhere, and since CUDA 12.1.
_SMALL, _LARGE = 4096, 32764
_MAXIMA = 8  # floats a tensor, for adam_maxima


#: An entry: what stands before the number of its first block, how many blocks it has, what stands behind that.
Row = tuple[tuple[int, ...], int, int]


class Launch(NamedTuple):
    """One launch's share of a list of tensors."""

    table: Array[c_char]
    capacity: int
    entries: int
    blocks: int


def _launches(entry: struct.Struct, tail: struct.Struct, rows: Sequence[Row]) -> Iterator[Launch]:
    """The tables of these tensors, in order, but for their tails."""
    # Entries that fit in either size, by fours of the smaller one.
    small, large = (_SMALL - tail.size) // entry.size // 4 * 4, (_LARGE - tail.size) // entry.size // 8 * 8
    capacity = large if len(rows) > small and libraries.large_parameters() else small
    for start in range(0, len(rows), capacity):
        table = create_string_buffer(capacity * entry.size + tail.size)
        part, first = rows[start : start + capacity], 0
        for i, (before, blocks, behind) in enumerate(part):
            entry.pack_into(table, i * entry.size, *before, first, behind)
            first += blocks
        yield Launch(table, capacity, len(part), first)


def _flat(tensors: Sequence[Sequence[Tensor | None]], pointers: int) -> list[Row]:
    """The entries of common/tensors.cuh: those of a row have as many elements, but for scales."""
    rows: list[Row] = []
    for one in tensors:
        addresses = [0 if t is None else t.ptr for t in one]
        addresses += [0] * (pointers - len(addresses))
        size, bits = one[0].size, 0  # type: ignore[union-attr]
        for t in one:
            if t is not None and t.size == size:  # scales and maxima are read one by one
                bits |= t.ptr
        rows.append(((*addresses, size), -(-size // ELEMENTS), int(not bits & 15)))
    return rows


def adam(rt: Runtime, spec: AdamSpec, tensors: Sequence[AdamTensors], rule: AdamRule) -> None:
    """One launch of adam.cu; one more before it for scales, and one thread for numbers that the device knows."""
    if not tensors:
        return
    constants: dict[str, str | int] = {
        "GRAD": TYPES[spec.grad],
        "PARAM": TYPES[spec.param or dtypes.float32],
        "WRITES_PARAM": spec.param is not None,
        "MEAN": _STATES[spec.m],
        "SQUARE": _STATES[spec.v],
        "MASTER": _MASTERS[spec.master],
        "DECOUPLED": rule.decoupled,
        "AMAX": spec.amax,
    }
    numbers = _rule(rt, rule)
    scaled = any(spec.scaled)
    for launch in _launches(_ADAM, _ADAM_TAIL, _flat(tensors, 7)):
        maxima = 0
        if scaled:
            maxima = rt.workspace("maxima of states", 4 * _MAXIMA * launch.entries)
            rt.backend.zero(rt, Tensor(maxima, (_MAXIMA * launch.entries,), dtypes.float32, rt.device, None))
        _ADAM_TAIL.pack_into(launch.table, launch.capacity * _ADAM.size, *numbers, maxima, launch.entries)
        for entry in ("adam_maxima", "adam") if scaled else ("adam",):
            kernel = loader.get(rt, "adam", entry=entry, args="b", CAPACITY=launch.capacity, **constants)
            kernel.by_value(rt, launch.blocks, THREADS, launch.table)


def adam_quantized(rt: Runtime, spec: AdamSpec, tensors: Sequence[AdamQuantized], rule: AdamRule) -> None:
    """One launch of adam_quantized.cu."""
    if not tensors:
        return
    cast = tensors[0].cast
    vector = not any(t.master.shape[1] % 4 or (t.grad.ptr | t.m.ptr | t.v.ptr | t.master.ptr) & 15 for t in tensors)
    rows: list[Row] = []
    for t in tensors:
        (m, n), q = t.master.shape, t.out
        scales = (q.rowwise_scale, q.columnwise_scale) if cast.format.tiled else (q.scale_inv, None)
        pointers = (t.grad, t.m, t.v, t.master, q.rowwise, q.columnwise, *scales, t.cast.scale, t.cast.amax)
        across, down = -(-n // _SIDE), -(-m // _SIDE)
        rows.append(((*[0 if p is None else p.ptr for p in pointers], m, n), across * down, across))
    numbers = _rule(rt, rule)
    for launch in _launches(_TILES, _TILES_TAIL, rows):
        kernel = loader.get(
            rt,
            "adam_quantized",
            args="b",
            CAPACITY=launch.capacity,
            GRAD=TYPES[spec.grad],
            MEAN=TYPES[spec.m],
            SQUARE=TYPES[spec.v],
            DECOUPLED=rule.decoupled,
            FORMAT=FORMATS[cast.dtype],
            TILED=cast.format.tiled,
            ROWWISE=cast.rowwise,
            COLUMNWISE=cast.columnwise,
            VECTOR=vector,
        )
        rest = cast.epsilon, cast.power_of_two, launch.entries
        _TILES_TAIL.pack_into(launch.table, launch.capacity * _TILES.size, *numbers, *rest)
        kernel.by_value(rt, launch.blocks, 512, launch.table)


def _rule(rt: Runtime, rule: AdamRule) -> tuple[int | float, ...]:
    """AdamRule of common/adam.cuh."""
    lr, step, scale = rule.lr, rule.step, rule.grad_scale
    numbers, values = 0, (0.0, 0.0, 0.0, 1.0)
    if isinstance(lr, Tensor) or isinstance(step, Tensor) or scale is not None:
        numbers = rt.workspace("numbers of adam", 16)
        betas = struct.unpack("=qq", struct.pack("=dd", rule.beta1, rule.beta2))
        of_lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
        of_step = (step, 0) if isinstance(step, Tensor) else (None, step)
        kernel = loader.get(rt, "adam_numbers", args="pfpiqqipp")
        kernel(rt, 1, 1, *of_lr, *of_step, *betas, rule.bias_correction, scale, numbers)
    else:
        values = (lr, *rule.corrections(step), 1.0)
    skip = 0 if rule.skip is None else rule.skip.ptr
    betas = (rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2)
    return numbers, skip, *values, *betas, rule.eps, rule.weight_decay


def sgd(rt: Runtime, tensors: Sequence[SgdTensors], rule: SgdRule) -> None:
    """One launch of sgd.cu."""
    if not tensors:
        return
    grad, param, buffer, copy = tensors[0]
    other = dtypes.float32
    for launch in _launches(_SGD, _SGD_TAIL, _flat(tensors, 4)):
        kernel = loader.get(
            rt,
            "sgd",
            args="b",
            CAPACITY=launch.capacity,
            GRAD=TYPES[grad.dtype],
            PARAM=TYPES[param.dtype],
            BUFFER=TYPES[other if buffer is None else buffer.dtype],
            COPY=TYPES[other if copy is None else copy.dtype],
            HAS_BUFFER=buffer is not None,
            HAS_COPY=copy is not None,
        )
        floats = rule.lr, rule.momentum, 1 - rule.dampening, rule.weight_decay, rule.grad_scale
        flags = rule.nesterov, rule.first_run, rule.decay_last
        _SGD_TAIL.pack_into(launch.table, launch.capacity * _SGD.size, *floats, *flags, launch.entries)
        kernel.by_value(rt, launch.blocks, THREADS, launch.table)


def scale_many(rt: Runtime, pairs: Sequence[tuple[Tensor, Tensor]], scale: float | Tensor, flag: Tensor | None) -> None:
    """One launch."""
    kinds = {"IN": TYPES[pairs[0][0].dtype], "OUT": TYPES[pairs[0][1].dtype]}
    given, factor = (scale.ptr, 0.0) if isinstance(scale, Tensor) else (0, scale)
    for launch in _launches(_MANY, _MANY_TAIL, _flat(pairs, 2)):
        values = given, 0, 0 if flag is None else flag.ptr, 0, factor, launch.entries, launch.blocks
        _MANY_TAIL.pack_into(launch.table, launch.capacity * _MANY.size, *values)
        kernel = loader.get(rt, "many", entry="scale_many", args="b", CAPACITY=launch.capacity, **kinds)
        kernel.by_value(rt, launch.blocks, THREADS, launch.table)


def norm_many(rt: Runtime, lists: Sequence[Sequence[Tensor]], scale: Tensor | None, out: Tensor, parts: Tensor) -> None:
    """One pass over each list, and a launch that adds up all partial sums."""
    total = sum(-(-t.size // ELEMENTS) for tensors in lists for t in tensors)
    partials = rt.workspace("partial squares", 4 * total)
    given, offset, number = (0 if scale is None else scale.ptr), 0, 0
    for tensors in lists:
        kinds = {"IN": TYPES[tensors[0].dtype], "OUT": "float"}
        for launch in _launches(_MANY, _MANY_TAIL, _flat([(t,) for t in tensors], 2)):
            if parts.size:
                for i in range(launch.entries):  # where each tensor's norm goes
                    struct.pack_into("=Q", launch.table, i * _MANY.size + 8, parts.ptr + 4 * (number + i))
            values = given, partials, 0, offset, 0.0, launch.entries, launch.blocks
            _MANY_TAIL.pack_into(launch.table, launch.capacity * _MANY.size, *values)
            if launch.blocks:
                kernel = loader.get(rt, "many", entry="square_many", args="b", CAPACITY=launch.capacity, **kinds)
                kernel.by_value(rt, launch.blocks, THREADS, launch.table)
            if parts.size:
                kernel = loader.get(rt, "many", entry="norm_of_each", args="b", CAPACITY=launch.capacity, **kinds)
                kernel.by_value(rt, launch.entries, THREADS, launch.table)
            offset += launch.blocks
            number += launch.entries
    kernel = loader.get(rt, "many", entry="norm_of_all", args="ppq", IN="float", OUT="float", CAPACITY=4)
    kernel(rt, 1, THREADS, partials, out, total)
