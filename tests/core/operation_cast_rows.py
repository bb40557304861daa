"""The rows of quantization: casts into every format, and back. Bytes are compared, not values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from te_core import dtypes, ops
from te_core.quantized import Cast, Copy, Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.inputs import FP8, SHAPES, numpy_dtype, values
from tests.core.operations import Array, Case, Found, Near, Put, Row, sums, type_of
from tests.reference import quantize as per_tensor
from tests.reference import quantize_block as block
from tests.reference import quantize_mxfp8 as mxfp8
from tests.reference import quantize_nvfp4 as nvfp4

ORIENTATIONS = [(True, True), (True, False), (False, True)]
SITE, COLUMNWISE_SITE = 0x7FFFFFFE, 0x40000000
#: Every combination that is allowed: (tiled, transform, stochastic, row_scaled, four_over_six).
NVFP4 = [
    *((tiled, transform, stochastic, False, None) for tiled, transform, stochastic in product((False, True), repeat=3)),
    *((tiled, False, False, False, mode) for tiled in (False, True) for mode in ("MAE", "MSE")),
    *((False, False, False, True, mode) for mode in (None, "MAE", "MSE")),
]
Piece = dict[str, Array | None]  # the data, scales and maxima of a copy, as they are stored


class Rule(NamedTuple):
    """What a cast is told."""

    name: str
    fp8: str = "float8_e4m3"
    orientation: tuple[bool, bool] = (True, True)
    scale: float | None = None
    epsilon: float = 0.0
    power_of_two: bool = False
    amax: float | None = None  # what was held before
    options: tuple[Any, ...] = NVFP4[0]
    bound: int = 448

    def cast(self, rt: Runtime, rng: tuple[int, int] = (7, 9), site: int = SITE) -> Cast:
        """It, with tensors of its own."""
        tiled, transform, stochastic, row_scaled, four_over_six = self.options
        fp4 = self.name == "nvfp4"
        scaling = {"delayed": "tensor", "current": "tensor", "1x128": "block", "128x128": "block"}.get(self.name, "")
        form = Format(dtypes.dtype(self.fp8), scaling or "mxfp8", self.tiled)
        more: dict[str, Any] = {}
        if fp4:
            form = Format(dtypes.float4_e2m1, "nvfp4", tiled, row_scaled, self.bound)
            state = rt.tensor(np.array(rng, np.uint64).view(np.int64)) if stochastic else None
            more = {"transform": transform, "stochastic": stochastic, "rng": state, "site": site}
            more["four_over_six"] = four_over_six
        one = [None if v is None else rt.tensor(np.array([v], np.float32)) for v in (self.scale, self.amax)]
        how = {"epsilon": self.epsilon, "power_of_two": self.power_of_two, "scale": one[0], "amax": one[1]}
        return Cast(form, rowwise=self.orientation[0], columnwise=self.orientation[1], **how, **more)

    @property
    def tiled(self) -> bool:
        return self.name in ("128x128", "mxfp8 tiles")

    def copies(self, x: Array) -> tuple[list[Piece], list[Array]]:
        """(both copies as they are stored, the values that come back of each in float64 or float32)."""
        with np.errstate(all="ignore"):
            if self.name in ("delayed", "current"):
                return self._per_tensor(x)
            if self.name in ("1x128", "128x128"):
                return self._block(x)
            return self._nvfp4(x) if self.name == "nvfp4" else self._mxfp8(x)

    def _per_tensor(self, x: Array) -> tuple[list[Piece], list[Array]]:
        scale = self.scale or per_tensor.scale_of(per_tensor.amax(x), self.fp8, self.epsilon, self.power_of_two)
        codes, inverse = per_tensor.cast(x, np.float32(scale), self.fp8), np.float32(1) / np.float32(scale)
        of = np.array([inverse], np.float32)
        back = codes.view(per_tensor.FP8[self.fp8]).astype(np.float32) * inverse
        return [{"": per_tensor.store(c), "_scale": of} for c in (codes, codes.T)], [back] * 2

    def _block(self, x: Array) -> tuple[list[Piece], list[Array]]:
        how = self.epsilon, self.power_of_two
        zero, copies, backs = block.scale_of(np.zeros(1, x.dtype), self.fp8, *how), [], []
        for source in (x, x.T):
            rule = {"tiled": self.tiled, "epsilon": self.epsilon, "power_of_two": self.power_of_two}
            codes, scales = block.quantize(source, self.fp8, **rule)
            stored = block.inverses(scales, self.tiled, zero) if codes.size else None
            copies.append({"": per_tensor.store(codes), "_scale": stored})
            inverse = np.repeat(np.float32(1) / scales, 128, axis=1)[:, : source.shape[1]]
            inverse = np.repeat(inverse, 128, axis=0)[: source.shape[0]] if self.tiled else inverse
            backs.append(codes.view(per_tensor.FP8[self.fp8]).astype(np.float32) * inverse)
        return copies, [backs[0], backs[1].T]

    def _mxfp8(self, x: Array) -> tuple[list[Piece], list[Array]]:
        found = [mxfp8.quantize(x, self.fp8, self.tiled, columns) for columns in (False, True)]
        backs = [mxfp8.dequantize(*copy, self.fp8, bool(i)).astype(np.float32) for i, copy in enumerate(found)]
        return [{"": data, "_scale": scale} for data, scale in found], [b[: x.shape[0], : x.shape[1]] for b in backs]

    def _nvfp4(self, x: Array) -> tuple[list[Piece], list[Array]]:
        tiled, transform, stochastic, row_scaled, mode = self.options
        copies, backs = [], []
        for columns in (False, True):
            lines, random = nvfp4.transform(x) if columns and transform else x.T if columns else x, None
            if stochastic:
                shape = nvfp4.ceil_to(lines.shape[0], 16), nvfp4.ceil_to(lines.shape[1], 16)
                random = nvfp4.random_bytes(*shape, 7, 9, SITE ^ COLUMNWISE_SITE if columns else SITE)
            how = {"tiled": tiled, "row_scaled": row_scaled, "four_over_six": mode, "random": random}
            made = nvfp4.quantize(lines, self.bound, columns=columns, **how)
            amax = made.amax if made.amax.size else None  # for each of no lines
            copies.append({"": made.data, "_scale": made.scale, "_amax": amax})
            back = nvfp4.dequantize(made, self.bound, row_scaled)
            backs.append(back[: x.shape[1]].T if columns else back[: x.shape[0], : x.shape[1]])
        return copies, backs


def raw(t: Tensor | None) -> Tensor | None:
    """Its bytes, where it holds codes."""
    if t is None or t.dtype is dtypes.float32:
        return t
    return Tensor(t.ptr, t.shape, dtypes.uint8, t.device, t)


def pieces(q: QuantizedTensor) -> Found:
    """All that a quantized matrix holds."""
    names = ("", "_scale", *(("_amax",) if q.format.scaling == "nvfp4" else ()))
    return {f"{side}{n}": raw(getattr(q, f"{side}{n}")) for side in ("rowwise", "columnwise") for n in names}


def quantize(size: Any, dtype: str, number: int, name: str) -> Case:
    """The copies asked for and no other, with their padding and scales; maxima and sums of columns, whose presence
    changes nothing else; and what comes back of each copy.
    """
    shape, kind = size
    x, rule = KINDS[kind](shape, dtype, number), RULES[name](number)
    other, sum_type = ("float32", "bfloat16", "float16")[number // 2 % 3], (dtype, "float32")[number % 2]

    def run(rt: Runtime, put: Put, summed: bool = True) -> Found:
        cast, given, total = rule.cast(rt), put(x), rt.empty((x.shape[1],), type_of(sum_type))
        q = ops.quantize(rt, given, cast, column_sum=total if summed else None)
        if not summed:
            ops.column_sum(rt, given, total)
        found = {**pieces(q), "amax": cast.amax, "sums": total}
        for i, side in enumerate(("rowwise", "columnwise")):
            back = ops.dequantize(rt, q, type_of(other), columnwise=bool(i)) if rule.orientation[i] else None
            found[f"{side} back"] = back
        return found

    @cache
    def wanted() -> dict[str, Near | None]:
        copies, backs = rule.copies(x)
        want: dict[str, Near | None] = {"sums": sums(x, sum_type) if kind == "plain" else None, "amax": None}
        if rule.amax is not None:
            largest = max(np.float32(rule.amax), per_tensor.amax(x))
            want["amax"] = Near(np.array([largest], np.float32))
        for side, asked, copy, back in zip(("rowwise", "columnwise"), rule.orientation, copies, backs, strict=True):
            for piece, value in copy.items():
                want[side + piece] = None if value is None or not asked else Near(value)
            with np.errstate(all="ignore"):
                want[f"{side} back"] = Near(back.astype(numpy_dtype(other))) if asked else None
        return want

    def judged(found: dict[str, Array]) -> dict[str, Near | None]:
        want = wanted()
        free = [n for n, v in found.items() if v is not None and want[n] is None and (not x.size or n == "sums")]
        return {**want, **{n: Near(found[n]) for n in free}}  # scales of no elements, sums of what is no number

    return Case(run, judged, (partial(run, summed=False),))


def special(shape: tuple[int, int], dtype: str, number: int) -> Array:
    """Also NaN, infinities, zeros, extremes."""
    return values(shape, dtype, number, special=True)


def odd(shape: tuple[int, int], dtype: str, number: int) -> Array:
    """Blocks of zeros, of subnormals, of NaN, with an infinity, and such that the quotient overflows."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    tiny = float(info.smallest_subnormal)
    x = np.full((520, 300), 1.5, np.float32)
    x[:128] = 0
    x[0, 7], x[100, 200] = -tiny, 3 * tiny
    x[128:256, :128] = np.nan
    x[130, 3], x[140, 200], x[200, 290] = -2, np.inf, -np.inf
    x[300:384], x[384:512] = -float(info.max), float(info.tiny) / 4
    return x.astype(numpy_dtype(dtype))


