"""What the attentions on cuDNN share: the sizes their graphs are made for, and the small kernels around them.

A graph of packed sequences is made for sizes rounded up (powers of two), so that few graphs serve many batches; what
they really are, attention_lengths.cu writes to the device before each run, and attention_rows.cu puts right after it
what cuDNN leaves as it pleases.

A backward whose sizes are no multiples of 128 gets lengths, too, all of them full: cuDNN up to 9.26 otherwise scores
the keys that the last tile lacks as 0, and their exponentials overflow where a query's statistic is below -88. So do
bands in which a query may see no key, which cuDNN takes with lengths only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from te_core import device, dtypes, libraries
from te_core.attention import DIMENSIONS, AttentionSpec, Lengths, Sizes, bucket
from te_core.attention_rules import cudnn_attention
from te_core.backends.cuda import cudnn
from te_core.backends.cuda.attention_graph import OPERANDS, GraphSpec, Layout, layout, sequences, statistics
from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import Asked

_TILE = 128  # of cuDNN's backward

LENGTHS_ARGS = "pppp" + "iiii" + "ppp" + "i" + "p" + "i" + "qqqqqqqq"
ROWS_ARGS = "pppp" + "iiiiiiii" + "qq" + "pqqq" * 3 + "iiiii" + "pqqq"


@dataclass(frozen=True, slots=True)
class Frame:
    """The sizes of a graph, and which band and lengths it is told."""

    spec: AttentionSpec
    size: Sizes
    batch: int
    sq: int
    skv: int
    bottom_right: bool
    full: bool  # lengths are not given, and the graph gets full ones

    @property
    def padded(self) -> bool:
        """Whether the graph takes lengths."""
        return self.spec.padded or self.full


def frame_of(asked: Asked, *, backward: bool) -> Frame:
    """The sizes of the graph for an attention. Of no queries or keys, all rows are such that see nothing."""
    spec, q, k, _, terms, *_ = asked
    size, empty = asked.size, not q.size or not k.size
    packed_q, packed_kv = spec.q_format == "thd", spec.kv_format == "thd"
    bias = None if terms.bias is None else terms.bias.shape
    batch = size.batch
    if packed_q and packed_kv and terms.pages is None and (bias is None or bias[0] == 1):
        batch = sequences(size.batch)
    sq = bucket(size.sq) if packed_q and (bias is None or bias[2] == 1) else size.sq
    skv = bucket(size.skv) if packed_kv and bias is None and terms.pages is None else size.skv
    bottom_right = spec.bottom_right and spec.banded and (spec.padded or size.sq != size.skv)
    blind = size.sq > size.skv and (bottom_right or spec.left >= 0)
    ragged = backward and bool(size.sq % _TILE or size.skv % _TILE)
    full = not spec.padded and (empty or (not spec.softcap and (blind or ragged)))
    return Frame(spec, size, batch, sq, skv, bottom_right, full)


def require(
    rt: Runtime, operation: str, asked: Asked, grads: tuple[Tensor, ...] = (), *, training: bool, fp8: bool = False
) -> None:
    """Raise `UnsupportedError` with the reason of the rule that refuses."""
    spec, q, k, v, terms, *_ = asked
    able, reason = cudnn_attention(
        device.info(rt.device.index),
        libraries.version("cudnn"),
        spec,
        asked.size,
        q.dtype,
        training,
        fp8,
        paged=terms.pages is not None,
        bias_grad=asked.bias_grad,
        aligned=all(map(aligned, (q, k, v, *grads))),
        bias_rows=0 if terms.bias is None else terms.bias.shape[2],
    )
    if not able:
        raise UnsupportedError(
            operation,
            reason.rstrip("."),
            "what te_core.attention_rules lists for cuDNN",
            "change the option named, or use another attention backend",
        )


def aligned(t: Tensor) -> bool:
    """Whether a tensor starts at 16 bytes and all its rows do."""
    pairs = zip(t.shape[:-1], t.row_major_strides()[:-1], strict=True)
    return not t.ptr & 15 and not any(n > 1 and s * t.dtype.itemsize % 16 for n, s in pairs)


def layouts(
    frame: Frame, asked: Asked, stats: bool, grads: tuple[Tensor, Tensor, Tensor] | None = None
) -> dict[str, Layout]:
    """The tensors of a graph; `grads` are backward's, dense where they are q's, k's and v's shape only."""
    spec, q, k, v, terms, *_ = asked
    kv_form = spec.kv_format if terms.pages is None else "bshd"
    found = {
        "q": layout(q, spec.q_format, frame.batch, frame.sq),
        "k": layout(k, kv_form, frame.batch, frame.skv),
        "v": layout(v, kv_form, frame.batch, frame.skv),
        "out": layout(output_of(asked), spec.q_format, frame.batch, frame.sq),
    }
    if stats:
        found["stats"] = statistics(frame.size.heads, spec.q_format, frame.batch, frame.sq)
    if grads is not None:
        found["dy"] = found["out"]
        for name, t, form, longest in zip(
            ("dq", "dk", "dv"), grads, (spec.q_format, kv_form, kv_form), (frame.sq, frame.skv, frame.skv), strict=True
        ):
            found[name] = layout(t, form, frame.batch, longest)
    return found


def _dense(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return Tensor(0, shape, like.dtype, like.device, None)


def output_of(asked: Asked) -> Tensor:
    """The output, or the description of a dense one."""
    return asked.out or _dense((*asked.q.shape[:-1], asked.v.shape[-1]), asked.q)


def dense_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Descriptions of dense gradients."""
    return _dense(q.shape, q), _dense(k.shape, k), _dense(v.shape, v)


