"""Random calls of te_jax, right and wrong ones: each gives finite results as large as they should be, or is refused.

Attention without dropout is what the reference gives. Defaults that are written out change no bit.

python -m tests.jax_draws 1000 SEED
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import te_jax as te

from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.reference import attention as reference
from tests.tolerances import snr_db

try:
    import te_jax.flax as modules
except ImportError:  # no flax here
    modules = None  # type: ignore[assignment]

RECIPES: list[Any] = [
    None, None, Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(),
    DelayedScaling(amax_history_len=2),
]  # fmt: skip
SIZES = (0, 1, 3, 8, 16, 16, 17, 32, 32, 64)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def array(draw: random.Random, *shape: int) -> Any:
    """Of a shape that is seldom a little wrong."""
    if shape and draw.random() < 0.04:
        place = draw.randrange(len(shape))
        shape = (*shape[:place], shape[place] + 1, *shape[place + 1 :])
    made = np.random.default_rng(draw.randrange(1 << 30)).standard_normal(shape)
    dtype = jnp.int32 if draw.random() < 0.01 else draw.choice(DTYPES) if draw.random() < 0.05 else jnp.float32
    return jnp.asarray(made, dtype)


#: Arguments that stand for nothing when they are left out, and whose values a call has of its own.
_OWN = {"recipe", "scaling", "seed", "bias", "mask", "parent", "name", "norm_type", "sequence_descriptor"}


def written_out(draw: random.Random, function: Any) -> dict[str, Any]:
    """Some of the arguments that may be left out, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in _OWN}
    return {name: default for name, default in found.items() if draw.random() < 0.3}


def drawn(draw: random.Random) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """(a function of arrays, arrays, a function of them that gives the shape of the result, one that gives the result
    with the decibels by which both agree, or None)."""
    if draw.random() < 0.4:
        return attention(draw)
    if modules is not None and draw.random() < 0.2:
        return module(draw)
    function, given, shape = product(draw)
    return function, given, shape, None


def module(draw: random.Random) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """The same of a flax module with some defaults written out; the result is that of one that leaves them out."""
    recipe, width = draw.choice(RECIPES), draw.choice((16, 32, 64))
    kind, needed = draw.choice(
        [
            (modules.DenseGeneral, {"features": 32}), (modules.LayerNormDenseGeneral, {"features": (2, 16)}),
            (modules.LayerNormMLP, {"intermediate_dim": 32}), (modules.LayerNorm, {}),
            (modules.MultiHeadAttention, {"head_dim": 8, "num_attention_heads": 2}),
        ]
    )  # fmt: skip
    x = jnp.asarray(np.random.default_rng(draw.randrange(1 << 30)).standard_normal((2, 16, width)), jnp.float32)
    written, usual = kind(**(written_out(draw, kind) | needed)), kind(**needed)
    inputs = (lambda x: (x, x)) if kind is modules.MultiHeadAttention else (lambda x: (x,))

    def function(x: Any, module: Any = written) -> Any:
        with te.autocast(recipe=recipe):
            y = module.apply(variables, *inputs(x), rngs={"sr_rng": jax.random.key(1)})
        return y[0] if isinstance(y, tuple) else y

    with te.autocast(recipe=recipe):
        variables = usual.init(jax.random.key(0), *inputs(x))
    y = function(x, usual)
    return function, (x,), lambda x: y.shape, lambda x: (y, 100.0)


def product(draw: random.Random) -> tuple[Any, tuple[Any, ...], Any]:
    """The same of products, norms and activations."""
    recipe, lead = draw.choice(RECIPES), tuple(draw.choice(SIZES) for _ in range(draw.choice((1, 1, 2))))
    k, n, f = (draw.choice(SIZES) for _ in range(3))
    seed = jax.random.key(1) if draw.random() < 0.9 else None
    kind = draw.choice(("dense", "norm", "layernorm_dense", "mlp", "activation"))
    x = array(draw, *lead, k)
    options: dict[str, Any] = {"recipe": recipe, "seed": seed}
    if kind == "dense":
        options["scaling"] = te.scaling(recipe, te.dense)
        return (
            lambda x, w, b: te.dense(x, w, b, **options),
            (x, array(draw, k, n), array(draw, n)),
            lambda x, w, b: (*x.shape[:-1], w.shape[1]),
        )
    if kind == "norm":
        return lambda x, g: te.layernorm(x, g, None, "rmsnorm"), (x, array(draw, k)), lambda x, g: x.shape
    if kind == "layernorm_dense":
        options["scaling"] = te.scaling(recipe, te.layernorm_dense)
        given = x, array(draw, k, n), array(draw, k), array(draw, k)
        function = lambda x, w, g, b: te.layernorm_dense(x, w, g, b, **options)  # noqa: E731
        return function, given, lambda x, w, g, b: (*x.shape[:-1], w.shape[1])
    if kind == "mlp":
        options |= {"scaling": te.scaling(recipe, te.layernorm_mlp), "activation_type": ("silu", "linear")}
        given = x, array(draw, k), array(draw, k, 2, f), array(draw, f, n)
        function = lambda x, g, a, b: te.layernorm_mlp(x, g, None, [a, b], [None, None], "rmsnorm", **options)  # noqa: E731
        return function, given, lambda x, g, a, b: (*x.shape[:-1], b.shape[1])
    if kind == "activation":
        return (
            lambda x: te.activation(x, ("gelu", "linear")),
            (jnp.ones((*lead, 2, k)),),
            lambda x: (*x.shape[:-2], x.shape[-1]),
        )
    raise AssertionError(kind)


