"""cuDNN graphs of attention: what one depends on, as plain data, and how it is put together.

cuDNN names dimensions [batch, heads, tokens, width] whatever the format; the format is in the strides. A packed (thd)
tensor has the longest length as its tokens, and an operand of offsets: where each sequence begins, in elements.

The number of a tensor in a graph is its place in `OPERANDS` plus one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from te_core.attention import DIMENSIONS, ScoreMod, bucket
from te_core.backends.cuda import cudnn
from te_core.tensor import Tensor

Four = tuple[int, int, int, int]

#: What is packed has a second operand: its offsets.
PACKED = ("q", "k", "v", "out", "stats", "dy", "dq", "dk", "dv")
SCALES = (
    "q_inverse",
    "k_inverse",
    "v_inverse",
    "s_scale",
    "s_inverse",
    "out_scale",
    "out_inverse",
    "dy_inverse",
    "dp_scale",
    "dp_inverse",
    "dq_scale",
    "dk_scale",
    "dv_scale",
)
#: Of a soft-cap: numbers in memory, since cuDNN 9.19 computes NaN with scalars that are passed by value.
CONSTANTS = ("cap", "uncap", "hidden", "reach")
AMAXES = ("s_amax", "out_amax", "dq_amax", "dk_amax", "dv_amax", "dp_amax")
OPERANDS = (
    *PACKED,
    *(f"{name}_at" for name in PACKED),
    "sum_exp",
    "bias",
    "dbias",
    "sink",
    "dsink",
    "seed",
    "offset",
    "len_q",
    "len_kv",
    "k_pages",
    "v_pages",
    *SCALES,
    *AMAXES,
    *CONSTANTS,
)
UIDS = {name: number + 1 for number, name in enumerate(OPERANDS)}


def written_by(operands: Sequence[str]) -> frozenset[str]:
    """Of a graph's tensors, those that a run writes."""
    results = ("dq", "dk", "dv", "dbias", "dsink") if "dq" in operands else ("out", "stats", "sum_exp")
    return frozenset(operands) & {*results, *AMAXES}


#: Sequences of a packed graph are a power of two, at least so many: an empty one costs a few idle blocks.
FEWEST_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor as cuDNN sees it."""

    dim: Four
    stride: Four
    packed: int = 0  # elements from a token to the next, where offsets say where sequences begin


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor for a `ScoreMod`: "forward" or "backward", a dot, and what its function calls it."""

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """All that a graph depends on."""

    backward: bool
    fp8: bool
    dtype: str  # of q, k, v and the output
    dy_dtype: str
    grad_dtype: str
    tensors: tuple[tuple[str, Layout], ...]  # those of PACKED that take part
    scale: float
    left: int
    right: int
    bottom_right: bool
    padded: bool
    softcap: float
    dropout: float
    deterministic: bool
    alibi: bool = False
    bias: tuple[str, Four] | None = None  # dtype and shape
    bias_grad: bool = False
    sink: bool = False
    sink_grad: bool = False
    maxima: bool = False  # the largest score and the sum of exponentials in place of the statistics
    tokens: tuple[int, int] | None = None  # packed, backward: no more tokens than these
    pages: tuple[int, int, int] | None = None  # batch, pages a sequence, the longest cache
    score_mod: ScoreMod | None = None
    given: tuple[Given, ...] = ()  # the tensors of its functions

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the graph's tensors, in the order of their numbers."""
        return (*OPERANDS, *(t.name for t in self.given))

    def describe(self, made: Any) -> Callable[[], None]:
        """Put the operations into an empty graph; call the result when it is built."""
        maker = _Maker(self, made)
        maker.make()
        return maker.release

    @property
    def reach(self) -> int:
        """Of the one bound there is: how far ahead of a query's own number a key may be (behind it, for a left one)."""
        found = dict(self.tensors)
        shift = found["k"].dim[2] - found["q"].dim[2] if self.bottom_right else 0
        return self.right + shift if self.right >= 0 else self.left - shift

    def constants(self) -> tuple[float, ...]:
        """The values of `CONSTANTS`; none without a soft-cap."""
        return (self.softcap, 1.0 / self.softcap, -1e30, float(self.reach)) if self.softcap else ()


