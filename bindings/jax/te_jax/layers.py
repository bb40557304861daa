"""The functions of te_jax: layers of te_core on JAX arrays, by the names and the order of transformer_engine.jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from typing import Any

import jax.numpy as jnp

from te_core.errors import ArgumentError
from te_core.layers.table import LAYERS
from te_core.recipe import Recipe
from te_core.spelling import choice_error
from te_jax.calling import call_layer, number, of_layer
from te_jax.context import chosen
from te_jax.state import Scaling


def _matrix(operation: str, kernel: Any, axes: Sequence[int]) -> Any:
    """A kernel as a matrix [in, out], from one whose inputs are these dimensions, the first ones."""
    count = len(axes)
    if tuple(a % kernel.ndim for a in axes) != tuple(range(count)) or count >= kernel.ndim:
        allowed = "the first dimensions of the kernel, in order, and the last ones of x"
        raise ArgumentError(operation, f"contracting dimensions {tuple(axes)} of {kernel.shape}", allowed, "move them")
    return kernel.reshape(prod(kernel.shape[:count]), prod(kernel.shape[count:]))


def _vector(operation: str, name: str, bias: Any, shape: tuple[int, ...]) -> Any:
    """A bias of this shape as a vector."""
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    if bias.shape not in (shape, (prod(shape),)):
        raise ArgumentError(operation, f"{name} {list(bias.shape)}", f"{list(shape)}, as its kernel has", "correct it")
    return bias.reshape(-1)


@of_layer("linear")
def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    recipe: Recipe | None = None,
    scaling: Scaling | None = None,
    seed: Any = None,
) -> Any:
    """x @ kernel + bias: x [..., in], kernel [in, out], bias [out].

    `contracting_dims` are those of x, its last ones, and of the kernel, its first ones. `recipe` says how both are
    quantized (None: what `te_jax.autocast` says), `scaling` is the state of a recipe with a history, `seed` a key of
    jax.random for recipes that round by draws.

    Raises:
        ArgumentError: Shapes or dimensions do not fit, or a state is missing.

    Example:
        import jax.numpy as jnp
        import te_jax
        from te_core.recipe import Float8CurrentScaling

        x, kernel = jnp.ones((32, 64)), jnp.ones((64, 16))
        y = te_jax.dense(x, kernel, recipe=Float8CurrentScaling())  # [32, 16]
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    of_x, of_kernel = contracting_dims
    count = len(of_x)
    if count != len(of_kernel) or tuple(sorted(a % x.ndim for a in of_x)) != tuple(range(x.ndim - count, x.ndim)):
        got, do = f"contracting_dims={contracting_dims} of x {x.shape}", "transpose x"
        raise ArgumentError("dense", got, "the last dimensions of x and the first of the kernel", do)
    lead, outer = x.shape[: x.ndim - count], kernel.shape[count:]
    rows = x.reshape(*lead, prod(x.shape[x.ndim - count :]))
    arrays = {"x": rows, "weight": _matrix("dense", kernel, of_kernel)}
    arrays["bias"] = _vector("dense", "bias", bias, outer)
    (y,) = call_layer("linear", arrays, {}, chosen(recipe), scaling, seed)
    return y.reshape(*lead, *outer)


_KINDS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def _norm(operation: str, norm_type: str, beta: Any, zero_centered_gamma: bool, epsilon: float) -> dict[str, Any]:
    kind = _KINDS.get(norm_type)
    if kind is None or (kind == "LayerNorm") == (beta is None):
        got = f"norm_type={norm_type!r} with beta {'left out' if beta is None else 'given'}"
        allowed = "'layernorm' with beta, 'rmsnorm' with beta=None"
        raise ArgumentError(operation, got, allowed, "correct norm_type or beta")
    return {
        "normalization": kind,
        "zero_centered_gamma": zero_centered_gamma,
        "eps": number(operation, "epsilon", epsilon),
    }