def attention(draw: random.Random) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """The same of attention: masks, windows, lengths, a bias, kinds of softmax, dropout, each seldom one too many."""
    batch, length, width = draw.choice((1, 2)), draw.choice(SIZES[1:]), draw.choice((8, 12, 16, 32))
    keys = length if draw.random() < 0.4 else draw.choice(SIZES[1:])
    groups = draw.choice((1, 2, 4))
    q, k = array(draw, batch, length, 4, width), array(draw, batch, keys, groups, width)
    mask = draw.choice([member.value for member in te.AttnMaskType])
    options = written_out(draw, te.fused_attn)
    options = {n: options[n] for n in options.keys() & {"qkv_layout", "max_segments_per_seq", "is_training"}}
    options["softmax_type"] = draw.choice(("vanilla", "vanilla", "off-by-one"))
    if mask != "causal" or draw.random() < 0.5:  # what is left out is causal
        options["attn_mask_type"] = mask
    left = right = -1
    if draw.random() < 0.6:
        left, right = options["window_size"] = draw.choice(((3, 0), (0, 0), (2, 2), (-1, 4), (1, 7), (5, -1), (-2, 1)))
    lengths: tuple[Any, Any] = (None, None)
    if "padding" in mask or draw.random() < 0.05:
        lengths = tuple(np.array([draw.randrange(n + 1) for _ in range(batch)], np.int32) for n in (length, keys))
        options["sequence_descriptor"] = te.SequenceDescriptor.from_seqlens(tuple(jnp.asarray(n) for n in lengths))
    if draw.random() < 0.2:
        options |= {"dropout_probability": draw.choice((0.1, 1.0)), "seed": jax.random.key(2)}

    def wanted(q: Any, k: Any, bias: Any = None) -> Any:
        """By the documented rules: the diagonal begins at the first query and key, or ends at the last ones."""
        if "dropout_probability" in options or any(a.dtype != jnp.float32 for a in (q, k)):
            return None
        p = reference.Problem(
            width**-0.5, left, 0 if "causal" in mask else right, mask.endswith("bottom_right"), *lengths,
            bias=bias, softmax=options["softmax_type"],
        )  # fmt: skip
        q, k = (np.asarray(a).swapaxes(1, 2) for a in (q, k))
        return reference.forward(q, k, k, p).out.swapaxes(1, 2), 100.0

    if draw.random() < 0.3:
        bias = array(draw, draw.choice((1, batch)), draw.choice((1, 4)), draw.choice((1, length)), keys)
        return lambda q, k, b: te.fused_attn((q, k, k), b, **options), (q, k, bias), lambda q, k, b: q.shape, wanted
    return lambda q, k: te.fused_attn((q, k, k), **options), (q, k), lambda q, k: q.shape, wanted


def run(count: int, seed: int) -> Counter[str]:
    """What became of so many calls."""
    found: Counter[str] = Counter()
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        function, given, shape, result = drawn(draw)
        wanted = [i for i, a in enumerate(given) if jnp.issubdtype(a.dtype, jnp.floating) and draw.random() < 0.8]
        try:
            y = jax.jit(function)(*given) if draw.random() < 0.5 else function(*given)
            grads = jax.grad(lambda *g, f=function: f(*g).astype(jnp.float32).sum(), wanted)(*given) if wanted else ()
        except (ArgumentError, UnsupportedError):
            found["refused"] += 1
            continue
        assert y.shape == shape(*given), (number, y.shape, [a.shape for a in given])
        assert [g.shape for g in grads] == [given[i].shape for i in wanted], number
        sure = None if result is None else result(*given)
        if sure is not None and np.any(sure[0]):
            assert snr_db(y, sure[0]) > sure[1], number
        for part in (y, *grads):
            assert np.isfinite(np.asarray(part, np.float32)).all(), number
        found["right"] += 1
    return found


if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
