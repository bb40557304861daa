"""Attention over ranks in one process: what each rank holds of sequences, and what it makes, put together again.

A `Case` names a mode, sizes, how tokens lie and a mask. `Batch` has its sequences as arrays in the order of tokens, NaN
where a sequence has none, and gives each rank its part; `run` calls the layer on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.layers import attention
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds
from te_core.layers.communicator import InProcessCommunicator, InProcessRanks, as_bytes
from te_core.layers.context.schedule import Context
from te_core.runtime import Runtime
from te_core.tensor import CPU, Tensor
from tests.core.attention_cases import NUMPY
from tests.reference import attention as reference

Array = np.ndarray[Any, Any]
RT = Runtime.cpu()

#: Of each sequence the tokens of a chunk, and its length in parts of the whole: chunks that are not filled, one token,
#: none.
LENGTHS = {
    "full": ((3, 1.0), (3, 1.0)),
    "odd": ((3, 0.7), (3, 1.0), (3, 0.31)),
    "few": ((2, 0.0), (2, 0.1), (2, 0.95)),
    "one": ((2, "one"), (2, 0.5)),
}


@dataclass(frozen=True)
class Case:
    """One attention over ranks."""

    mode: str = "p2p"
    size: int = 2
    inner: int = 1
    form: str = "sbhd"
    mask: str = "causal"
    shared: int = 2  # query heads to a key head
    lengths: str = "full"
    dtype: str = "fp32"
    softmax: str = "vanilla"
    window: tuple[int, int] | None = None
    cross: bool = False  # keys of other sequences
    packing: str = "separate"
    max_logit: bool = False
    recompute: bool = False
    dropout: float = 0.0
    bias: str = "no_bias"
    bias_shape: tuple[int, int] = (1, 1)  # of batch and heads
    width: int = 8
    tokens: int = 0  # of all sequences, in the place of `lengths`
    packed: tuple[tuple[int, int], ...] = ()  # chunk and length of each, in the place of `lengths`
    softcap: float = 0.0
    value_width: int = 0  # in the place of `width`
    tail: int = 0  # thd: tokens of no sequence at the end of each rank's
    few_groups: int = 0  # in the place of one or more for each rank
    seed: int = 0

    @property
    def context(self) -> Context:
        return Context(self.mode, self.size, self.inner)

    @property
    def groups(self) -> int:
        return self.few_groups or max(2, self.context.heads)

    @property
    def heads(self) -> int:
        return max(self.groups, self.context.heads) * self.shared

    @property
    def d_v(self) -> int:
        return self.value_width or self.width

    @property
    def padded(self) -> bool:
        return "padding" in self.mask or self.form == "thd"

    @property
    def bounds(self) -> tuple[int, int]:
        return self.window or (-1, 0 if "causal" in self.mask else -1)

    @property
    def core(self) -> AttentionSpec:
        left, right = self.bounds
        return AttentionSpec(
            1.3 * self.width**-0.5,
            q_format=self.form,
            kv_format=self.form,
            left=left,
            right=right,
            padded=self.padded,
            softmax=self.softmax,
            softcap=self.softcap,
            dropout=self.dropout,
            max_logit=self.max_logit,
            bias=self.bias,
            max_q=max(b.padded for b in self.sequences("q")) if self.form == "thd" else 0,
            max_kv=max(b.padded for b in self.sequences("kv")) if self.form == "thd" else 0,
        )

    def spec(self, context: Context | None = None) -> AttentionLayerSpec:
        needs = AttentionNeeds(True, True, True, self.bias == "post_scale_bias", self.softmax == "learnable")
        return AttentionLayerSpec(
            self.core,
            self.heads,
            self.groups,
            self.width,
            self.d_v,
            needs,
            packing=self.packing,
            interleaved=self.packing == "qkv",
            recompute=self.recompute,
            context=context,
        )

    def sequences(self, side: str) -> list[Tokens]:
        """Chunks of dense formats are of one length."""
        if self.packed:
            return [Tokens(chunk, 2 * self.size * chunk, length) for chunk, length in self.packed]
        if self.tokens:
            return [Tokens(self.tokens // (2 * self.size), self.tokens, self.tokens)]
        found = []
        for i, (chunk, part) in enumerate(LENGTHS[self.lengths]):
            if side == "kv" and self.cross:
                chunk += 2
            if self.form == "thd":
                chunk += i
            padded = 2 * self.size * chunk
            length = 1 if part == "one" else round(padded * float(part))
            found.append(Tokens(chunk, padded, length if self.padded else padded))
        return found


class Tokens(NamedTuple):
    """The tokens of a chunk, of all of them, and those that are valid."""

    chunk: int
    padded: int
    length: int


class Side:
    """Where the tokens of queries, or of keys, lie, as a whole and on ranks."""

    def __init__(self, form: str, size: int, sequences: Sequence[Tokens], tail: int = 0) -> None:
        self.form, self.size, self.sequences, self.tail = form, size, list(sequences), tail
        self.longest = max((s.padded for s in sequences), default=0)
        self.lengths = np.array([s.length for s in sequences])
        self.cu = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        self.cu_padded = np.concatenate([[0], np.cumsum([s.padded for s in sequences])]).astype(np.int32)

    def values(self, random: np.random.Generator, heads: int, d: int, dtype: str) -> list[Array]:
        """[padded, heads, d] of each sequence; zeros where it has no token."""
        made = []
        for s in self.sequences:
            t = random.standard_normal((s.padded, heads, d)).astype(NUMPY[dtype])
            t[s.length :] = 0
            made.append(t)
        return made

    def spoiled(self, values: Sequence[Array]) -> list[Array]:
        """The same with NaN where there is no token."""
        made = [t.copy() for t in values]
        for t, s in zip(made, self.sequences, strict=True):
            t[s.length :] = np.nan
        return made

    def canonical(self, values: Sequence[Array]) -> Array:
        """[b, h, s, d], as the reference takes it."""
        made = np.zeros((len(values), *(values[0].shape[1], self.longest, values[0].shape[2])))
        for i, t in enumerate(values):
            made[i, :, : len(t)] = t.swapaxes(0, 1)
        return made

    def on_rank(self, values: Sequence[Array], rank: int) -> Array:
        """A rank's tokens in their format."""
        parts = [self._own(t, s.chunk, rank) for t, s in zip(values, self.sequences, strict=True)]
        if self.form == "thd":
            return np.concatenate([*parts, np.full((self.tail, *parts[0].shape[1:]), np.nan, parts[0].dtype)])
        return np.ascontiguousarray(np.stack(parts, axis=1 if self.form == "sbhd" else 0))

    def whole(self, values: Sequence[Array]) -> Array:
        """All tokens in their format."""
        if self.form == "thd":
            return np.concatenate(values)
        return np.ascontiguousarray(np.stack(values, axis=1 if self.form == "sbhd" else 0))

    def _own(self, t: Array, chunk: int, rank: int) -> Array:
        other = 2 * self.size - 1 - rank
        return np.concatenate([t[c * chunk : (c + 1) * chunk] for c in (rank, other)])

    def together(self, ranks: Sequence[Array]) -> list[Array]:
        """Of each sequence its tokens [padded, ..], from what the ranks made of theirs."""
        found, start = [], 0
        for i, s in enumerate(self.sequences):
            made = np.zeros((s.padded, *ranks[0].shape[1 if self.form == "thd" else 2 :]), ranks[0].dtype)
            for rank, t in enumerate(ranks):
                if self.form == "thd":
                    own = t[start : start + 2 * s.chunk]
                else:
                    own = t[:, i] if self.form == "sbhd" else t[i]
                for half, chunk in enumerate((rank, 2 * self.size - 1 - rank)):
                    made[chunk * s.chunk : (chunk + 1) * s.chunk] = own[half * s.chunk : (half + 1) * s.chunk]
            start += 2 * s.chunk
            found.append(made)
        if self.form == "thd":
            assert not any(t[start:].astype(bool).any() for t in ranks), "tokens of no sequence"
        return found

    def apart(self, t: Array) -> list[Array]:
        """Of each sequence its tokens, from a whole tensor in its format."""
        if self.form == "thd":
            return [t[a:b] for a, b in zip(self.cu_padded, self.cu_padded[1:], strict=False)]
        return [t[:, i] if self.form == "sbhd" else t[i] for i in range(len(self.sequences))]


