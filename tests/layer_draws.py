"""Random draws of a layer's options, a recipe and a way of calling (`tests/layer_options.py`), and what comes of each.

    python -m tests.layer_draws 5000                        # on the CPU; --device cuda, --start SEED
    python -m tests.layer_draws 1 --start 1234 --verbose    # one draw

A draw either computes (a finite result of the right shape and dtype, a finite gradient for all that wants one, near
the same layer in float32), or is refused, by an error that a `raise` of our own made for the user. All else is a fault:
an error from inside torch or NumPy, a NaN, a gradient that is missing, numbers that have nothing to do with the layer.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import sys
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.recipe import Recipe
from tests.layer_options import DTYPES, GAP, Chance, Draw, draw

ROOT = Path(__file__).resolve().parents[1]
MORE = ("encoder_output", "core_attention_bias")  # what may want a gradient besides the input and the parameters

# ------------------------------------------------------------------------------------------------------- layers


class Attention(torch.nn.Module):
    """MultiheadAttention with what it returns added up."""

    def __init__(self, d: Draw, place: dict[str, Any]) -> None:
        super().__init__()
        names = (
            "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon layer_number "
            "num_gqa_groups fuse_wgrad_accumulation fuse_qkv_params zero_centered_gamma qkv_weight_interleaved "
            "rotary_pos_interleaved bias normalization qk_norm_type qk_norm_eps qk_norm_before_rope softmax_type"
        ).split()
        prefix = "enc_dec_" if d.cross else ""
        self.mask = d.layer["enc_dec_attn_mask_type" if d.cross else "self_attn_mask_type"]
        self.attention = te.MultiheadAttention(
            **{name: d.layer[name] for name in names if name in d.layer},
            **d.call["attention"],
            **place,
            qkv_format=d.form,
            attn_mask_type=self.mask,
            attention_type="cross" if d.cross else "self",
            window_size=d.layer.get(f"{prefix}window_size"),
            bottom_right_diagonal=d.layer.get(f"{prefix}bottom_right_diagonal"),
        )

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """All that it returns, of the width of x."""
        cross = options.pop("enc_dec_attn_mask", None)
        if options.get("encoder_output") is not None:
            options["attention_mask"] = cross
        elif "cu_seqlens_q" in options:
            options["cu_seqlens_kv"] = options["cu_seqlens_q"]
            for name in ("cu_seqlens_q_padded", "max_seqlen_q"):
                if name in options:
                    options[name.replace("_q", "_kv")] = options[name]
        return _sum(self.attention(x, **options))


class Linears(torch.nn.Module):
    """LayerNormLinear, Linear, GroupedLinear and LayerNormMLP one behind the other, with all that they return."""

    def __init__(self, d: Draw, place: dict[str, Any]) -> None:
        super().__init__()
        width, wide, more = d.layer["hidden_size"], d.layer["ffn_hidden_size"], d.call["linears"]
        shared = {name: d.layer[name] for name in ("bias", "fuse_wgrad_accumulation") if name in d.layer} | place
        shared |= {name: more[name] for name in ("return_bias", "delay_wgrad_compute") if name in more}
        norm = {name: d.layer[name] for name in ("normalization", "zero_centered_gamma") if name in d.layer}
        norm |= {name: more[name] for name in ("return_layernorm_output",) if name in more}
        split = {"parameters_split": more["parameters_split"]} if "parameters_split" in more else {}
        self.fp8_output = more.get("fp8_output", False)
        self.first = te.LayerNormLinear(width, wide, **shared, **norm, **split)
        self.second = te.Linear(wide, width, **shared, **split)
        self.grouped = te.GroupedLinear(2, width, width, **shared)
        activation, again = d.layer.get("activation", "gelu"), more.get("checkpoint", False)
        self.mlp = te.LayerNormMLP(width, wide, activation=activation, checkpoint=again, **shared, **norm)

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None = None, **ignored: Any) -> torch.Tensor:
        """All that they return, of the width of x."""
        result = self.first(x, is_first_microbatch, self.fp8_output)
        y, *rest = result if isinstance(result, tuple) else (result,)
        if self.first.return_bias:
            y = _sum((y, rest.pop(0)))
        y = _sum(self.second(y, is_first_microbatch))
        rows = y.numel() // y.shape[-1]
        grouped = self.grouped(y, [rows // 3, rows - rows // 3], is_first_microbatch)
        y = grouped[0] + sum(b.sum() for b in grouped[1]) if isinstance(grouped, tuple) else grouped
        return _sum((_sum(self.mlp(y, is_first_microbatch)), *rest))


def _sum(returned: Any) -> torch.Tensor:
    """Outputs, biases and norm outputs of one width, added up; an empty bias is none."""
    first, *rest = returned if isinstance(returned, tuple) else (returned,)
    for t in rest:
        first = first + t if t.numel() else first
    return first  # type: ignore[no-any-return]


def make(d: Draw, dtype: torch.dtype, **changes: Any) -> Any:
    """The draw's layer with parameters of this dtype."""
    place = {"params_dtype": dtype, "device": d.device}
    if d.kind == "TransformerLayer":
        return te.TransformerLayer(**{**d.layer, **place, **changes})
    return {"MultiheadAttention": Attention, "Linears": Linears}[d.kind](d, place)


