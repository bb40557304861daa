"""The layers without weights of their own, attention first, as rounds of a forward and a backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.dtypes import DType
from te_core.layers import attention, attention_fp8, l2_norm, norm, residual, rope, softmax
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.norm import NormSpec
from te_core.layers.residual import AddSpec, BranchNeeds
from te_core.layers.rope import RopeSpec, SplitSpec
from te_core.ops.softmax import Band
from te_core.recipe import DelayedScaling, resolve
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.tape_cases import BF16, FP32, I32, Maker, call
from tests.core.tape_proof import Call, Round


@dataclass(frozen=True)
class Attention:
    """Attention, in the activation dtype or, with `fp8`, in FP8."""

    core: dict[str, Any] = field(default_factory=dict)
    form: str = "bshd"
    heads: int = 8
    groups: int = 8
    d: int = 64
    packing: str = "separate"
    interleaved: bool = False
    recompute: bool = False
    needs: tuple[bool, ...] = (True, True, True)
    gaps: bool = False
    bias: tuple[int, ...] = ()
    tokens: int = 256
    fp8: bool = False
    given: str = "plain"  # or quantized
    out: bool = False
    grad: bool = False
    plain_backward: bool = False
    shift: int = 0
    only: int = -1

    def specs(self) -> tuple[AttentionLayerSpec, AttentionSpec]:
        """The layer's, and that of the attention in it."""
        packed = self.form == "thd"
        longest = {"max_q": self.tokens, "max_kv": self.tokens, "padded": True} if packed else {}
        core = AttentionSpec(0.125, self.form, self.form, **{**longest, **self.core})
        needs = AttentionNeeds(*self.needs, bool(self.bias) and core.softcap == 0, core.softmax == "learnable")
        layer = AttentionLayerSpec(
            core, self.heads, self.groups, self.d, self.d, needs, self.packing, self.interleaved, self.recompute
        )
        return layer, core

    def lead(self) -> tuple[int, ...]:
        """The dimensions of tokens."""
        return {"bshd": (2, self.tokens), "sbhd": (self.tokens, 2), "thd": (2 * self.tokens,)}[self.form]

    def widths(self) -> list[tuple[int, ...]]:
        """What a token has of each input."""
        h, g, d = self.heads, self.groups, self.d
        apart = [(h, d), (g, d), (g, d)]
        if self.packing == "separate":
            return apart
        return [apart[0], (2 * g * d,)] if self.packing == "kv" else [((h + 2 * g) * d,)]

    def terms(self, make: Maker, core: AttentionSpec) -> dict[str, Tensor]:
        """What the spec asks for besides q, k and v."""
        found = {}
        if self.bias:
            found["bias"] = make(*self.bias)
        if core.bias == "alibi":
            found["slopes"] = make(self.heads, dtype=FP32)
        if core.softmax == "learnable":
            found["sink"] = make(self.heads, dtype=FP32)
        if core.dropout:
            found["rng"] = make.rng()
        if core.padded:
            names = ("cu_q", "cu_kv", *(("cu_q_padded", "cu_kv_padded") if self.gaps else ()))
            found |= {name: make(3, dtype=I32) for name in names}
        return found

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make = Maker(rt, self.shift, self.only)
        layer, core = self.specs()
        lead, width = self.lead(), self.heads * self.d
        if self.fp8:
            return self._in_fp8(make, layer, core)
        tensors: list[Any] = [make(*lead, *w) for w in self.widths()]
        inputs = AttentionInputs(*tensors, *[None] * (3 - len(tensors)), **self.terms(make, core))
        begins = call(attention, "forward", layer, *inputs, scales=None)

        def backward(outputs: Any, saved: Any) -> Call:
            return call(attention, "backward", layer, make(*lead, width), None, saved, scales=None)

        return Round(begins, backward if any(self.needs) else None)

    def _in_fp8(self, make: Maker, layer: AttentionLayerSpec, core: AttentionSpec) -> Round:
        rule = resolve(DelayedScaling(fp8_dpa=True)).attention
        assert rule is not None
        rule = replace(rule, backward=not self.plain_backward)
        spec = AttentionFp8Spec(layer, rule, BF16, self.out, self.grad)
        lead, rows, width = self.lead(), prod(self.lead()), self.heads * self.d
        tensors: list[Any] = [make(*lead, prod(w)) for w in self.widths()]
        frames: list[Any] = []
        if self.given == "quantized":
            tensors = [make.quantized((rows, prod(w)), rule.qkv, "rows") for w in self.widths()]
            frames = [make(*lead, 0, dtype=dtypes.uint8) for _ in range(2)]
        inputs = AttentionInputs(*tensors, *[None] * (3 - len(tensors)), **self.terms(make, core))
        state = {"scales": make.scales(3)}

        def backward(outputs: Any, saved: Any) -> Call:
            dy: Any = make.quantized((rows, width), rule.grad, "rows") if self.out else make(*lead, width)
            return call(attention_fp8, "backward", spec, dy, saved, **state)

        return Round(call(attention_fp8, "forward", spec, *inputs, *frames, **state), backward)


