"""What the GEMMs of a linear and the products of attention are computed in, and why where not as the recipe asks.

Answers come from the spec of a call and from `ops.gemm_route`, which dispatch asks too; nothing is noted as layers run.
"""

from __future__ import annotations

from typing import NamedTuple

from te_core.dtypes import DType
from te_core.layers.linear import LinearSpec
from te_core.ops import raw as ops
from te_core.precision import AttentionPrecision, Operand, Precision
from te_core.quantized import Format
from te_core.tape import taped
from te_core.tensor import Device


class GemmFacts(NamedTuple):
    """One GEMM: "fprop", "dgrad" or "wgrad"; of attention one of `PRODUCTS`."""

    gemm: str
    a: str  # formats of the operands as they are multiplied
    b: str
    accumulation: str
    family: str  # what multiplies them; "" if the GEMM is not needed
    as_asked: bool  # computed in what the recipe says (high precision where it says so)
    reason: str


#: How the reason of a GEMM begins that no recipe decided about.
OUTSIDE = "outside of autocast, or in autocast(enabled=False)"
#: Attention's products: both of forward, and the pairs that backward makes of each.
PRODUCTS = ("Q K", "P V", "dO V, dO P", "dS K, dS Q")


def explain_linear(spec: LinearSpec, place: Device, weight: Format | None = None) -> list[GemmFacts]:
    """The GEMMs of a call of this spec on a device; `weight` is the format of a parameter held quantized."""
    needs = spec.needs
    wanted = {"fprop": True, "dgrad": needs.input, "wgrad": needs.weight}
    found = [_facts(gemm, spec, place, weight) if is_wanted else _unneeded(gemm) for gemm, is_wanted in wanted.items()]
    if spec.parallel is None or spec.parallel.overlap is None:
        return found
    said = ("; ".join(filter(None, (facts.reason, _overlap(facts.gemm, spec)))) for facts in found)
    return [facts._replace(reason=reason) for facts, reason in zip(found, said, strict=True)]


def explain_attention(
    dtype: DType, rule: AttentionPrecision | None, place: Device, families: tuple[str, str | None], emulated: bool
) -> list[GemmFacts]:
    """The products of an attention of this dtype, in FP8 by a rule or not at all.

    `families`: what computes forward, and backward or None. `emulated`: on values as FP8 holds them, in the dtype.
    """
    found = []
    for product, family in zip(PRODUCTS, (families[0], families[0], families[1], families[1]), strict=True):
        backward = product not in PRODUCTS[:2]
        if family is None:
            found.append(_unneeded(product))
        elif rule is None or (backward and not rule.backward):
            asked = "backward was asked for in the activation dtype"
            reason = "no FP8 attention was asked for (fp8_dpa)" if rule is None else asked
            found.append(GemmFacts(product, dtype.name, dtype.name, "float32", family, True, reason))
        else:  # P is cast as q, k and v are, and dS as dO
            a, b = rule.grad.format if backward else rule.qkv.format, rule.qkv.format
            reason = f"values rounded as FP8 holds them are multiplied in {dtype.name}" if emulated else ""
            accumulation = "float32" if emulated or place.kind != "cuda" else ""  # cuDNN does not say how it adds
            found.append(GemmFacts(product, str(a), str(b), accumulation, family, not emulated, reason))
    return found


def _unneeded(gemm: str) -> GemmFacts:
    return GemmFacts(gemm, "", "", "", "", True, "not computed: nobody needs this gradient")