# ---------------------------------------------------------------------------------------------- small kernels


@dataclass(frozen=True, slots=True)
class Around:
    """The kernels before and after a graph, and where they put what the graph reads."""

    lengths: Kernel | None
    rows: Kernel | None
    places: tuple[tuple[str, int], ...]  # operands in scratch memory ("": none): their byte offsets
    nbytes: int
    threads: int
    after_lengths: tuple[Any, ...]  # the arguments that do not change between runs
    after_places: tuple[Any, ...]
    rows_sizes: tuple[Any, ...]

    def prepare(self, rt: Runtime, lengths: Lengths | None) -> dict[str, int]:
        """Write lengths and offsets to the device; the addresses of `places`."""
        if self.lengths is None:
            return {}
        base = rt.workspace("attention lengths", self.nbytes)
        addresses = [base + offset for _, offset in self.places]
        heads, offsets, *others = self.after_places
        arguments = (*sums(lengths), *self.after_lengths, *addresses[:3], heads, base + offsets, *others)
        self.lengths(rt, -(-self.threads // 128), 128, *arguments)
        return {name: address for (name, _), address in zip(self.places, addresses, strict=True) if name}

    def tidy(
        self, rt: Runtime, lengths: Lengths | None, a: Tensor, b: Tensor | None, c: Tensor | None, stats: Tensor | None
    ) -> None:
        """Zeros where nothing was attended to: in the output, or in the gradients of q, k and v."""
        if self.rows is None:
            return
        fixed, blocks, a_strides, b_strides, c_strides, widths, s_strides = self.rows_sizes
        operands = (a, *a_strides, b, *b_strides, c, *c_strides, *widths, stats, *s_strides)
        self.rows(rt, (blocks, 1 if b is None else 3), 256, *sums(lengths), *fixed, *operands)


def sums(lengths: Lengths | None) -> tuple[Tensor | None, ...]:
    """The running sums that there are, as kernels take them."""
    return (None, None, None, None) if lengths is None else tuple(lengths)


def around(rt: Runtime, frame: Frame, found: dict[str, Layout], tidied: tuple[Tensor, ...], zero_sink: bool) -> Around:
    """The kernels around the graph of these layouts; `tidied`: the output, or the three gradients."""
    packed = {name: t.packed for name, t in found.items() if t.packed}
    if not (frame.padded or zero_sink):
        return Around(None, None, (), 0, 0, (), (), ())
    steps: tuple[list[int], list[int]] = ([], [])
    for name, step in packed.items():
        side = steps[name in ("k", "v", "dk", "dv")]
        if step not in side:
            side.append(step)
    slots, heads = frame.batch, frame.size.heads if zero_sink else 0
    pitch = (slots + 2) // 2 * 2  # arrays of int64 that begin at 16 bytes
    len_kv = -(-4 * slots // 16) * 16
    zeros = 2 * len_kv
    base = zeros + -(-4 * heads // 16) * 16
    places = [("len_q", 0), ("len_kv", len_kv), ("sink" if zero_sink else "", zeros)]
    for name, step in packed.items():
        on_kv = name in ("k", "v", "dk", "dv")
        number = len(steps[0]) + steps[1].index(step) if on_kv else steps[0].index(step)
        places.append((f"{name}_at", base + 8 * pitch * number))
    size = frame.size
    strides = (*steps[0], *[0] * (4 - len(steps[0])), *steps[1], *[0] * (4 - len(steps[1])))
    return Around(
        loader.get(rt, "attention_lengths", args=LENGTHS_ARGS),
        loader.get(rt, "attention_rows", args=ROWS_ARGS) if frame.padded else None,
        tuple(places),
        base + 8 * pitch * (len(steps[0]) + len(steps[1])),
        max(slots + 1, heads),
        (size.batch, slots, size.sq, size.skv),
        (heads, base, pitch, *strides),
        _rows_sizes(frame, tidied),
    )


def band_of(spec: AttentionSpec) -> tuple[int, int, int]:
    """What the kernels are told of a band."""
    return spec.left, spec.right, int(spec.bottom_right)


def _rows_sizes(frame: Frame, tidied: tuple[Tensor, ...]) -> tuple[Any, ...]:
    spec, size = frame.spec, frame.size
    packed_q, packed_kv = spec.q_format == "thd", spec.kv_format == "thd"
    rows_q = tidied[0].shape[0] if packed_q else size.batch * size.sq
    rows_kv = 0
    if len(tidied) > 1:
        rows_kv = tidied[1].shape[0] if packed_kv else size.batch * size.skv
    strides, pieces = [], []
    for t, form in zip(tidied, (spec.q_format, spec.kv_format, spec.kv_format), strict=False):
        per = 16 // t.dtype.itemsize
        b, s, h = DIMENSIONS[form]
        steps = t.row_major_strides()
        strides.append((0 if b is None else steps[b] // per, steps[s] // per, steps[h] // per))
        pieces.append(t.shape[-1] // per)
    strides += [(0, 0, 0)] * (3 - len(strides))
    pieces += [1] * (3 - len(pieces))
    fixed = (size.batch, size.sq, size.skv, *band_of(spec), int(packed_q), int(packed_kv), rows_q, rows_kv)
    grid = max(1, -(-max(rows_q, rows_kv) // 8))
    return fixed, grid, *strides, (size.heads, size.groups, *pieces), statistics_strides(spec, size)


def statistics_strides(spec: AttentionSpec, size: Sizes) -> tuple[int, int, int]:
    """Of batch, token and head."""
    return (0, size.heads, 1) if spec.q_format == "thd" else (size.heads * size.sq, 1, size.sq)


# ---------------------------------------------------------------------------------------------- the graph


def graph_spec(frame: Frame, dtype: DType, found: dict[str, Layout], **options: Any) -> GraphSpec:
    """The graph's spec: the frame's, unless an option says otherwise."""
    spec = frame.spec
    values: dict[str, Any] = {
        "backward": False,
        "fp8": False,
        "dtype": dtype.name,
        "dy_dtype": "",
        "grad_dtype": "",
        "tensors": tuple(found.items()),
        "scale": spec.scale,
        "left": spec.left,
        "right": spec.right,
        "bottom_right": frame.bottom_right,
        "padded": frame.padded,
        "softcap": spec.softcap,
        "dropout": spec.dropout,
        "deterministic": False,
        "sink": spec.softmax != "vanilla",
    }
    return GraphSpec(**{**values, **options})


def graph_of(rt: Runtime, spec: GraphSpec) -> cudnn.Graph:
    """The graph of a spec."""
    if spec.score_mod is None:
        return cudnn.graph(rt, spec, OPERANDS, spec.describe)
    # On disk a key says nothing: it may name a function whose text has changed since.
    mod = spec.score_mod
    named = replace(spec, score_mod=replace(mod, forward=None, backward=None))  # equal, and keeps no function alive
    keep = "process" if mod.key is not None else "caller"
    return cudnn.graph(rt, named, spec.operands, spec.describe, keep=keep)


#: Operands of a graph by their names: tensors, or addresses.
Named = dict[str, Tensor | int | None]


def run_graph(rt: Runtime, graph: cudnn.Graph, operands: Named) -> None:
    """Run a graph on those of these that it names: tensors, or addresses."""
    given = [operands[name] for name in graph.operands]
    cudnn.execute(rt, graph, tuple(0 if t is None else t.ptr if isinstance(t, Tensor) else t for t in given))


def scratch_tensor(rt: Runtime, shape: tuple[int, ...]) -> Tensor:
    """Memory for the time of a call: a small one of the runtime's, a big one of the allocator's."""
    dtype, nbytes = dtypes.float32, 4 * prod(shape)
    if nbytes > cudnn.KEPT_WORKSPACE:
        return rt.empty(shape, dtype)
    return Tensor(rt.workspace("attention scratch", nbytes), shape, dtype, rt.device, None)