def extremes(shape: tuple[int, int], dtype: str, number: int) -> Array:
    """In blocks of their own and mixed: zeros, NaN, the largest and the smallest numbers, infinities."""
    info, random = ml_dtypes.finfo(numpy_dtype(dtype)), np.random.default_rng(1)
    top, tiny, base = float(info.max), float(info.smallest_subnormal), random.standard_normal((48, 48))
    kinds = [
        np.full((48, 48), [0.0, -0.0, np.nan][number % 2 + number // 9 % 2]),
        np.where(random.random((48, 48)) < 0.02, np.nan, base),
        np.clip(base * top, -top, top),
        np.rint(base * 4) * tiny,
        np.where(random.random((48, 48)) < 0.01, -np.inf, base),
        base * 2.0 ** random.integers(-14, 10, (48, 48)),
    ]
    return kinds[number // 3 % len(kinds)].astype(numpy_dtype(dtype))


def any_bits(shape: tuple[int, int], dtype: str, number: int) -> Array:
    """All of 16 bits, a million of 32."""
    if dtype == "float32":
        return np.random.default_rng(0).integers(0, 1 << 32, (1000, 1090), np.uint32).view(np.float32)
    return np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(256, 256)


def zeros(shape: tuple[int, int], dtype: str, number: int) -> Array:
    return np.zeros(shape, numpy_dtype(dtype))


def small(shape: tuple[int, int], dtype: str, number: int) -> Array:
    """So that the quotient overflows."""
    return (values(shape, dtype, number).astype(np.float32) * 1e-38).astype(numpy_dtype(dtype))


KINDS: dict[str, Callable[..., Array]] = {
    "plain": values,
    "special": special,
    "odd": odd,
    "extremes": extremes,
    "any bits": any_bits,
    "zeros": zeros,
    "small": small,
}


#: What a cast is told, in turn.
RULES: dict[str, Callable[[int], Rule]] = {
    "delayed": lambda i: Rule(
        "delayed",
        FP8[i % 2],
        ORIENTATIONS[i % 3],
        scale=(0.37, 32.0, 1.0)[i // 9 % 3],
        amax=(0.0, 1e-4, 3e38, None)[i % 4],
    ),
    "current": lambda i: Rule(
        "current", FP8[i // 2 % 2], ORIENTATIONS[i % 3], None, (0.0, 0.5, 1e30)[i // 2 % 3], i % 2 == 0, amax=0.0
    ),
    **{
        name: lambda i, name=name: Rule(
            name, FP8[i // 3 % 2], ORIENTATIONS[i % 3], None, (0.0, 0.0, 0.5, 1e-42, 1e30)[i % 5], i % 2 == 0
        )
        for name in ("1x128", "128x128")
    },
    **{
        name: lambda i, name=name: Rule(name, FP8[i // 3 % 2], ORIENTATIONS[i % 3]) for name in ("mxfp8", "mxfp8 tiles")
    },
    "nvfp4": lambda i: Rule(
        "nvfp4", orientation=ORIENTATIONS[i % 3], options=NVFP4[i // 3 % len(NVFP4)], bound=(448, 256)[i % 2]
    ),
}


def any_codes(size: Any, dtype: str, number: int) -> Case:
    """MXFP8 back of any data below any scales: all 256 codes of both."""
    shape, fp8 = size
    rows, columns = (-(-n // 32) * 32 for n in shape)
    random, form = np.random.default_rng(number), Format(dtypes.dtype(fp8), "mxfp8")
    found = []
    for columnwise in (False, True):
        sizes = (-(-rows // 32 // 4) * 4, -(-columns // 128) * 128), (-(-rows // 128) * 128, -(-columns // 32 // 4) * 4)
        found.append([random.integers(0, 256, s, np.uint8) for s in ((rows, columns), sizes[not columnwise])])

    def run(rt: Runtime, put: Put) -> Found:
        backs = {}
        for i, (data, scale) in enumerate(found):
            copy = Copy(rt.tensor(data.view(per_tensor.FP8[fp8])), rt.tensor(scale), None)
            q = QuantizedTensor(form, shape, None if i else copy, copy if i else None)
            backs[str(i)] = ops.dequantize(rt, q, type_of(dtype), columnwise=bool(i))
        return backs

    with np.errstate(all="ignore"):
        exact = [mxfp8.dequantize(*copy, fp8, bool(i)).astype(np.float32) for i, copy in enumerate(found)]
        backs = [e[: shape[0], : shape[1]].astype(numpy_dtype(dtype)) for e in exact]
    return Case(run, {str(i): Near(b) for i, b in enumerate(backs)})


def swizzle(shape: tuple[int, int], dtype: str, number: int) -> Case:
    scale = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    made = mxfp8.swizzled(scale)

    def run(rt: Runtime, put: Put) -> Found:
        turned = ops.swizzle_scales(rt, rt.tensor(np.ascontiguousarray(scale.T)), transposed=True)
        return {"there": ops.swizzle_scales(rt, rt.tensor(scale)), "turned": turned}

    return Case(run, {"there": Near(made.reshape(shape)), "turned": Near(made.reshape(shape[::-1]))})


#: One row, one column, both sides of a block's edge, whole tiles, many tiles.
BLOCKS = [(1, 300), (300, 1), (127, 128), (128, 129), (129, 257), (256, 640), (385, 512)]
#: Around the 32, 128 and 256 that the kernels count in.
EDGES = [(33, 65), (32, 32), (128, 256), (129, 257), (31, 288), (1, 640), (640, 1)]
NARROW = [(1, 1), (3, 5), (16, 16), (17, 33), (0, 32), (48, 0), (64, 8), (31, 72), (130, 40), (40, 130)]
UNALIGNED = [(40, 64), (33, 16), (16, 31), (2, 300), (130, 144)]


def in_kinds(shapes: list[Any], *more: str) -> list[Any]:
    """Plain and special values in turn, and others."""
    found = [(shape, ("plain", "special")[i // 3 % 2]) for i, shape in enumerate(shapes)]
    return found + [((48, 48), kind) for kind in more]


ALL = [*SHAPES, *UNALIGNED, (1500, 72)]
LARGE = [((700, 1096), "special"), ((1100, 2056), "special"), *[((0, 0), "any bits")] * 6]
ODD = ("odd",) * 6
SIZES: dict[str, list[Any]] = {
    "delayed": in_kinds(ALL, "odd", "odd", "odd"),
    "current": in_kinds(ALL, "zeros", "small", "odd", "odd", "odd"),
    "1x128": in_kinds([*ALL, *BLOCKS], *ODD),
    "128x128": in_kinds([*ALL, *BLOCKS], *ODD),
    "mxfp8": in_kinds([*ALL, *EDGES, (40000, 24)], "odd", "odd", "odd"),
    "mxfp8 tiles": in_kinds([*ALL, *EDGES], "odd", "odd", "odd"),
    "nvfp4": in_kinds([*NARROW * 5, (300, 72)], *["extremes"] * 18),
}
ROWS: dict[str, Row] = {
    **{
        f"quantize {name}": Row(partial(quantize, name=name), sizes, large=LARGE, exact=True)
        for name, sizes in SIZES.items()
    },
    "dequantize mxfp8 of any codes": Row(any_codes, [*product([(1, 1), (17, 33), (130, 264), *EDGES], FP8)]),
    "swizzle_scales": Row(swizzle, [(128, 4), (256, 4), (128, 8), (384, 36), (1024, 20), (0, 4), (128, 0)], ("uint8",)),
}
ROWS["quantize nvfp4"] = ROWS["quantize nvfp4"]._replace(
    large=[(s, "special") for s in [(512, 768), (1000, 1003), (77, 2048), (3000, 64)] for _ in range(len(NVFP4) // 3)]
)