@dataclass(frozen=True)
class Norm:
    """A norm alone."""

    kind: str = "LayerNorm"
    rows: int = 48
    width: int = 64
    dtype: DType = BF16
    gamma: DType = BF16
    shift: int = 0
    only: int = -1

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make, spec = Maker(rt, self.shift, self.only), NormSpec(self.dtype, self.kind, 1e-5)
        x, gamma = make(2, self.rows // 2, self.width, dtype=self.dtype), make(self.width, dtype=self.gamma)
        beta = make(self.width, dtype=self.gamma) if "Layer" in self.kind else None
        begins = call(norm, "forward", spec, x, gamma, beta, scales=None)
        return Round(begins, lambda o, saved: call(norm, "backward", spec, make(*x.shape, dtype=x.dtype), saved))


@dataclass(frozen=True)
class L2Norm:
    """Rows divided by their length."""

    rows: int = 48
    shift: int = 0
    only: int = -1

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make, spec = Maker(rt, self.shift, self.only), l2_norm.L2NormSpec(1e-6)
        x = make(self.rows, 64)
        begins = call(l2_norm, "forward", spec, x, scales=None)
        return Round(begins, lambda o, saved: call(l2_norm, "backward", spec, make(*x.shape), saved))


@dataclass(frozen=True)
class Residual:
    """residual + dropout(x + bias)."""

    p: float = 0.1
    needs: BranchNeeds = BranchNeeds(True, True, True)
    bias: bool = True
    residual: bool = True
    shift: int = 0
    only: int = -1

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make, spec = Maker(rt, self.shift, self.only), AddSpec(self.p, self.needs)
        x = make(4, 12, 64)
        bias, stream = make(64) if self.bias else None, make(4, 12, 64) if self.residual else None
        begins = call(residual, "forward", spec, x, bias, stream, make.rng(), scales=None)
        return Round(begins, lambda o, saved: call(residual, "backward", spec, make(4, 12, 64), saved, scales=None))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, alone or (`split`) with the split of a packed projection."""

    fmt: str = "sbhd"
    interleaved: bool = False
    starts: bool = False
    strided: bool = False
    split: bool = False
    one_table: bool = False
    some: bool = False  # backward is given some of the gradients only
    shift: int = 0
    only: int = -1

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make, turn = Maker(rt, self.shift, self.only), RopeSpec(self.fmt, self.interleaved)
        lead = {"sbhd": (16, 2), "bshd": (2, 16), "thd": (32,)}[self.fmt]
        cu = make(3, dtype=I32) if self.fmt == "thd" else None
        starts = make(2, dtype=I32) if self.starts else None
        freqs = make(32, 32, dtype=FP32)
        if not self.split:
            x = make(*lead, 4, 32)
            if self.strided:  # the first quarter of wider heads
                wide = make(*lead, 4, 128)
                x = Tensor(wide.ptr, x.shape, BF16, wide.device, wide.owner, _steps((*lead, 4, 128)))
            begins = call(rope, "forward", turn, x, freqs, cu, starts, scales=None)
            return Round(begins, lambda o, saved: call(rope, "backward", turn, make(*lead, 4, 32), saved))
        spec = SplitSpec(4, 2, (32, 32, 32), self.interleaved, (8 * 32,), turn)
        tables = freqs, freqs if self.one_table else make(32, 32, dtype=FP32)
        begins = call(rope, "split_forward", spec, make(*lead, 256), *tables, cu, starts, scales=None)

        def backward(outputs: Any, saved: Any) -> Call:
            grads: list[Any] = [make(*t.shape) for t in outputs]
            if self.some:
                grads[0] = grads[2] = None
            return call(rope, "split_backward", spec, *grads, saved, scales=None)

        return Round(begins, backward)


def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Softmax:
    """Softmax of scores."""

    mask: tuple[int, ...] = ()
    sink: bool = False
    padded: bool = False
    band: Band = Band()
    columns: int = 64
    shift: int = 0
    only: int = -1

    def __call__(self, rt: Runtime) -> Round:
        """One round."""
        make = Maker(rt, self.shift, self.only)
        spec = softmax.SoftmaxSpec(0.5, self.band, self.sink)
        x = make(2, 4, 16, self.columns)
        mask = make(*self.mask, dtype=dtypes.uint8) if self.mask else None
        cu = [make(3, dtype=I32) if self.padded else None for _ in range(2)]
        sink = make(4, dtype=FP32) if self.sink else None
        begins = call(softmax, "forward", spec, x, mask, *cu, sink, scales=None)
        return Round(begins, lambda o, saved: call(softmax, "backward", spec, make(*x.shape), saved, scales=None))