class Made(NamedTuple):
    """Results: sequences as [padded, h, d] for the output and the gradients of q, k and v; the rest as it came."""

    out: list[Array]
    dq: list[Array]
    dk: list[Array]
    dv: list[Array]
    dsink: Array | None = None
    max_logit: Array | None = None
    dbias: Array | None = None


class Batch:
    """A case's sequences, and what is computed of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.q_side = Side(case.form, case.size, case.sequences("q"), case.tail)
        self.kv_side = Side(case.form, case.size, case.sequences("kv"), case.tail)
        random = np.random.default_rng(case.seed)
        sizes = (self.q_side, case.heads, case.width), (self.kv_side, case.groups, case.width)
        values = [*sizes, (self.kv_side, case.groups, case.d_v)]
        self.q, self.k, self.v = (side.values(random, n, d, case.dtype) for side, n, d in values)
        self.dy = self.q_side.values(random, case.heads, case.d_v, case.dtype)
        self.sink = np.linspace(-2, 4, case.heads).astype(np.float32) if case.softmax == "learnable" else None
        self.slopes = np.linspace(0.05, 0.4, case.heads).astype(np.float32) if case.bias == "alibi" else None
        self.rng = np.array([7, 3], np.int64) if case.dropout else None
        self.bias = None
        if case.bias == "post_scale_bias":
            shape = (*case.bias_shape, self.q_side.longest, self.kv_side.longest)
            self.bias = random.standard_normal(shape).astype(NUMPY[case.dtype])

    def reference(self) -> Made:
        """In float64, of whole sequences."""
        case, (left, right) = self.case, self.case.bounds
        problem = reference.Problem(
            scale=case.core.scale,
            left=left,
            right=right,
            len_q=self.q_side.lengths if case.padded else None,
            len_kv=self.kv_side.lengths if case.padded else None,
            softmax=case.softmax,
            sink=self.sink,
            slopes=self.slopes,
            softcap=case.softcap,
            bias=self.bias,
        )
        if case.form == "thd":  # not all are of the longest one's length
            problem = replace(problem, len_q=self.q_side.lengths, len_kv=self.kv_side.lengths)
        q, dy = (self.q_side.canonical(t) for t in (self.q, self.dy))
        k, v = (self.kv_side.canonical(t) for t in (self.k, self.v))
        with np.errstate(invalid="ignore"):
            f, g = reference.forward(q, k, v, problem), reference.backward(dy, q, k, v, problem)
        parts = [
            [t[i].swapaxes(0, 1)[: s.padded] for i, s in enumerate(side.sequences)]
            for side, t in ((self.q_side, f.out), (self.q_side, g.dq), (self.kv_side, g.dk), (self.kv_side, g.dv))
        ]
        return Made(*parts, g.dsink, f.max_logit, g.dbias)

    def inputs(self, rank: int | None) -> AttentionInputs:
        """What the layer is given on a rank; None: of whole sequences."""
        case, sides = self.case, (self.q_side, self.kv_side, self.kv_side)
        values = [
            side.spoiled(t) if case.padded else t for side, t in zip(sides, (self.q, self.k, self.v), strict=True)
        ]
        q, k, v = (
            side.whole(t) if rank is None else side.on_rank(t, rank) for side, t in zip(sides, values, strict=True)
        )
        a, b, c = pack(case, q, k, v)
        lengths: list[Any] = [None] * 4
        if case.padded:
            packed = case.form == "thd"
            lengths = [self.q_side.cu, self.kv_side.cu, *([self.q_side.cu_padded, self.kv_side.cu_padded] * packed)]
            lengths += [None] * (4 - len(lengths))
        bias = self.bias if self.bias is None or rank is None else self._rows_of(self.bias, rank)
        given = (bias, self.slopes, self.sink, *lengths, None, None, self.rng)
        return AttentionInputs(*(None if t is None else RT.tensor(t) for t in (a, b, c, *given)))

    def _rows_of(self, bias: Array, rank: int) -> Array:
        """A rank's queries of a bias."""
        parts = np.split(bias, 2 * self.case.size, axis=2)
        return np.ascontiguousarray(np.concatenate([parts[rank], parts[2 * self.case.size - 1 - rank]], axis=2))

    def gradient(self, rank: int | None) -> Tensor:
        """That of the output."""
        dy = self.q_side.spoiled(self.dy) if self.case.padded else self.dy
        t = self.q_side.whole(dy) if rank is None else self.q_side.on_rank(dy, rank)
        return RT.tensor(t.reshape(*t.shape[:-2], -1))

    def alone(self) -> Made:
        """The layer without ranks."""
        return self.whole_results(step(self.case, self, None, None))

    def whole_results(self, results: dict[str, Any]) -> Made:
        """Those of whole sequences."""
        return self._made([results], lambda side, parts: side.apart(parts[0]))

    def together(self, results: Sequence[dict[str, Any]]) -> Made:
        """The ranks' results put together; a gradient of a sink is their sum."""
        return self._made(results, lambda side, parts: side.together(parts))

    def _made(self, results: Sequence[dict[str, Any]], join: Callable[[Side, list[Array]], list[Array]]) -> Made:
        sides = (self.q_side, self.q_side, self.kv_side, self.kv_side)
        parts = [
            join(side, [r[name] for r in results]) for side, name in zip(sides, ("out", "dq", "dk", "dv"), strict=True)
        ]
        dbias = None
        if self.bias is not None and len(results) > 1:
            halves = [np.split(r["dbias"], 2, axis=2) for r in results]
            dbias = np.concatenate([h[0] for h in halves] + [h[1] for h in reversed(halves)], axis=2)
        dsink = None if results[0]["dsink"] is None else np.sum([r["dsink"] for r in results], axis=0)
        return Made(*parts, dsink, results[0]["max_logit"], dbias)