def layout(t: Tensor, form: str, batch: int, longest: int) -> Layout:
    """A tensor of a format; `batch` and `longest` are the packed graph's."""
    b, s, h = DIMENSIONS[form]
    extent = max((n * step for n, step in zip(t.shape, t.row_major_strides(), strict=True) if n > 1), default=1)
    # The stride of a single one means nothing, and torch puts anything there. That of a single head is the width: cuDNN
    # reads packed sequences wrong where it is more than a token's.
    strides = [step if n > 1 else extent for n, step in zip(t.shape, t.row_major_strides(), strict=True)]
    if t.shape[h] == 1:
        strides[h] = t.shape[-1]
    if b is None:
        step = strides[s]
        return Layout((batch, t.shape[h], longest, t.shape[-1]), (longest * step, strides[h], step, 1), step)
    return Layout((t.shape[b], t.shape[h], t.shape[s], t.shape[-1]), (strides[b], strides[h], strides[s], 1))


def statistics(heads: int, form: str, batch: int, longest: int) -> Layout:
    """The statistics of a forward: [b, h, s], packed [t, h]."""
    if form == "thd":
        return Layout((batch, heads, longest, 1), (longest * heads, 1, heads, 1), heads)
    return Layout((batch, heads, longest, 1), (heads * longest, longest, 1, 1))


def sequences(batch: int) -> int:
    """How many sequences the graph for `batch` packed ones has."""
    return bucket(batch, FEWEST_SEQUENCES)


# ---------------------------------------------------------------------------------------------- making