def layernorm(
    x: Any, gamma: Any, beta: Any, norm_type: str, zero_centered_gamma: bool = False, epsilon: float = 1e-6
) -> Any:
    """LayerNorm (or RMSNorm: `norm_type="rmsnorm"`, beta=None) of the last dimension."""
    options = _norm("layernorm", norm_type, beta, zero_centered_gamma, epsilon)
    name = options.pop("normalization").lower()
    (y,) = call_layer(name, {"x": x, "weight": gamma, "bias": beta}, options)
    return y


@of_layer("layernorm_linear")
def layernorm_dense(
    x: Any,
    kernel: Any,
    gamma: Any,
    beta: Any,
    bias: Any = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    *,
    recipe: Recipe | None = None,
    scaling: Scaling | None = None,
    seed: Any = None,
) -> Any:
    """norm(x) @ kernel + bias, the norm's output quantized at once."""
    options = _norm("layernorm_dense", norm_type, beta, zero_centered_gamma, epsilon)
    kernel = jnp.asarray(kernel)
    outer = kernel.shape[1:]
    arrays = {"x": x, "layer_norm_weight": gamma, "layer_norm_bias": beta}
    arrays |= {"weight": _matrix("layernorm_dense", kernel, (0,))}
    arrays["bias"] = _vector("layernorm_dense", "bias", bias, outer)
    (y,) = call_layer("layernorm_linear", arrays, options, chosen(recipe), scaling, seed)
    return y.reshape(*y.shape[:-1], *outer)


#: The core's activations by the peer's names: of one function, or of a gated pair.
_ACTIVATIONS = {
    ("gelu",): "gelu", ("gelu", "linear"): "geglu", ("silu",): "silu", ("silu", "linear"): "swiglu",
    ("relu",): "relu", ("relu", "linear"): "reglu", ("quick_gelu",): "qgelu", ("quick_gelu", "linear"): "qgeglu",
    ("squared_relu",): "srelu", ("squared_relu", "linear"): "sreglu",
}  # fmt: skip


def _activation(operation: str, activation_type: Any) -> str:
    names = (activation_type,) if isinstance(activation_type, str) else tuple(activation_type)
    found = _ACTIVATIONS.get(names)
    if found is None:
        allowed = [name[0] if len(name) == 1 else name for name in _ACTIVATIONS]
        raise choice_error(operation, "activation_type", activation_type, allowed)
    return found


def activation(x: Any, activation_type: Any) -> Any:
    """act(x) of x [..., 1, hidden]; of a gated pair act(x[..., 0, :]) * x[..., 1, :]. x may lack the dimension."""
    x = jnp.asarray(x)
    kind = _activation("activation", activation_type)
    count = 1 if isinstance(activation_type, str) else len(activation_type)
    if x.ndim > 1 and x.shape[-2] == count:
        x = x.reshape(*x.shape[:-2], prod(x.shape[-2:]))
    (y,) = call_layer("activation", {"x": x}, {"activation": kind})
    return y


