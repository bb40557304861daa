"""`Backend`: what a kind of device can do. Argument checks and outputs are the ops floor's business.

A backend is a module, `te_core/backends/<name>/backend.py`, that gathers functions of the files beside it, which are
named as in te_core/ops. A type checker compares it with this protocol (te_core/backends/every.py).

The ops floor says what specs and operands are, and what is computed. Where it takes long to decide how (products,
attention), a `plan_` function does; the plan is immutable and shared by threads (`PlanCache.find`), and what runs it
fills in addresses and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import local
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.tensor import Device, Tensor

if TYPE_CHECKING:
    from te_core.ops.activation import ActivationOperands, ActivationSpec
    from te_core.ops.attention import Asked, BackwardOperands, ForwardOperands
    from te_core.ops.attention_fp8 import Fp8BackwardOperands, Fp8ForwardOperands
    from te_core.ops.attention_merge import MergeOperands
    from te_core.ops.attention_scored import ScoredAsked, ScoredOperands
    from te_core.ops.context import ContextLengthsSpec
    from te_core.ops.context_rows import ContextRowsSpec
    from te_core.ops.gemm import GemmPlan, GemmSpec
    from te_core.ops.kv_cache import KVAppendSpec, KVCache, KVGatherSpec, KVMoveSpec
    from te_core.ops.l2_norm import L2NormOpSpec
    from te_core.ops.loss import LossOperands, LossOpSpec, LossTerms
    from te_core.ops.norm import NormGradients, NormOperands, NormOpSpec
    from te_core.ops.optimizer import AdamQuantized, AdamRule, AdamSpec, AdamTensors, SgdRule, SgdTensors
    from te_core.ops.padding_order import PaddingOrderSpec
    from te_core.ops.permute import Operands as PermuteOperands
    from te_core.ops.permute import PermuteSpec, RowMapSpec
    from te_core.ops.quantize import ScalingState
    from te_core.ops.quantize_grouped import GroupedSpec
    from te_core.ops.rope import RopeOpSpec, RopeQkvOpSpec
    from te_core.ops.softmax import SoftmaxOpSpec
    from te_core.runtime import Allocator, Runtime

Pair = tuple[Tensor | None, Tensor | None]


class Backend(Protocol):
    """The operations of one kind of device."""

    name: str

    # ------------------------------------------------------------------------------------------ where things run

    def executors(self, rt: Runtime, /) -> local:
        """Where threads keep their executors, as `executor`: one place for all runtimes that may share them."""

    def executor(self, rt: Runtime, /) -> Any:
        """An executor for the calling thread, which has none."""

    def default_allocator(self, device: Device, /) -> Allocator:
        """Where memory comes from if nobody says so."""

    def stream(self, rt: Runtime, name: str, /) -> int:
        """A stream beside the runtime's own, always the same for a name."""

    def order(self, rt: Runtime, producer: int, consumer: int, /) -> None:
        """Later work of one stream waits for the work that is on another one now."""

    # ---------------------------------------------------------------------------------------------------- bytes

    def copy_to_host(self, rt: Runtime, tensor: Tensor, /) -> np.ndarray[Any, Any]:
        """The values as a NumPy array; waits for the runtime's stream."""

    def copy_from_host(self, rt: Runtime, array: np.ndarray[Any, Any], out: Tensor, /) -> None:
        """Fill a tensor from a NumPy array."""

    def zero(self, rt: Runtime, out: Tensor, /) -> None:
        """Fill a dense tensor with zero bytes."""

    def resize(self, rt: Runtime, x: Tensor, out: Tensor, /) -> None: ...
    def transpose(self, rt: Runtime, x: Tensor, out: Tensor, /) -> None: ...

    # ------------------------------------------------------------------------------------------------- products

    def plan_gemm(self, rt: Runtime, spec: GemmSpec, /) -> GemmPlan:
        """Its plan runs itself: kernels of several kinds may stand beside one another."""

    # ------------------------------------------------------------------------------------------ narrow formats

    def quantize(
        self, rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None, /
    ) -> None: ...
    def dequantize(self, rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool, /) -> None: ...

    def quantize_block(
        self, rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None, /
    ) -> None: ...
    def dequantize_block(self, rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool, /) -> None: ...

    def quantize_mxfp8(
        self, rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None, /
    ) -> None: ...
    def dequantize_mxfp8(self, rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool, /) -> None: ...

    def quantize_nvfp4(
        self, rt: Runtime, x: Tensor, cast: Cast, out: QuantizedTensor, column_sum: Tensor | None, /
    ) -> None: ...
    def dequantize_nvfp4(self, rt: Runtime, q: QuantizedTensor, out: Tensor, columnwise: bool, /) -> None: ...

    def quantize_grouped(
        self,
        rt: Runtime,
        spec: GroupedSpec,
        parts: Sequence[Tensor],
        casts: Sequence[Cast],
        outs: Sequence[QuantizedTensor],
        column_sums: Sequence[Tensor] | None,
        /,
    ) -> None: ...

    def swizzle_scales(self, rt: Runtime, scale: Tensor, out: Tensor, transposed: bool, /) -> None: ...

    def amax(self, rt: Runtime, x: Tensor, out: Tensor, column_sum: Tensor | None, /) -> None: ...
    def amax_many(self, rt: Runtime, tensors: Sequence[Tensor], out: Tensor, /) -> None: ...
    def count_nonfinite(self, rt: Runtime, x: Tensor, out: Tensor, /) -> None: ...
    def statistics(
        self,
        rt: Runtime,
        x: Tensor,
        data: Tensor | None,
        scale: Tensor | None,
        form: Format | None,
        columnwise: bool,
        record: Tensor,
        /,
    ) -> None:
        """`data` is a copy of x that lies as x does: codes of `form` with their scales, or float32 values."""

    def plan_update(self, rt: Runtime, states: list[ScalingState], algo: str, /) -> Any: ...
    def run_update(self, rt: Runtime, plan: Any, /) -> None: ...

    # ------------------------------------------------------------------------------------------ rows of a matrix

    def norm_forward(self, rt: Runtime, spec: NormOpSpec, operands: NormOperands, /) -> None: ...
    def norm_backward(self, rt: Runtime, spec: NormOpSpec, operands: NormGradients, /) -> None: ...

    def l2_norm_forward(self, rt: Runtime, spec: L2NormOpSpec, x: Tensor, y: Tensor, eps: float, /) -> None: ...
    def l2_norm_backward(
        self, rt: Runtime, spec: L2NormOpSpec, dy: Tensor, x: Tensor, dx: Tensor, eps: float, /
    ) -> None: ...

    def activation_forward(self, rt: Runtime, spec: ActivationSpec, operands: ActivationOperands, /) -> None: ...
    def activation_backward(self, rt: Runtime, spec: ActivationSpec, operands: ActivationOperands, /) -> None: ...

    def column_sum(self, rt: Runtime, x: Tensor, out: Tensor, /) -> None: ...
    def add(self, rt: Runtime, a: Tensor, b: Tensor, out: Tensor, /) -> None: ...
    def rank_sum(self, rt: Runtime, parts: Tensor, out: Tensor, /) -> None: ...
    def bias_dropout_add(
        self,
        rt: Runtime,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor,
        p: float,
        rng: Tensor | None,
        site: int,
        /,
    ) -> None: ...
    def bias_dropout_add_backward(
        self, rt: Runtime, dy: Tensor, dx: Tensor, p: float, rng: Tensor | None, site: int, column_sum: Tensor | None, /
    ) -> None: ...

    def loss_rows(self, rt: Runtime, spec: LossOpSpec, terms: LossTerms, operands: LossOperands, /) -> None: ...
    def loss_values(
        self, rt: Runtime, terms: LossTerms, total: str, facts: Tensor, target: Tensor, losses: Tensor, both: Tensor, /
    ) -> None: ...

    # ------------------------------------------------------------------------------------------------ attention

    def plan_attention_forward(self, rt: Runtime, asked: Asked, /) -> Any: ...
    def attention_forward(self, rt: Runtime, plan: Any, operands: ForwardOperands, /) -> None: ...
    def plan_attention_backward(self, rt: Runtime, asked: Asked, /) -> Any: ...
    def attention_backward(self, rt: Runtime, plan: Any, operands: BackwardOperands, /) -> None: ...

    def plan_attention_fp8_forward(self, rt: Runtime, asked: Asked, /) -> Any: ...
    def attention_fp8_forward(self, rt: Runtime, plan: Any, operands: Fp8ForwardOperands, /) -> None: ...
    def plan_attention_fp8_backward(self, rt: Runtime, asked: Asked, /) -> Any: ...
    def attention_fp8_backward(self, rt: Runtime, plan: Any, operands: Fp8BackwardOperands, /) -> None: ...
    def plan_attention_scored(self, rt: Runtime, asked: ScoredAsked, /) -> Any: ...
    def attention_scored(self, rt: Runtime, plan: Any, operands: ScoredOperands, /) -> None: ...
    def scale_pairs(
        self, rt: Runtime, scales: Sequence[Tensor], places: Sequence[Tensor | None], out: Tensor, /
    ) -> None: ...

    def softmax_forward(
        self,
        rt: Runtime,
        spec: SoftmaxOpSpec,
        x: Tensor,
        mask: Tensor | None,
        lengths: Pair,
        sinks: Pair,
        out: Tensor,
        scale: float,
        /,
    ) -> None: ...
    def softmax_backward(
        self,
        rt: Runtime,
        spec: SoftmaxOpSpec,
        dy: Tensor,
        y: Tensor,
        lengths: Pair,
        sinks: Pair,
        dx: Tensor,
        scale: float,
        /,
    ) -> None: ...

    def rope(
        self,
        rt: Runtime,
        spec: RopeOpSpec,
        t: Tensor,
        freqs: Tensor,
        cu_seqlens: Tensor | None,
        starts: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def rope_qkv(
        self,
        rt: Runtime,
        spec: RopeQkvOpSpec,
        packed: Tensor,
        parts: tuple[Tensor | None, ...],
        freqs: tuple[Tensor | None, ...],
        cu_seqlens: Tensor | None,
        starts: Tensor | None,
        /,
    ) -> None: ...

    def kv_append(
        self,
        rt: Runtime,
        spec: KVAppendSpec,
        new_k: Tensor,
        new_v: Tensor,
        cache: KVCache,
        cu_new: Tensor,
        cu_cached: Tensor,
        /,
    ) -> None: ...
    def kv_move(self, rt: Runtime, spec: KVMoveSpec, cache: KVCache, moves: Tensor, /) -> None: ...
    def kv_gather(
        self, rt: Runtime, spec: KVGatherSpec, cache: KVCache, cu_cached: Tensor, k: Tensor, v: Tensor, /
    ) -> None: ...

    # ----------------------------------------------------------------------- attention over several ranks' keys

    def attention_merge(self, rt: Runtime, form: str, softmax: str, operands: MergeOperands, /) -> None: ...
    def context_sum(self, rt: Runtime, a: Tensor, b: Tensor | None, out: Tensor, /) -> None: ...
    def attention_sink_grad(
        self, rt: Runtime, form: str, dy: Tensor, out: Tensor, stats: Tensor, sink: Tensor, dsink: Tensor, /
    ) -> None: ...

    def context_lengths(
        self, rt: Runtime, spec: ContextLengthsSpec, cu: Tensor, padded: Tensor | None, out: Tensor, /
    ) -> None: ...
    def context_mark(self, rt: Runtime, t: Tensor, padded: Tensor, size: int, /) -> None: ...
    def context_draws(self, rt: Runtime, rng: Tensor, numbers: tuple[int, ...], out: Tensor, /) -> None: ...
    def context_max(self, rt: Runtime, parts: Tensor, first: int, out: Tensor, /) -> None: ...
    def context_rows(
        self, rt: Runtime, spec: ContextRowsSpec, t: Tensor, cu: Tensor | None, out: Tensor, /
    ) -> None: ...

    # ------------------------------------------------------------------------------------- parameters

    def adam(self, rt: Runtime, spec: AdamSpec, tensors: Sequence[AdamTensors], rule: AdamRule, /) -> None: ...
    def adam_quantized(
        self, rt: Runtime, spec: AdamSpec, tensors: Sequence[AdamQuantized], rule: AdamRule, /
    ) -> None: ...
    def sgd(self, rt: Runtime, tensors: Sequence[SgdTensors], rule: SgdRule, /) -> None: ...
    def scale_many(
        self, rt: Runtime, pairs: Sequence[tuple[Tensor, Tensor]], scale: float | Tensor, flag: Tensor | None, /
    ) -> None: ...
    def norm_many(
        self, rt: Runtime, lists: Sequence[Sequence[Tensor]], scale: Tensor | None, out: Tensor, parts: Tensor, /
    ) -> None: ...

    # ------------------------------------------------------------------------------------- tokens and padding

    def padding_order(
        self, rt: Runtime, spec: PaddingOrderSpec, mask: Tensor, there: Tensor, again: Tensor, cu: Tensor, /
    ) -> None: ...

    # ------------------------------------------------------------------------------------- tokens and experts

    def row_map(
        self, rt: Runtime, spec: RowMapSpec, source: Tensor, beside: Tensor | None, out: Tensor, rows: int, /
    ) -> None: ...
    def permute(
        self, rt: Runtime, spec: PermuteSpec, operands: PermuteOperands, out: Tensor, row_probs: Tensor | None, /
    ) -> None: ...
    def unpermute(
        self,
        rt: Runtime,
        spec: PermuteSpec,
        operands: PermuteOperands,
        row_probs: Tensor | None,
        out: Tensor,
        probs: Tensor | None,
        /,
    ) -> None: ...
    def unpermute_backward(
        self, rt: Runtime, spec: PermuteSpec, dy: Tensor, operands: PermuteOperands, dx: Tensor, d_weights: Tensor, /
    ) -> None: ...