class _Maker:
    """One graph in the making."""

    def __init__(self, spec: GraphSpec, made: Any) -> None:
        self.spec, self.made, self.fe = spec, made, cudnn.frontend()
        types = self.fe.types
        self.types = {
            "float32": types.FLOAT,
            "bfloat16": types.BFLOAT16,
            "float16": types.HALF,
            "int32": types.INT32,
            "int64": types.INT64,
            "float8_e4m3": types.FP8_E4M3,
            "float8_e5m2": types.FP8_E5M2,
        }
        self.layouts = dict(spec.tensors)
        self._before_tanh: Any = None
        self._user: ScoreMod | None = spec.score_mod

    def make(self) -> None:
        if self.spec.fp8:
            self._fp8_backward() if self.spec.backward else self._fp8_forward()
        else:
            self._backward() if self.spec.backward else self._forward()

    def release(self) -> None:
        """Let go of the graph, which itself keeps the functions that modify scores, and of a user's."""
        self.made = self._before_tanh = self._user = None
        self.spec = replace(self.spec, score_mod=None)

    # ------------------------------------------------------------------------------ tensors

    def _tensor(
        self,
        name: str,
        dim: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: str,
        offsets: Any = None,
        number: int | None = None,
    ) -> Any:
        return self.made._make_tensor(
            dim=list(dim),
            stride=list(stride),
            data_type=self.types[dtype],
            is_virtual=False,
            is_pass_by_value=False,
            ragged_offset=offsets,
            reordering_type=self.fe.module.tensor_reordering.NONE,
            name=name,
            uid=number or UIDS[name],
        )

    def _dense(self, name: str, dim: Four, dtype: str) -> Any:
        _, h, s, d = dim
        return self._tensor(name, dim, (h * s * d, s * d, d, 1), dtype)

    def _number(self, name: str, dtype: str = "float32") -> Any:
        return self._dense(name, (1, 1, 1, 1), dtype)

    def _offsets(self, name: str) -> Any:
        found = self.layouts[name]
        return self._dense(f"{name}_at", (found.dim[0] + 1, 1, 1, 1), "int64") if found.packed else None

    def _input(self, name: str, dtype: str) -> Any:
        found = self.layouts[name]
        return self._tensor(name, found.dim, found.stride, dtype, self._offsets(name))

    def _output(self, made: Any, name: str, dtype: str) -> Any:
        found = self.layouts[name]
        made.set_output(True).set_uid(UIDS[name]).set_name(name)
        made.set_dim(list(found.dim)).set_stride(list(found.stride)).set_data_type(self.types[dtype])
        offsets = self._offsets(name)
        if offsets is not None:
            made.set_ragged_offset(offsets)
        return made

    def _number_output(self, made: Any, name: str) -> None:
        made.set_output(True).set_uid(UIDS[name]).set_name(name).set_data_type(self.types["float32"])
        made.set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])

    # ------------------------------------------------------------------------------ options

    def _lengths(self) -> dict[str, Any]:
        if not self.spec.padded:
            return {}
        batch = self.layouts["q"].dim[0]
        q, kv = (self._dense(name, (batch, 1, 1, 1), "int32") for name in ("len_q", "len_kv"))
        return {"use_padding_mask": True, "seq_len_q": q, "seq_len_kv": kv}

    def _band(self, prefix: str) -> dict[str, Any]:
        spec, alignment = self.spec, self.fe.module.diagonal_alignment
        if spec.softcap or (spec.left < 0 and spec.right < 0):
            return {}
        found = {"diagonal_alignment": alignment.BOTTOM_RIGHT if spec.bottom_right else alignment.TOP_LEFT}
        if spec.left >= 0:
            found[f"{prefix}left_bound"] = spec.left + 1  # cuDNN counts the diagonal
        if spec.right >= 0:
            found[f"{prefix}right_bound"] = spec.right
        return found

    def _dropout(self) -> dict[str, Any]:
        if not self.spec.dropout:
            return {}
        return {"dropout": (self.spec.dropout, self._number("seed", "int64"), self._number("offset", "int64"))}

    def _sink(self) -> dict[str, Any]:
        heads = self.layouts["q"].dim[1]
        return {"sink_token": self._dense("sink", (1, heads, 1, 1), "float32")} if self.spec.sink else {}

    def _options(self) -> dict[str, Any]:
        band = self._band("diagonal_band_")
        return {**self._lengths(), **band, **self._dropout(), **self._sink(), **self._added()}

    def _added(self) -> dict[str, Any]:
        """What is added to the scores."""
        found: dict[str, Any] = {"use_alibi_mask": True} if self.spec.alibi else {}
        if self.spec.bias is not None:
            dtype, shape = self.spec.bias
            found["bias"] = self._dense("bias", shape, dtype)
        return found

    # ------------------------------------------------------------------------------ bfloat16 and float16

    def _forward(self) -> None:
        spec, dtype = self.spec, self.spec.dtype
        options = {
            **self._lengths(),
            **self._band("diagonal_band_"),
            **self._dropout(),
            **self._sink(),
            **self._added(),
        }
        if spec.softcap:
            options["score_mod"] = self._score_mod
        if spec.score_mod is not None:
            options["score_mod"] = self._user_forward
        if spec.maxima:
            found, offsets = self.layouts["stats"], self._offsets("stats")
            for option, name in (("score_max", "stats"), ("score_sum_exp", "sum_exp")):
                options[option] = self._tensor(name, found.dim, found.stride, "float32", offsets)
                options[option].set_output(True)
        if spec.pages is not None:
            batch, pages, longest = spec.pages
            for name in ("k", "v"):
                table = self._dense(f"{name}_pages", (batch, 1, pages, 1), "int32")
                options[f"paged_attention_{name}_table"] = table
            options["paged_attention_max_seq_len_kv"] = longest
        statistics = not spec.maxima and "stats" in self.layouts
        out, stats = self.made.sdpa(
            q=self._input("q", dtype),
            k=self._input("k", dtype),
            v=self._input("v", dtype),
            attn_scale=spec.scale,
            generate_stats=statistics,
            **options,
        )
        self._output(out, "out", dtype)
        if statistics:
            self._output(stats, "stats", "float32")

    def _backward(self) -> None:
        spec, dtype = self.spec, self.spec.dtype
        options = {
            **self._lengths(),
            **self._band("diagonal_band_"),
            **self._dropout(),
            **self._sink(),
            **self._added(),
        }
        if spec.softcap:
            options["score_mod"] = self._score_mod
            options["score_mod_bprop"] = self._score_mod_backward
        if spec.score_mod is not None:
            options["score_mod"] = self._user_forward
            if spec.score_mod.backward is not None:  # else cuDNN derives it, where it can
                options["score_mod_bprop"] = self._user_backward
        if spec.bias_grad and spec.bias is not None:
            options["dBias"] = self._dense("dbias", spec.bias[1], spec.bias[0])
        if spec.sink_grad:
            options["dSink_token"] = self._dense("dsink", (1, self.layouts["q"].dim[1], 1, 1), "float32")
        if spec.tokens is not None:
            options["max_total_seq_len_q"], options["max_total_seq_len_kv"] = spec.tokens
        grads = self.made.sdpa_backward(
            q=self._input("q", dtype),
            k=self._input("k", dtype),
            v=self._input("v", dtype),
            o=self._input("out", dtype),
            dO=self._input("dy", dtype),
            stats=self._input("stats", "float32"),
            attn_scale=spec.scale,
            use_deterministic_algorithm=spec.deterministic,
            **options,
        )
        for made, name in zip(grads, ("dq", "dk", "dv"), strict=True):
            self._output(made, name, dtype)

    # ------------------------------------------------------------------------------ softcap

    def _score_mod(self, graph: Any, scores: Any) -> Any:
        """softcap, and the band, which cuDNN leaves to us where scores are modified."""
        self._before_tanh = graph.mul(a=scores, b=self._number("uncap"))
        return self._masked(graph, graph.mul(a=graph.tanh(input=self._before_tanh), b=self._number("cap")))

    def _score_mod_backward(self, graph: Any, grad: Any) -> Any:
        before, self._before_tanh = self._before_tanh, None
        return graph.tanh_backward(loss=grad, input=before)

    def _masked(self, graph: Any, scores: Any) -> Any:
        """Far less where a key is not seen: by its distance from the band. (A select takes no number from memory.)"""
        spec, types = self.spec, self.fe.types
        if spec.left < 0 and spec.right < 0:
            return scores
        row, column = (
            graph.gen_index(input=scores, axis=axis, compute_data_type=types.FLOAT).set_data_type(types.FLOAT)
            for axis in (2, 3)
        )
        ahead = graph.sub(a=column, b=row) if spec.right >= 0 else graph.sub(a=row, b=column)
        if self.spec.reach:
            ahead = graph.sub(a=ahead, b=self._number("reach"))
        return graph.add(a=scores, b=graph.mul(a=graph.relu(input=ahead), b=self._number("hidden")))

    # ------------------------------------------------------------------------------ a user's functions

    def _user_forward(self, graph: Any, scores: Any) -> Any:
        assert self._user is not None and self._user.forward is not None
        return self._user.forward(graph, scores, self._given("forward"))

    def _user_backward(self, graph: Any, grad: Any) -> Any:
        assert self._user is not None and self._user.backward is not None
        return self._user.backward(graph, grad, self._given("backward"))

    def _given(self, direction: str) -> dict[str, Any]:
        """The tensors of one of the functions, by the names that it knows."""
        found = {}
        for number, t in enumerate(self.spec.given, len(OPERANDS) + 1):
            side, _, name = t.name.partition(".")
            if side == direction:
                found[name] = self._tensor(t.name, t.dim, t.stride, t.dtype, number=number)
        return found

    # ------------------------------------------------------------------------------ FP8

    def _fp8_forward(self) -> None:
        spec, dtype = self.spec, self.spec.dtype
        out, stats, s_amax, out_amax = self.made.sdpa_fp8(
            q=self._input("q", dtype),
            k=self._input("k", dtype),
            v=self._input("v", dtype),
            descale_q=self._number("q_inverse"),
            descale_k=self._number("k_inverse"),
            descale_v=self._number("v_inverse"),
            descale_s=self._number("s_inverse"),
            scale_s=self._number("s_scale"),
            scale_o=self._number("out_scale"),
            attn_scale=spec.scale,
            generate_stats="stats" in self.layouts,
            **self._lengths(),
            **self._band(""),
            **self._dropout(),
            **self._sink(),
        )
        self._output(out, "out", dtype)
        if "stats" in self.layouts:
            self._output(stats, "stats", "float32")
        self._number_output(s_amax, "s_amax")
        self._number_output(out_amax, "out_amax")

    def _fp8_backward(self) -> None:
        spec, dtype = self.spec, self.spec.dtype
        results = self.made.sdpa_fp8_backward(
            q=self._input("q", dtype),
            k=self._input("k", dtype),
            v=self._input("v", dtype),
            o=self._input("out", dtype),
            dO=self._input("dy", spec.dy_dtype),
            stats=self._input("stats", "float32"),
            descale_q=self._number("q_inverse"),
            descale_k=self._number("k_inverse"),
            descale_v=self._number("v_inverse"),
            descale_o=self._number("out_inverse"),
            descale_dO=self._number("dy_inverse"),
            descale_s=self._number("s_inverse"),
            descale_dP=self._number("dp_inverse"),
            scale_s=self._number("s_scale"),
            scale_dQ=self._number("dq_scale"),
            scale_dK=self._number("dk_scale"),
            scale_dV=self._number("dv_scale"),
            scale_dP=self._number("dp_scale"),
            attn_scale=spec.scale,
            use_deterministic_algorithm=spec.deterministic,
            **self._lengths(),
            **self._band(""),
        )
        for made, name in zip(results[:3], ("dq", "dk", "dv"), strict=True):
            self._output(made, name, spec.grad_dtype)
        for made, name in zip(results[3:7], ("dq_amax", "dk_amax", "dv_amax", "dp_amax"), strict=True):
            self._number_output(made, name)