def pack(case: Case, q: Array, k: Array, v: Array) -> tuple[Array, Array | None, Array | None]:
    """q, k and v as the case packs them."""
    if case.packing == "separate":
        return q, k, v
    lead = q.shape[:-2]
    if case.packing == "kv":
        return q, np.concatenate([k, v], axis=-2).reshape(*lead, -1), None
    q = q.reshape(*lead, case.groups, case.heads // case.groups, case.width)  # interleaved
    return np.concatenate([q, k[..., None, :], v[..., None, :]], axis=-2).reshape(*lead, -1), None, None


def unpack(case: Case, a: Array, b: Array | None, c: Array | None) -> tuple[Array, Array, Array]:
    """The inverse, of gradients."""
    if b is not None and c is not None:
        return a, b, c
    h, g, d = case.heads, case.groups, case.width
    if b is not None:
        b = b.reshape(*b.shape[: 2 if case.form != "thd" else 1], 2 * g, d)
        return a, b[..., :g, :], b[..., g:, :]
    lead = a.shape[: 2 if case.form != "thd" else 1]
    t = a.reshape(*lead, g, h // g + 2, d)
    return t[..., :-2, :].reshape(*lead, h, d), t[..., -2, :], t[..., -1, :]


class Ranks:
    """The communicators of each rank of a case, and their logs."""

    def __init__(self, case: Case, make: Callable[[InProcessRanks, int], Any] = InProcessRanks.of) -> None:
        self.case, context = case, case.context
        self.inside = [InProcessRanks(context.heads) for _ in range(context.ring)]
        self.outside = [InProcessRanks(context.ring) for _ in range(context.heads)]
        self.driver = InProcessRanks(case.size)
        self.comms = []
        for rank in range(case.size):
            outer, inner = divmod(rank, context.heads)
            both = (self.inside[outer], inner), (self.outside[inner], outer)
            self.comms.append(tuple(make(ranks, i) for ranks, i in both if ranks.size > 1))

    def run(self, function: Callable[[int, Any], Any]) -> list[Any]:
        """function(rank, its communicators), on all ranks."""
        return self.driver.run(lambda comm: function(comm.rank, self.comm(comm.rank)))

    def comm(self, rank: int) -> Any:
        comms = self.comms[rank]
        return comms[0] if len(comms) == 1 else comms

    def log(self, rank: int) -> list[tuple[str, int]]:
        """What a rank has handed over: inside of its group, then around the ring."""
        outer, inner = divmod(rank, self.case.context.heads)
        return [*self.inside[outer].log[inner], *self.outside[inner].log[outer]]


Functions = tuple[Callable[..., Any], Callable[..., Any]]


def plain(case: Case, context: Context | None) -> Functions:
    """The layer's two functions with a spec."""
    spec = case.spec(context)
    return (
        lambda *a, **o: attention.forward(*a, spec=spec, **o),
        lambda *a, **o: attention.backward(*a, spec=spec, **o),
    )


def step(case: Case, batch: Batch, rank: int | None, comm: Any, functions: Functions | None = None) -> dict[str, Any]:
    """One rank's forward and backward (None: without ranks), its results as arrays."""
    forward, backward = functions or plain(case, None if rank is None else case.context)
    options = {} if rank is None else {"comm": comm}
    outputs, saved = forward(RT, *batch.inputs(rank), **options)
    grads = backward(RT, batch.gradient(rank), None, saved, **options)
    a, b, c, dbias, _, dsink = (None if t is None else RT.numpy(t) for t in grads)
    out = RT.numpy(outputs[0])
    dq, dk, dv = unpack(case, a, b, c)
    return {
        "out": out.reshape(*out.shape[:-1], case.heads, case.d_v),
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "dsink": dsink,
        "dbias": dbias,
        "max_logit": RT.numpy(outputs[1]) if len(outputs) > 1 else None,
        "saved": saved,
    }


def run(case: Case, batch: Batch | None = None, ranks: Ranks | None = None) -> tuple[Made, Ranks]:
    """The layer on all ranks."""
    batch, ranks = batch or Batch(case), ranks or Ranks(case)
    return batch.together(ranks.run(lambda rank, comm: step(case, batch, rank, comm))), ranks


class LateCommunicator(InProcessCommunicator):
    """What it brings arrives when it is waited for; until then NaN stands there, and what goes must not change."""

    def __init__(self, ranks: InProcessRanks, rank: int, note: Callable[[str], None] | None = None) -> None:
        super().__init__(ranks, rank)
        self.note = note or (lambda what: None)

    def all_gather(self, rt: Runtime, part: Tensor, out: Tensor) -> Any:
        return self._late("all_gather", part, out, super().all_gather)

    def reduce_scatter(self, rt: Runtime, whole: Tensor, out: Tensor) -> Any:
        return self._late("reduce_scatter", whole, out, super().reduce_scatter)

    def all_to_all(self, rt: Runtime, t: Tensor, out: Tensor) -> Any:
        return self._late("all_to_all", t, out, super().all_to_all)

    def send_recv(self, rt: Runtime, t: Tensor, to: int, out: Tensor, source: int) -> Any:
        begin = super().send_recv
        return self._late("send_recv", t, out, lambda rt, given, made: begin(rt, given, to, made, source))

    def _late(self, name: str, given: Tensor, out: Tensor, begin: Callable[..., Any]) -> Any:
        self.note(f"begin {name}")
        made, sent = RT.empty(out.shape, out.dtype), RT.empty(given.shape, given.dtype)
        as_bytes(sent).numpy()[...] = as_bytes(given).numpy()  # ranks in one process hold what they were given
        begin(RT, sent, made)
        as_bytes(out).numpy()[...] = 255
        return _Late(name, given, out, made, self.note)


class _Late:
    """An operation on its way."""

    def __init__(self, name: str, given: Tensor, out: Tensor, made: Tensor, note: Callable[[str], None]) -> None:
        self.name, self.made, self.note = name, as_bytes(made).numpy(), note
        self.before = as_bytes(given).numpy().copy()
        self.places = [(t.ptr, t.nbytes, weakref.ref(t.memory)) for t in (given, out)]  # whose memory nobody else holds

    def wait(self) -> None:
        self.note(f"wait {self.name}")
        arrays = []
        for at, nbytes, memory in self.places:
            owner = memory()
            assert owner is not None, "let go of on its way"
            arrays.append(Tensor(at, (nbytes,), dtypes.uint8, CPU, owner).numpy())
        given, out = arrays
        assert np.array_equal(given, self.before), "changed on its way"
        assert (out == 255).all(), "written to before it came"
        out[...] = self.made