def _plain_because(gemm: str, spec: LinearSpec, weight: Format | None) -> str | None:
    """Why a GEMM is computed in the activation dtype; None where it is not."""
    p = spec.precision
    if p is None:
        quantized = weight is not None and gemm != "wgrad"
        return f"{OUTSIDE}; the weight is held as {weight} and dequantized" if quantized else OUTSIDE
    if gemm != "fprop" and p.backward is not None:
        which = "the original" if p.backward == "high_precision" else "the dequantized rowwise"
        return f"backward_override={p.backward!r}: {which} operands"
    rules = _rules(gemm, p)
    missing = [name for name, rule in rules.items() if rule is None or rule.scaling == "calibrate"]
    if missing:
        calibrating = p.input is not None and p.input.scaling == "calibrate"
        plain = f"the recipe leaves {' and '.join(missing)} plain"
        return "calibrating: maxima are collected" if calibrating else plain
    if any(rule is not None and rule.custom is not None for rule in rules.values()):
        return f"a user's quantizer rounds the operands, which are then multiplied in {spec.dtype.name}"
    return None


def _facts(gemm: str, spec: LinearSpec, place: Device, weight: Format | None) -> GemmFacts:
    p, plain, library = spec.precision, spec.dtype.name, "cublasLt" if place.kind == "cuda" else "NumPy"
    reason = _plain_because(gemm, spec, weight)
    if p is None or reason is not None:
        as_asked = p is not None or reason == OUTSIDE
        return GemmFacts(gemm, plain, plain, "float32", f"{library} {plain}", as_asked, reason or "")
    a, b = (rule.format for rule in _rules(gemm, p).values() if rule is not None)
    route = ops.gemm_route(place, a, b)
    seen = "an inspector may replace operands" if spec.inspect is not None else ""
    note = "; ".join(filter(None, (seen, _travelled(gemm, spec))))
    accumulation = "split" if getattr(p, gemm).split_accumulator else "fast"
    if route.how == "native" or route.how == "emulated":  # the reference backend emulates all formats exactly
        kinds = {"tensor": "FP8, a scale a tensor", "block": "FP8, a scale a block", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
        family = f"cublasLt {kinds[a.scaling]}" if place.kind == "cuda" else "NumPy, exact emulation"
        return GemmFacts(gemm, str(a), str(b), accumulation, family, True, note)
    if route.how == "refused" and not p.emulate:
        return GemmFacts(gemm, str(a), str(b), "", "refused", False, route.reason)
    family = f"{library} {plain if route.how == 'dequantized' else 'float32'} after dequantizing"
    return GemmFacts(gemm, str(a), str(b), "float32", family, False, "; ".join(filter(None, (route.reason, note))))


def _travelled(gemm: str, spec: LinearSpec) -> str:
    """How an operand came that the ranks have parts of; "" where they have none."""
    split = spec.parallel
    came = None if split is None else split.came.get(gemm)
    if split is None or came is None:
        return ""
    name = "the input" if split.gathered == "input" else "the gradient"
    whole = "and quantized whole: this format needs parts of whole blocks of rows"
    gathered = f"{name} is gathered over {split.size} ranks"
    return f"{gathered} as {came}" if came is not spec.dtype else f"{gathered} in {came}, {whole}"


def _overlap(gemm: str, spec: LinearSpec) -> str:
    """How a GEMM overlapped with what travels for it, or why not; "" where that was not asked for."""
    split = spec.parallel
    assert split is not None and split.overlap is not None
    ways, name = split.overlap, f"{split.overlap.name}_{gemm}"
    if ways.idle:
        return f"{name} not overlapped: {ways.idle}"
    ran = split.ran.get(gemm)
    return "" if ran is None else f"{name} {ran}"


def _rules(gemm: str, p: Precision) -> dict[str, Operand | None]:
    """The operands of a GEMM in the order of its formula, with the rule of the copy that it reads."""
    input_, weight, grad = (rule and (rule.columnwise or rule) for rule in (p.input, p.weight, p.grad))
    if gemm == "fprop":
        return {"input": p.input, "weight": p.weight}
    return {"gradient": p.grad, "weight": weight} if gemm == "dgrad" else {"gradient": grad, "input": input_}


def explain_tapes(whole: bool = False) -> str:
    """How many calls of layers were replayed, why others were not, and the tapes that there are; all of their steps,
    if `whole`."""
    kept = taped.tapes()
    return "\n".join([str(taped.COUNTS), f"{len(kept)} tapes", *(str(t) if whole else repr(t) for t in kept)])
