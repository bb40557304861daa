"""Whole layers of `te_core.functional` against the functions of their parts, one after another, in any recipe.

tests/torch/test_functional_whole.py compares them with the modules of te_torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import functional as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.functional_cases import RECIPES, WHOLE, Right, right

APART = [(n & 1) << 62 | (n & 2) << 60 | (n & 4) << 58 for n in range(6)]
#: Which pair of numbers each part draws.
ATTENTION, QKV, PROJ, ATTENDED, CLOSING, MLP = range(6)


def bits(array: Any) -> Any:
    """An array's bytes, so that NaNs compare, too."""
    return array.dtype, array.shape, array.tobytes()


class Parts:
    """A case as its parts, one after another."""

    def __init__(self, case: Right, scaling: te.Scaling | None) -> None:
        self.a, self.o, self.recipe = case.arrays, case.options, case.recipe
        self.scaling = scaling
        self.seed = self.o.get("seed")
        self.heads, self.groups = 4, self.o["num_gqa_groups"] or 4

    def drawn(self, number: int, drops: Any = True) -> dict[str, Any]:
        """The seed of a part that draws."""
        return {} if self.seed is None or not drops else {"seed": (self.seed[0] ^ APART[number], self.seed[1])}

    def state(self, function: te.Function, first: int, count: int = 1) -> dict[str, Any]:
        """The recipe, and the state of a part with a part's slots."""
        if self.recipe is None:
            return {}
        own = te.Scaling(self.recipe, function, like=self.a["x"])
        if self.scaling is not None and self.scaling.arrays():
            slots = {"fwd": 3, "bwd": 2}
            cut = {n: (first * slots[n[-3:]], (first + count) * slots[n[-3:]]) for n in own.arrays()}
            own.load({n: self.scaling.arrays()[n][..., i:j].copy() for n, (i, j) in cut.items()})
        return {"recipe": self.recipe, "scaling": own}

    def taken(self, *names: str, **renamed: str) -> dict[str, Any]:
        """Arguments of a part."""
        found = {name: self.a.get(name) for name in names} | {k: self.a.get(n) for k, n in renamed.items()}
        return {name: array for name, array in found.items() if array is not None}

    def norm(self) -> dict[str, Any]:
        """Options of both norms."""
        return {name: self.o[name] for name in ("normalization", "zero_centered_gamma")}

    def split(self, packed: Any) -> list[Any]:
        """q, k and v of a projection."""
        h, g, lead = self.heads, self.groups, packed.shape[:2]
        if self.o["qkv_weight_interleaved"]:
            rows = packed.reshape(*lead, g, h // g + 2, 8)
            parts = rows[..., : h // g, :].reshape(*lead, h, 8), rows[..., h // g, :], rows[..., h // g + 1, :]
        else:
            rows = packed.reshape(*lead, h + 2 * g, 8)
            parts = rows[:, :, :h], rows[:, :, h : h + g], rows[:, :, h + g :]
        return [np.ascontiguousarray(t) for t in parts]

    def joined(self, q: Any, k: Any, v: Any) -> Any:
        """A projection's gradient."""
        h, g, lead = self.heads, self.groups, q.shape[:2]
        if not self.o["qkv_weight_interleaved"]:
            return np.concatenate([q, k, v], 2).reshape(*lead, -1)
        rows = np.concatenate([q.reshape(*lead, g, h // g, 8), k[..., None, :], v[..., None, :]], 3)
        return rows.reshape(*lead, -1)

    def attend(self, packed: Any) -> tuple[Any, Any]:
        """(attention's output, what gives the projection's gradient)."""
        o, cu, angles = self.o, self.a.get("cu_seqlens_q"), self.a.get("rotary_pos_emb")
        q, k, v = self.split(packed)
        turns = []
        if angles is not None:
            how = {"tensor_format": o["qkv_format"], "interleaved": o.get("rotary_pos_interleaved", False)}
            (q, back_q), (k, back_k) = (te.rope(t, angles, **how) for t in (q, k))
            turns = [back_q, back_k]
        names = "qkv_format", "attn_mask_type", "window_size", "attention_dropout"
        options = {name: o[name] for name in names if name in o}
        lengths = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        y, back = te.attention(q, k, v, **options, **lengths, **self.drawn(ATTENTION, "attention_dropout" in o))

        def backward(dy: Any) -> Any:
            grads = back(dy)
            for turn, n in zip(turns, "qk", strict=False):
                grads[n] = turn(grads[n])["t"]
            return self.joined(grads["q"], grads["k"], grads["v"])

        return y, backward

    def multihead_attention(self) -> tuple[Any, dict[str, Any]]:
        """(y, gradients)."""
        packed, back_qkv = te.linear(
            self.a["x"], **self.taken(weight="qkv_weight", bias="qkv_bias"), **self.state(te.linear, 0),
            **self.drawn(QKV),
        )  # fmt: skip
        context, back_attention = self.attend(packed)
        y, back_proj = te.linear(
            context, **self.taken(weight="proj_weight", bias="proj_bias"), **self.state(te.linear, 1),
            **self.drawn(PROJ),
        )  # fmt: skip
        of_proj = back_proj(np.ones_like(y))
        of_qkv = back_qkv(back_attention(of_proj.pop("x")))
        found = {"x": of_qkv.pop("x"), **{f"qkv_{n}": t for n, t in of_qkv.items()}}
        return y, found | {f"proj_{n}": t for n, t in of_proj.items()}

    def transformer_layer(self) -> tuple[Any, dict[str, Any]]:
        """The same of the layer."""
        x, p, o = self.a["x"], self.o.get("hidden_dropout", 0.0), self.o
        named = {n: f"layernorm_qkv_{n}" for n in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")}
        options: Any = self.norm() | self.state(te.layernorm_linear, 0) | self.drawn(QKV)
        packed, back_qkv = te.layernorm_linear(x, **self.taken(**named), **options)
        context, back_attention = self.attend(packed)
        options = self.state(te.linear, 1) | self.drawn(PROJ)
        out, back_proj = te.linear(context, self.a["proj_weight"], **options)
        parts = "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight"
        of_mlp = {n: f"layernorm_mlp_{n}" for n in parts} | {"residual_bias": "proj_bias"}
        options = self.norm() | {"activation": o["activation"], "hidden_dropout": p, "residual": x}
        drawn = self.drawn(MLP)
        if p:  # of two pairs of numbers the second is that of dropout
            drawn = {"seed": (self.seed[0] ^ APART[ATTENDED] ^ APART[1], self.seed[1])}
        (inner, stream), back_mlp = te.layernorm_mlp(
            out, **self.taken(**of_mlp), **options, **self.state(te.layernorm_mlp, 2, 2), **drawn
        )
        more = {"residual": stream, "hidden_dropout": p, **self.drawn(CLOSING, p)}
        y, back_add = te.bias_dropout_add(inner, **self.taken(bias="layernorm_mlp_fc2_bias"), **more)
        closing = back_add(np.ones_like(y))
        inside = back_mlp((closing["x"], closing["residual"]))
        of_proj = back_proj(inside.pop("x"))
        of_qkv = back_qkv(back_attention(of_proj["x"]))
        found = {"x": of_qkv.pop("x") + inside.pop("residual"), "proj_weight": of_proj["weight"]}
        found |= {f"layernorm_qkv_{n}": t for n, t in of_qkv.items()}
        if "residual_bias" in inside:
            found["proj_bias"] = inside.pop("residual_bias")
        if "bias" in closing:
            found["layernorm_mlp_fc2_bias"] = closing["bias"]
        return y, found | {f"layernorm_mlp_{n}": t for n, t in inside.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", WHOLE)
def test_equals_its_parts(name: str, recipe: str, seed: int) -> None:
    """But for the gradient of a layer's x, which the layer adds up before it rounds."""
    case = right(4 * [*RECIPES].index(recipe) + seed, name, recipe)
    if recipe == "nvfp4":
        case.options.pop("hidden_dropout", None)
    scaling = case.scaling()
    if scaling is not None and scaling.arrays():
        draw = np.random.default_rng(seed)
        for scale in (scaling.scale_fwd, scaling.scale_bwd):
            scale[:] = 2.0 ** draw.integers(-2, 5, scale.shape)
    given = {} if case.recipe is None else {"recipe": case.recipe, "scaling": scaling}
    wanted_y, wanted = getattr(Parts(case, scaling), name)()
    y, back = case.function(**case.arrays, **case.options, **given)
    found = back(np.ones_like(y))
    assert bits(y) == bits(wanted_y)
    assert found.keys() == wanted.keys()
    if name == "transformer_layer":
        a, b = (t.pop("x").astype(np.float32) for t in (found, wanted))
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max())
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in wanted.items()}


def plain(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, options) of a call without dropout."""
    case = right(3, name, "plain")
    return case.arrays, {n: o for n, o in case.options.items() if "dropout" not in n and n != "seed"}


@pytest.mark.parametrize("name", WHOLE)
def test_each_gradient_comes_alone(name: str) -> None:
    arrays, options = plain(name)
    function = getattr(te, name)
    y, back = function(**arrays, **options)
    wanted, second = back(np.ones_like(y), keep=True), back(np.ones_like(y))
    assert {n: bits(t) for n, t in wanted.items()} == {n: bits(t) for n, t in second.items()}
    for one in wanted:
        _, back = function(**arrays, **options, needs=one)
        found = back(np.ones_like(y))
        assert found.keys() == {one} and bits(found[one]) == bits(wanted[one]), one


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_weights_quantized_before_and_buffers(name: str, recipe: Any) -> None:
    """They stand in the order of the products, each its own."""
    arrays, options = plain(name)
    function = getattr(te, name)
    scaling = te.Scaling(recipe, function, like=arrays["x"])
    options |= {"recipe": recipe, "scaling": scaling}
    if scaling.arrays():
        scaling.scale_fwd[:] = 2.0 ** np.arange(scaling.scale_fwd.size)
    y, back = function(**arrays, **options)
    wanted = back(np.ones_like(y))
    products = function.layer.products
    q = {n: te.quantize(arrays[n], recipe, scaling=scaling, name=n) for n in products}
    again, back = function(**arrays, **options, quantized=q)
    into = {n: np.zeros(arrays[n].shape, np.float32) for n in products}
    found = back(np.ones_like(y), into=into, accumulate=True)
    assert bits(again) == bits(y)
    for n in products:
        assert found[n] is into[n]
        np.testing.assert_allclose(into[n], wanted[n].astype(np.float32), rtol=0.01, atol=0.01)
    inside, _ = function(**{**arrays, **q}, **options, needs=())
    assert bits(inside) == bits(y)


def test_seeds_on_a_device() -> None:
    """A pair for each part that draws; one pair for all would drop the same elements everywhere."""
    arrays, options = plain("transformer_layer")
    options |= {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    wanted, _ = te.transformer_layer(**arrays, **options, seed=(7, 1))
    pairs = np.array([(7 ^ apart, 1) for apart in APART], np.int64)
    found, _ = te.transformer_layer(**arrays, **options, seed=pairs)
    assert bits(found) == bits(wanted)
    with pytest.raises(ArgumentError, match=r"seed = .*\[6, 2\]"):
        te.transformer_layer(**arrays, **options, seed=pairs[0])
