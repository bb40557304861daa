"""Matrix products by cuBLASLt; see te_core.ops.gemm for the contract.

cuBLASLt is column-major. Row-major out[M, N] = op(a) op(b) is its D[N, M] = op(b)' op(a)': its A is our b, its B
our a, its m our N and its n our M, and no data moves. What it fuses, it does in one call. What it refuses (a bias
of another dtype, an aux of odd width, ...) takes another route: the product in float32, then kernels/epilogue.cu
and kernels/sums.cu. A block-scaled product has a plan of our own beside it (gemm_block.py), where timing on this GPU
has found that faster (`gemm_tune.faster`). `plan.explain()` says which route was taken, and why no shorter one was.

The factor of an nvfp4 product lies on the device, in the operands' maxima: a kernel of one thread makes of them the
alpha and beta that cuBLASLt then reads there, so nothing waits and a captured graph follows new maxima. The mxfp8 and
nvfp4 descriptors are checked against cuBLASLt's documentation only; no Blackwell has run them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from te_core import device, dtypes
from te_core.backends.cuda import cublaslt as lt_
from te_core.backends.cuda import gemm_block, gemm_tune
from te_core.backends.cuda.gemm_block import BlockPlan
from te_core.backends.cuda.gemm_run import (
    A_SCALE,
    A_SUM,
    AUX,
    B_SCALE,
    BIAS,
    LtPlan,
    LtRoute,
    Prepared,
    alpha_on_device,
    cache_of,
    narrow,
)
from te_core.backends.cuda.sums import TYPES
from te_core.dtypes import DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.gemm import GemmSpec

#: Where alpha and beta come from when the device is to read them: a_amax, b_amax, pair, factor, beta.
_ALPHA_ARGS = "pppff"


def plan_gemm(rt: Runtime, spec: GemmSpec) -> LtPlan | BlockPlan:
    """Choose the route and the algorithm.

    On an H200's host: 155 us for whole tiles, nearly all of it cuBLASLt's heuristic, and 55 us for a ragged number
    of rows near one that was planned before.
    """
    with rt.executor().driver.on(rt.device.index):
        return _plan(rt, spec)


def _plan(rt: Runtime, spec: GemmSpec) -> LtPlan | BlockPlan:
    if narrow(spec) and spec.alignment < 16:
        raise ArgumentError(
            "gemm (FP8)",
            f"addresses aligned to {spec.alignment} bytes",
            "addresses divisible by 16",
            "pass tensors that start at a multiple of 16 bytes",
        )
    if spec.a_format is not None and spec.b_format is not None:
        known = replace(device.info(rt.device.index), cublaslt=_version())  # with the cuBLASLt in use
        able, reason = device.gemm_supported(known, spec.a_format, spec.b_format)
        if not able:
            raise UnsupportedError(
                "gemm",
                f"{spec.a_format} x {spec.b_format}: {reason}",
                "formats that the device multiplies (python -m te_core.doctor)",
                "choose another recipe, or dequantize the operands",
            )
    if spec.m == 0 or spec.n == 0 or spec.k == 0:
        finish = _finish_kernel(rt, spec) if spec.m and spec.n else None
        return LtPlan(spec, None, finish=finish, sum_a=spec.a_sum is not None, sum_out=spec.out_sum is not None)
    cache = cache_of(rt)
    fused = _fused_epilogue(spec)
    refused = [fused] if isinstance(fused, str) else []
    for route in _routes(spec, fused):
        prepared = Prepared(cache, spec, route)
        chosen = gemm_tune.choose(rt, spec, route, prepared)
        if isinstance(chosen, str):
            refused.append(f"{lt_.EPILOGUE_NAMES[route.epilogue]} into {route.out}: {chosen}")
            continue
        plan = LtPlan(
            spec,
            route,
            chosen.algorithm,
            chosen.workspace,
            chosen.source,
            tuple(refused),
            _finish_kernel(rt, spec) if route.unfused else None,
            route.a_sum,
            route.out_sum,
            loader.get(rt, "gemm_alpha", args=_ALPHA_ARGS) if alpha_on_device(spec) else None,
            ctypes.addressof(chosen.algorithm),
        )
        cache.put(plan, prepared.finished(plan))
        return gemm_tune.faster(rt, plan) if gemm_block.able(rt, spec) else plan
    raise UnsupportedError(
        "gemm",
        f"{spec}",
        "what cuBLASLt " + ".".join(map(str, _version())) + " offers an algorithm for",
        "it said: " + "; ".join(refused) + ". Copy the operands to aligned memory, or use other dtypes",
    )


def _routes(spec: GemmSpec, fused: Fused | str) -> Iterator[LtRoute]:
    """Ways to carry out a spec, shortest first."""
    fp8 = narrow(spec)
    scales = ((lt_.A_SCALE_POINTER, B_SCALE), (lt_.B_SCALE_POINTER, A_SCALE)) if fp8 else ()
    sums = {"a_sum": spec.a_sum is not None, "out_sum": spec.out_sum is not None}
    if not isinstance(fused, str):
        code, operands = fused
        attributes = scales + operands
        # BGRADB writes a_sum through the bias pointer. (DGELU_BGRAD would write out_sum so, but on an H200 that
        # takes 640 us at 8192 x 4096 x 4096 in bf16, where DGELU and a sum of their own take 380 + 30.)
        if code == lt_.DEFAULT and spec.a_sum is not None and not fp8:
            pointer = ((lt_.BIAS_POINTER, A_SUM),)
            yield LtRoute(lt_.BGRADB, spec.out, spec.accumulate, spec.a_sum, attributes + pointer)
        bias = spec.bias if code in (lt_.BIAS, lt_.GELU_BIAS, lt_.GELU_AUX_BIAS) else None
        yield LtRoute(code, spec.out, spec.accumulate, bias, attributes, **sums)
    whole = not isinstance(fused, str) and fused[0] == lt_.DEFAULT  # the product needs nothing after it
    if not whole or (fp8 and (spec.out is not dtypes.float32 or spec.accumulate)):
        yield LtRoute(lt_.DEFAULT, dtypes.float32, False, None, scales, unfused=True, **sums)


#: cuBLASLt's epilogue, and (descriptor attribute, operand) of each pointer that it takes.
Fused = tuple[int, tuple[tuple[int, int], ...]]


def _fused_epilogue(spec: GemmSpec) -> Fused | str:
    """cuBLASLt's epilogue that means the same as the spec's, or why none is used."""
    if spec.a is dtypes.float32 is not spec.out:
        return f"none into {spec.out}: of float32 operands cuBLASLt writes float32 only"
    bias = ((lt_.BIAS_POINTER, BIAS),) if spec.bias is not None else ()
    if bias and narrow(spec) and spec.bias is not _fp8_bias(spec.out):
        return f"BIAS: with FP8 operands and {spec.out} out it takes a bias of {_fp8_bias(spec.out)}, not {spec.bias}"
    if spec.epilogue is None:
        return (lt_.BIAS if bias else lt_.DEFAULT), bias
    if spec.accumulate:
        return "a fused activation: cuBLASLt adds the old output before it, the contract after it"
    if spec.aux is not None and (spec.aux is not spec.out or spec.n % 8 or spec.alignment < 16):
        return f"a fused aux: it must be {spec.out}, not {spec.aux}, start at 16 bytes, and N ({spec.n}) be whole 8s"
    aux = ((lt_.AUX_POINTER, AUX),) if spec.aux is not None else ()
    if spec.epilogue == "dgelu":
        if bias:
            return "DGELU: it takes no bias"
        if narrow(spec):  # 500 us on an H200 at 8192 x 4096 x 4096, the two steps 290
            return "DGELU: with FP8 operands it takes longer than a kernel after the product"
        return lt_.DGELU, aux
    if aux:
        return (lt_.GELU_AUX_BIAS if bias else lt_.GELU_AUX), aux + bias
    return (lt_.GELU_BIAS if bias else lt_.GELU), bias


def _fp8_bias(out: DType) -> DType:
    """The one bias dtype that cuBLASLt takes with FP8 operands."""
    return dtypes.float16 if out is dtypes.float16 else dtypes.bfloat16


def _version() -> tuple[int, ...]:
    number = lt_.bindings().get_version()
    return number // 10000, number // 100 % 100, number % 100


# ---------------------------------------------------------------------------------------------- kernels of our own


def _finish_kernel(rt: Runtime, spec: GemmSpec) -> Kernel:
    """epilogue.cu for this spec: (acc, bias, aux, out, m, n)."""
    return loader.get(
        rt,
        "epilogue",
        args="ppppqq",
        OUT=TYPES[spec.out],
        BIAS=TYPES[spec.bias or dtypes.float32],
        HAS_BIAS=spec.bias is not None,
        AUX=TYPES[spec.aux or dtypes.float32],
        HAS_AUX=spec.aux is not None,
        ACTIVATION={None: 0, "gelu": 1, "dgelu": 2}[spec.epilogue],
        ACCUMULATE=spec.accumulate,
    )


def tune(rt: Runtime, spec: GemmSpec) -> LtPlan | BlockPlan:
    """Time the candidate algorithms of a GEMM, remember the fastest on disk, and return its plan."""
    with gemm_tune.forced():
        return plan_gemm(rt, spec)