@of_layer("layernorm_mlp")
def layernorm_mlp(
    x: Any,
    gamma: Any,
    beta: Any,
    kernels: Sequence[Any],
    biases: Sequence[Any],
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    *,
    activation_type: Any = ("gelu",),
    recipe: Recipe | None = None,
    scaling: Scaling | None = None,
    seed: Any = None,
) -> Any:
    """act(norm(x) @ kernels[0] + biases[0]) @ kernels[1] + biases[1].

    kernels[0] is [in, activations, hidden] or [in, activations * hidden], kernels[1] [hidden, out]; biases are
    [activations, hidden] and [out], or None.

    Raises:
        ArgumentError: Shapes or names do not fit.

    Example:
        import jax.numpy as jnp
        import te_jax

        x, gamma = jnp.ones((32, 64)), jnp.ones(64)
        kernels = [jnp.ones((64, 2, 128)), jnp.ones((128, 64))]
        y = te_jax.layernorm_mlp(x, gamma, None, kernels, [None, None], "rmsnorm", activation_type=("silu", "linear"))
    """
    options = _norm("layernorm_mlp", norm_type, beta, zero_centered_gamma, epsilon)
    options["activation"] = _activation("layernorm_mlp", activation_type)
    pairs = [[None, None] if part is None else part for part in (kernels, biases)]
    lengths = [len(part) if isinstance(part, (list, tuple)) else f"{type(part).__name__} as" for part in pairs]
    if lengths != [2, 2]:
        got = f"{lengths[0]} kernels and {lengths[1]} biases"
        raise ArgumentError("layernorm_mlp", got, "two of each; None for a bias", "correct the lists")
    inner, outer = (jnp.asarray(kernel) for kernel in pairs[0])
    count = 1 if isinstance(activation_type, str) else len(activation_type)
    if inner.ndim == 3 and inner.shape[1] != count:
        got, allowed = f"kernels[0] {list(inner.shape)}", f"[in, {count}, hidden] with {count} activations"
        raise ArgumentError("layernorm_mlp", got, allowed, "correct kernels[0] or activation_type")
    w1, w2 = (_matrix("layernorm_mlp", kernel, (0,)) for kernel in (inner, outer))
    b1, b2 = (_vector("layernorm_mlp", f"biases[{i}]", pairs[1][i], k.shape[1:]) for i, k in enumerate((inner, outer)))
    arrays = {"x": x, "layer_norm_weight": gamma, "layer_norm_bias": beta}
    arrays |= {"fc1_weight": w1, "fc1_bias": b1, "fc2_weight": w2, "fc2_bias": b2}
    (y,) = call_layer("layernorm_mlp", arrays, options, chosen(recipe), scaling, seed)
    return y


class SoftmaxType(str, Enum):
    """Which scores count."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


def softmax(
    logits: Any, mask: Any = None, scale_factor: float = 1.0, softmax_type: SoftmaxType | str = SoftmaxType.SCALED
) -> Any:
    """softmax(scale_factor logits) of logits [batch, heads, queries, keys]. The mask is True where no score counts."""
    kinds = [kind.value for kind in SoftmaxType]
    if softmax_type not in kinds:
        raise choice_error("softmax", "softmax_type", softmax_type, kinds)
    kind = SoftmaxType(softmax_type)
    if (kind is SoftmaxType.SCALED_MASKED) != (mask is not None):
        got = f"softmax_type={kind!r} {'without' if mask is None else 'with'} a mask"
        raise ArgumentError("softmax", got, "a mask with SCALED_MASKED, and only there", "correct one of both")
    causal = "top_left" if kind is SoftmaxType.SCALED_UPPER_TRIANG_MASKED else None
    arrays = {"x": logits, "mask": None if mask is None else jnp.asarray(mask, bool)}
    options = {"scale": number("softmax", "scale_factor", scale_factor), "causal": causal}
    (y,) = call_layer("softmax", arrays, options)
    return y


def _whole(name: str, about: str) -> Any:
    """The function of a layer of the table whose arguments have the names that the core's have."""
    known = [a.name for a in LAYERS[name].offered()][1:]

    def call(
        x: Any,
        params: Mapping[str, Any],
        *,
        recipe: Recipe | None = None,
        scaling: Scaling | None = None,
        seed: Any = None,
        **options: Any,
    ) -> Any:
        if not isinstance(params, Mapping) or not set(params) <= set(known):
            got = f"{[*params] if isinstance(params, Mapping) else type(params).__name__}"
            raise ArgumentError(name, got, f"a dict by {', '.join(known)}", "correct the names")
        arrays = {"x": x, **{n: params.get(n) for n in known}}
        (y,) = call_layer(name, arrays, options, chosen(recipe), scaling, seed)
        return y

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f"{about}. `params` ({', '.join(known)}) and options have the names of te_core.functional.{name}; weights lie "
        "[out, in]. `seed`: a key of jax.random for dropout."
    )
    return of_layer(name)(call)


multihead_attention = _whole("multihead_attention", "Attention between its projections")
transformer_layer = _whole("transformer_layer", "A layer of a Transformer")