def build(d: Draw, recipe: Recipe | None) -> Any:
    """The layer with weights whose products are around one."""
    quantized = te.quantized_model_init(recipe=recipe) if d.way.get("quantized") else contextlib.nullcontext()
    with quantized:
        layer = make(d, DTYPES[d.layer["params_dtype"]])
    generator = torch.Generator().manual_seed(d.seed)
    frozen = d.way.get("frozen", "")
    with torch.no_grad():
        for i, (name, p) in enumerate(layer.named_parameters()):
            noise = torch.randn(p.shape, generator=generator).to(p.device)
            p.copy_((noise * p.shape[1] ** -0.5 if p.ndim == 2 else p.float() + 0.1 * noise).to(p.dtype))
            part = {"norms": "norm", "matrices": "weight", "biases": "bias"}.get(frozen, "-")
            if frozen == "all" or (frozen == "half" and i % 2) or part in name:
                p.requires_grad_(False)
    return layer.eval() if d.way.get("eval") else layer


def plain_copy(d: Draw, layer: Any) -> Any:
    """The same layer in float32, its weights as they are."""
    made = make(d, torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(made.parameters(), layer.parameters(), strict=True):
            ours.copy_(theirs.dequantize() if isinstance(theirs, te.QuantizedTensor) else theirs)
            ours.requires_grad_(theirs.requires_grad)
    return made.train(layer.training)


# ------------------------------------------------------------------------------------------------------- inputs


class Inputs(NamedTuple):
    """The tensors of a call: hidden states, what is passed beside them, and the gradient of the result."""

    x: torch.Tensor
    options: dict[str, Any]
    dy: torch.Tensor


def inputs(d: Draw) -> Inputs:
    """The arguments of the call."""
    s, b, se = d.sizes
    r = Chance(d.seed + 1)
    generator = torch.Generator().manual_seed(d.seed + 1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(d.device)

    lengths, encoded = ([r.randint(0, n) if r.some(0.7) else n for _ in range(b)] for n in (s, se))
    if "cache" in d.way:
        lengths = [s] * b
    width, mask = d.layer["hidden_size"], d.layer["self_attn_mask_type"]
    options: dict[str, Any] = {}
    tokens = {"sbhd": (s, b), "bshd": (b, s), "thd": (max(1, sum(lengths)),)}[d.form]
    if "padding" in mask or d.form == "thd" or d.call.get("unread_mask"):
        tokens = _lengths(d, r, options, (lengths, encoded), tokens)
    if mask == "arbitrary":
        shape = (r.of(1, b), r.of(1, d.layer["num_attention_heads"]), s, s)
        options["attention_mask"] = values(*shape) > 0.5
    if d.cross:
        shape = {"sbhd": (se, b), "bshd": (b, se), "thd": (max(1, sum(encoded)),)}[d.form]
        options["encoder_output"] = values(*shape, width)
        kind = d.layer["enc_dec_attn_mask_type"]
        if "padding" in kind and d.form != "thd" and "cu_seqlens_q" not in options:
            options["enc_dec_attn_mask"] = (_mask(d, r, lengths, s), _mask(d, r, encoded, se))
        elif kind == "arbitrary":
            options["enc_dec_attn_mask"] = values(b, 1, s, se) > 0.5
    if "rotary" in d.call:
        options["rotary_pos_emb"] = _angles(d)
    if "bias" in d.call:
        _bias(d, options, values)
    options |= {n: d.call[n] for n in ("checkpoint_core_attention", "window_size", "pad_between_seqs") if n in d.call}
    return Inputs(values(*tokens, width), options, values(*tokens, width))


def _mask(d: Draw, r: Chance, lengths: list[int], longest: int) -> torch.Tensor:
    """A padding mask [b, 1, 1, s]."""
    rows = []
    for n in lengths:
        row = [False] * n + [True] * (longest - n)
        if d.call["lengths"] == "left mask":
            row.reverse()
        elif d.call["lengths"] == "mask of holes":
            r.shuffle(row)
        rows.append(row)
    return torch.tensor(rows, device=d.device).view(len(rows), 1, 1, longest)


def _lengths(
    d: Draw, r: Chance, options: dict[str, Any], lengths: tuple[list[int], list[int]], tokens: tuple[int, ...]
) -> tuple[int, ...]:
    """Add how long sequences are; the leading dimensions of hidden states."""

    def sums(of: list[int]) -> torch.Tensor:
        return torch.tensor([0, *of], device=d.device).cumsum(0).int()

    how = d.call["lengths"]
    if "mask" in how:
        options["attention_mask"] = _mask(d, r, lengths[0], d.sizes[0])
        return tokens
    options["cu_seqlens_q"], options["cu_seqlens_kv"] = map(sums, lengths)
    if d.call.get("max_seqlen"):
        options["max_seqlen_q"], options["max_seqlen_kv"] = d.sizes[0], d.sizes[2]
    if how == "gaps":
        loose = [n + r.randint(0, GAP) for n in lengths[0]]
        options["cu_seqlens_q_padded"] = sums(loose)
        return (max(1, sum(loose)),)
    return tokens


def _angles(d: Draw) -> Any:
    how, width = d.call["rotary"], d.layer["kv_channels"]
    make_angles = te.RotaryPositionEmbedding(
        width // 4 * 2 if how == "half" else width, interleaved=d.layer.get("rotary_pos_interleaved", False)
    )
    angles = make_angles.to(d.device)(max(d.sizes[0] + GAP, d.sizes[2]) + (5 if how == "longer" else 0))
    return (angles, angles.clone()) if how == "pair" else angles


def _bias(d: Draw, options: dict[str, Any], values: Any) -> None:
    kind, _, shape = d.call["bias"].partition(" ")
    (s, b, _), heads = d.sizes, d.layer["num_attention_heads"]
    sizes = [{"1": 1, "b": b, "h": heads, "s": s}[c] for c in shape]
    options["core_attention_bias_type"] = "alibi" if kind == "alibi" else f"{kind}_scale_bias"
    if d.form == "thd" and kind != "alibi":  # it has the sizes of the longest sequences that are allowed
        options["max_seqlen_q"] = options["max_seqlen_kv"] = s
    if kind != "alibi":
        options["core_attention_bias"] = values(*sizes)
    elif shape:
        options["alibi_slopes"] = values(*sizes).abs()


# ------------------------------------------------------------------------------------------------------- running


def region(d: Draw, recipe: Recipe | None) -> Any:
    """The region in which a step runs; what other GPUs alone multiply is emulated."""
    if recipe is None:
        return contextlib.nullcontext()
    if d.way.get("calibrating"):
        return te.autocast(enabled=False, calibrating=True, recipe=recipe)
    return te.autocast(recipe=recipe, emulate=d.device != "cpu" and d.recipe not in ("delayed", "current"))


@contextlib.contextmanager
def backends(d: Draw) -> Iterator[None]:
    """Leave attention to UnfusedDotProductAttention, FP8 included, if the draw says so."""
    names = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UnfusedDPA_Emulate_FP8") if d.way.get("unfused") else ()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setenv(name, "1" if "Emulate" in name else "0")
        yield


def step(
    d: Draw, layer: Any, given: Inputs, dtype: torch.dtype, recipe: Recipe | None, way: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The result, and the gradients by name, of the last of two steps."""
    trains = not way.get("grad")
    for _ in range(2):
        more = {name: given.options[name].to(dtype, copy=True) for name in MORE if name in given.options}
        for t in more.values():
            t.requires_grad_(trains and d.call.get("needs_more", False))
        options = {**given.options, **more}
        x = given.x.to(dtype, copy=True).requires_grad_(trains and way.get("frozen") not in ("input", "all"))
        for p in layer.parameters():
            p.grad = None
            if way.get("main_grad"):
                p.main_grad = torch.zeros(p.shape, device=p.device)
        for first in (True, False) if way.get("microbatches") else (None,):
            y = _forward(d, layer, x, {**options, "is_first_microbatch": first}, recipe, way)
            if y.requires_grad:
                y.backward(given.dy.to(y.dtype))
                _delayed_gradients(layer)
    found = {"y": y.detach().clone()} | ({"dx": x.grad} if x.requires_grad else {})
    found |= {f"d {name}": t.grad for name, t in more.items() if t.requires_grad}  # type: ignore[misc]
    for name, p in layer.named_parameters():
        if trains and p.requires_grad:
            fused = way.get("main_grad") and p.ndim == 2
            found[name] = p.main_grad if fused else p.grad  # type: ignore[assignment]
    return found


def _forward(
    d: Draw, layer: Any, x: torch.Tensor, options: dict[str, Any], recipe: Recipe | None, way: dict[str, Any]
) -> torch.Tensor:
    torch.manual_seed(d.seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(region(d, recipe))
        if recipe is not None and way.get("inner"):
            stack.enter_context(region(d, recipe))
        if way.get("grad"):
            stack.enter_context(torch.no_grad() if way["grad"] == "no_grad" else torch.inference_mode())
        if way.get("amp"):
            stack.enter_context(torch.autocast(d.device, DTYPES[way["amp"]]))
        if "cache" in way:
            return _generated(d, layer, x, options)
        if "checkpoint" not in way:
            return layer(x, **options)  # type: ignore[no-any-return]
        reentrant = way["checkpoint"] == "reentrant" and x.requires_grad
        y: torch.Tensor = checkpoint(lambda t: layer(t, **options), x, use_reentrant=reentrant)
        return y


def _delayed_gradients(layer: Any) -> None:
    for module in layer.modules():
        if getattr(module, "delay_wgrad_compute", False):
            module.backward_dw()


def _generated(d: Draw, layer: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The layer's result, the last token of each sequence in a step of its own."""
    options = {name: t for name, t in options.items() if not name.startswith(("cu_seqlens", "max_seqlen"))}
    dim, (s, b, _) = (0 if d.form == "sbhd" else 1), d.sizes
    groups = d.layer.get("num_gqa_groups", d.layer["num_attention_heads"])
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 8 * b} if d.way["cache"] == "pages" else {}
    params = te.InferenceParams(b, 32, groups, d.layer["kv_channels"], d.dtype, device=d.device, **pages)
    made = []
    for part in x.split([s - 1, 1], dim) if s > 1 else (x,):
        params.pre_step(OrderedDict.fromkeys(range(b), part.shape[dim]))
        made.append(layer(part, inference_params=params, **options))
    return torch.cat(made, dim)


# ------------------------------------------------------------------------------------------------------- judging

#: The least signal-to-noise ratios in dB that `nearness` may find: some decibels below the lowest of 20,000 draws. A
#: gradient that is lost has 0 dB, numbers that have nothing to do with the layer have -3.
FLOORS = {
    "": (30.0, 20.0, 10.0),
    **dict.fromkeys(("delayed", "current"), (9.0, 5.0, 1.0)),
    **dict.fromkeys(("block", "mxfp8"), (12.0, 10.0, 5.0)),
    **dict.fromkeys(("nvfp4", "custom"), (4.0, 0.0, -6.0)),
}


class Outcome(NamedTuple):
    """What came of a draw: "computed", "refused" or "fault", and why; how near it was."""

    what: str
    why: str = ""
    ratios: dict[str, float] = {}


def judge(d: Draw) -> Outcome:
    """Run a draw, and say what came of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe = d.make_recipe()
            layer, given = build(d, recipe), inputs(d)
            dtype = DTYPES[d.way["input"] if "amp" in d.way else d.layer["params_dtype"]]
            with backends(d):
                got = step(d, layer, given, dtype, recipe, d.way)
            said = complaint(d, layer, given, got)
            if said or d.drops_otherwise:
                return Outcome("fault" if said else "computed", said)
            plain = {name: value for name, value in d.way.items() if name in ("eval", "frozen", "grad", "microbatches")}
            want = step(d, plain_copy(d, layer), given, torch.float32, None, plain)
    except Exception as e:
        return Outcome("refused" if is_clear(e) else "fault", f"{type(e).__name__}: {e}")
    ratios = nearness(got, want)
    low = [
        f"{name} {found:.1f} dB of {least}"
        for (name, found), least in zip(ratios.items(), FLOORS[d.recipe], strict=False)
        if found < least
    ]
    return Outcome("fault" if low else "computed", ", ".join(low), ratios)


def complaint(d: Draw, layer: Any, given: Inputs, got: dict[str, torch.Tensor]) -> str:
    """What is wrong with results by themselves."""
    shapes = {"y": given.x.shape, "dx": given.x.shape} | {name: p.shape for name, p in layer.named_parameters()}
    shapes |= {f"d {name}": given.options[name].shape for name in MORE if name in given.options}
    for name, t in got.items():
        if t is None:
            return f"{name} is missing"
        if t.shape != shapes[name]:
            return f"{name} of shape {tuple(t.shape)}, not {tuple(shapes[name])}"
        if not t.isfinite().all():
            return f"{name} is not finite"
    if got["y"].dtype != d.dtype:
        return f"y of {got['y'].dtype}, not {d.dtype}"
    low = {} if d.recipe == "custom" else dict(zip(("fprop", "Q K"), d.low, strict=True))
    for row in te.precision_report(layer).as_dict()["gemms"]:
        if row["gemm"] in low and row["a"].startswith(("float8", "float4")) != low[row["gemm"]]:
            return f"{row['layer']} {row['gemm']} in {row['a']}: {row['reason']}"
    return ""


def nearness(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Signal-to-noise ratios in dB of the result, of all gradients together, and of the matrix that is furthest off.

    What cancels to nothing is measured by a third of the gradients' mean; biases and gains, which are sums of few
    terms of both signs, together with the rest only.
    """
    noise = {n: _energy(t - want[n]) for n, t in got.items()}
    signal = {n: _energy(want[n]) for n in got}
    found = {"result": _decibel(noise.pop("y"), signal.pop("y"))}
    if signal:
        found["gradients"] = _decibel(sum(noise.values()), sum(signal.values()))
        typical = sum(signal.values()) / sum(want[n].numel() for n in signal)
        each = {
            n: _decibel(noise[n], max(signal[n], 0.1 * typical * want[n].numel())) for n in signal if want[n].ndim == 2
        }
        if each:
            worst = min(each, key=each.__getitem__)
            found[f"worst ({worst})"] = each[worst]
    return found


def _energy(t: torch.Tensor) -> float:
    return float(t.detach().double().square().sum())


def _decibel(noise: float, signal: float) -> float:
    if not noise or not signal:  # what is exactly nothing has no measure
        return math.inf
    return 10 * math.log10(signal / noise)


def is_clear(error: BaseException) -> bool:
    """Whether a `raise` of ours made this error for the user: of a documented kind, with a message."""
    if not isinstance(error, (ValueError, TypeError, AssertionError, RuntimeError)) or not str(error):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = any(frame.filename.startswith(str(ROOT / part)) for part in ("te_torch", "te_core"))
    return ours and any(first <= (frame.lineno or 0) <= last for first, last in _raises(frame.filename))


@cache
def _raises(file: str) -> list[tuple[int, int]]:
    """Where errors are raised in a file."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    return [(n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, ast.Raise | ast.Assert)]


# ------------------------------------------------------------------------------------------------------ by hand


class Tally:
    """What came of many draws."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.faults: list[str] = []
        self.lowest: dict[str, list[float]] = {}
        self._example: dict[str, int] = {}

    def run(self, d: Draw) -> Outcome:
        """Judge a draw, and note what came of it."""
        outcome = judge(d)
        self.counts[outcome.what] += 1
        if outcome.what == "fault":
            self.faults.append(f"{d}\n    {outcome.why[:400]}")
        elif outcome.what == "refused":
            _, _, fused = outcome.why.partition("FusedAttention: ")  # the backend that takes most
            reason = f"FusedAttention: {fused.split(';')[0]}" if fused else outcome.why[:150]
            self.reasons[reason] += 1
            self._example.setdefault(reason, d.seed)
        for name, found in outcome.ratios.items():
            kind = f"{d.recipe or 'none'} {name.split()[0]}"
            self.lowest[kind] = sorted([*self.lowest.get(kind, []), round(found, 1)])[:5]
        return outcome

    def __str__(self) -> str:
        lines = [f"{n:5} {why} (seed {self._example[why]})" for why, n in self.reasons.most_common()]
        lines += [f"lowest {name}: {found}" for name, found in sorted(self.lowest.items())]
        return "\n".join([*lines, *self.faults, str(dict(self.counts))])


def main() -> int:
    """Draw, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    tally = Tally()
    for seed in range(options.start, options.start + options.count):
        d = draw(seed, options.device)
        outcome = tally.run(d)
        if options.verbose or outcome.what == "fault":
            print(d, outcome, sep="\n", flush=True)
    print(tally)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
