"""`convert`: swaps a model's torch layers for the ones here, in place, and says what was left alone and why.

`nn.Linear`, `nn.LayerNorm` and `nn.RMSNorm` become their namesakes; an `nn.Sequential` of exactly norm and linear, or
norm, linear, activation, linear, becomes `LayerNormLinear` or `LayerNormMLP`; norms of others are known to
`register_norm`. Parameters stay the same objects, so tied weights, optimizers, `requires_grad` and hooks on parameters
go on working. A layer is swapped only if the new one computes the same formula; anything attached to it that would be
lost keeps it.

Blocks of experts of Hugging Face's models become `MoELayer` (te_torch/tools/foreign_experts.py).

Inside `quantized_model_init` the weights of matrix products become quantized tensors, which are new parameters: make
the optimizer afterwards. Weights that are tied to one another stay tied; one that a layer shares with something that
is not converted (an embedding) stays as it is.

The head, the projection on a vocabulary, is left alone: a loss feels its rounding most, and it runs in high precision
in the recipes that are trained with. `include_head=True` converts it.

Two things differ afterwards, as documented for these modules: under `torch.autocast` a norm's result is of the
autocast dtype, and `reset_parameters()` draws from their own distributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from te_core.errors import ArgumentError
from te_core.ops.norm import MAX_ROW
from te_core.precision import Operand, Precision
from te_core.quantized import up
from te_core.recipe import Recipe, resolve
from te_torch.availability import recipe_support
from te_torch.base.module import BaseModule, CallingModule
from te_torch.base.quantized_init import initialisation, initialising, quantize_parameter, quantized_model_init
from te_torch.listing import table, together
from te_torch.modules.layernorm_linear import LayerNormLinear
from te_torch.modules.layernorm_mlp import LayerNormMLP
from te_torch.modules.linear import Linear
from te_torch.modules.norm import LayerNorm, RMSNorm
from te_torch.runtime import FLOATS
from te_torch.tools.foreign_experts import ForeignExperts, as_moe_layer, known_experts, new_keys
from te_torch.tools.foreign_norms import ForeignNorm, difference, looks_like_a_norm, registered
from te_torch.training.moe_layer import MoELayer
from te_torch.values import check_flags

Filter = Callable[[str, nn.Module], bool]

_NORMS: dict[type[nn.Module], type[nn.Module]] = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
_SINGLE: tuple[type[nn.Module], ...] = (nn.Linear, *_NORMS)
_WEIGHTS = ("weight", "fc1_weight", "fc2_weight")
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu"}

# Their forward passes the children's weights to one fused function, and never calls the children.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Conversion:
    """One line of the report: `became` is empty where the module was left alone."""

    name: str
    was: str
    became: str
    note: str


@dataclass
class ConversionReport:
    """What `convert` did (or, with `dry_run`, would do). Prints as a table, equal layers in one row.

    `keys` maps each state_dict entry whose name changed to its new name: `{report.keys.get(k, k): v ...}` lets a
    converted model load a checkpoint from before. `as_before(te.plain_state_dict(model))` is the way back.
    """

    rows: list[Conversion] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    recipe: str = ""  # what the recipe means here, in words
    dry_run: bool = False
    already: int = 0  # layers of te_torch's that were there before

    def as_before(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A converted model's entries by the names from before, weights of experts in one tensor.

        Args:
            state_dict: What `plain_state_dict` gave of the model.
        """
        old = {new: name for name, new in self.keys.items()}
        found: dict[str, Any] = {}
        for name, value in state_dict.items():
            whole = name.rstrip("0123456789")
            if name not in old and whole in old:
                found.setdefault(old[whole], []).append(value)
            else:
                found[old.get(name, name)] = value
        return {name: torch.stack(value) if isinstance(value, list) else value for name, value in found.items()}

    @property
    def converted(self) -> list[Conversion]:
        """What was swapped."""
        return [row for row in self.rows if row.became]

    @property
    def kept(self) -> list[Conversion]:
        """What was left alone, with the reason."""
        return [row for row in self.rows if not row.became]

    def __str__(self) -> str:
        if not self.rows:
            text = "nothing to convert: the model holds no nn.Linear, nn.LayerNorm or nn.RMSNorm"
            return text + (f"; {self.already} of its layers are te_torch's already" if self.already else "")
        done, left = len(self.converted), len(self.kept)
        verb = "would be converted" if self.dry_run else "converted"
        if not done:
            verb = verb if self.dry_run else "was converted"
        alike = together((row.name, (row.was, row.became, row.note)) for row in self.rows)
        lines = [table(["module", "was", "becomes", "note"], [(name, *rest) for name, rest in alike])]
        lines.append(f"{done or 'nothing'} {verb}, {left} left as {'it is' if left == 1 else 'they are'}")
        if self.recipe:
            lines.append(self.recipe)
        return "\n".join(lines)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a ConversionReport has no {name!r}: convert changes the model in place and returns this report; go on "
            "with the model that it was given"
        )


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: Filter | None = None,
    dry_run: bool = False,
    include_head: bool = False,
) -> ConversionReport:
    """Swap the torch layers inside `model` for te_torch's, in place, and return a report.

    filter(name, module) says no to single layers, and to the fusion of an nn.Sequential (its layers are then asked
    one by one). With a recipe, the report says what it will mean for each layer. dry_run changes nothing. The
    projection on a vocabulary (`lm_head`, tied or not) stays as it is, unless include_head says otherwise.

    Returns:
        A printable report: what was swapped (`converted`) and what was left alone, with the reason (`kept`).

    Raises:
        ArgumentError: An argument is of a wrong kind.

    Example:
        model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
        print(te.convert(torch.nn.ModuleList([model])))
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("convert", f"model={model!r}", "a torch.nn.Module", "pass the model itself")
    check_flags("convert", dry_run=dry_run, include_head=include_head)
    if filter is not None and not callable(filter):
        raise ArgumentError("convert", f"filter={filter!r}", "a callable(name, module) -> bool, or None", "correct it")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError("convert", f"recipe={recipe!r}", "a recipe, or None", "pass DelayedScaling(), say")
    heads = set() if include_head else _heads(model)
    swaps = _Swaps(filter, None if recipe is None else resolve(recipe), _held_rule(recipe), heads)
    root = _found(model)
    if root is not None:
        swaps.keep("(model)", model, "the model itself has no place to be swapped in: pass what contains it")
    swaps.visit(model, "")
    held = swaps.hold(model) if initialising() else {}
    words = "" if recipe is None else _in_words(recipe)
    report = ConversionReport(swaps.rows, swaps.keys, words, dry_run, len(swaps.ours))
    if not dry_run:
        # All are built before the first is swapped: a constructor that refuses leaves the model as it was.
        new: dict[int, nn.Module] = {}
        holds = initialising()
        with quantized_model_init(enabled=False):  # the weights are taken over as they are
            for _, _, old, swap, name in swaps.places:
                if id(old) not in new:  # a shared module stays shared
                    new[id(old)] = _build(swap, old, name, holds)
        for module in new.values():
            _quantize(module, held)
        for parent, key, old, _, _ in swaps.places:
            parent._modules[key] = new[id(old)]
    return report


def _held_rule(recipe: Recipe | None) -> Operand | None:
    """How `quantized_model_init` holds weights here; None where it does not, or says it module by module."""
    if not initialising():
        return None
    rule = resolve(initialisation()[0]).weight
    asked = None if recipe is None else resolve(recipe).weight
    if rule is not None and asked is not None and (rule.scaling, rule.format) != (asked.scaling, asked.format):
        raise ArgumentError(
            "convert",
            f"recipe={recipe!r} inside quantized_model_init(recipe={initialisation()[0]!r})",
            "one recipe: a weight held quantized runs in the format that it is held in",
            "pass the same recipe to both",
        )
    return rule


# --------------------------------------------------------------------------------------- the swaps


@dataclass(frozen=True)
class _Swap:
    """A module that can be had: its class, arguments, parameters (by new name: old name, parameter), products."""

    kind: type[nn.Module]
    options: dict[str, Any]
    parameters: dict[str, tuple[str, nn.Parameter]]
    products: tuple[tuple[int, int], ...] = ()  # (out, in) of each weight
    experts: ForeignExperts | None = None  # of a block of these

    def weights(self) -> list[nn.Parameter]:
        """The weights of its products."""
        return [p for key, (_, p) in self.parameters.items() if self.products and key in _WEIGHTS]


@dataclass
class _Swaps:
    filter: Filter | None
    precision: Precision | None
    held: Operand | None
    heads: set[nn.Module]
    rows: list[Conversion] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    places: list[tuple[nn.Module, str, nn.Module, _Swap, str]] = field(default_factory=list)
    ours: set[int] = field(default_factory=set)  # layers that were converted before
    decided: dict[tuple[int, str], _Swap | None] = field(default_factory=dict)  # by place: shared parents come again

    def keep(self, name: str, module: nn.Module, why: str) -> None:
        self.rows.append(Conversion(name, _was(module), "", why))

    def visit(self, parent: nn.Module, prefix: str) -> None:
        """Decide about everything below a module."""
        if isinstance(parent, CallingModule):
            self.ours.add(id(parent))
            return
        for key, child in parent._modules.items():
            if child is None:
                continue
            name, place = f"{prefix}{key}", (id(parent), key)
            if place not in self.decided:
                self.decided[place] = self._decide(parent, key, child, name)
            swap = self.decided[place]
            if swap is None:
                self.visit(child, f"{name}.")
                continue
            renamed = {old: new for new, (old, _) in swap.parameters.items() if old != new}
            if swap.experts is not None:
                renamed = new_keys(swap.experts)
                if swap.experts.shared:
                    self.visit(child._modules[swap.experts.shared], f"{name}.{swap.experts.shared}.")  # type: ignore[arg-type]
            self.keys.update({f"{name}.{old}": f"{name}.{new}" for old, new in renamed.items()})

    def hold(self, model: nn.Module) -> dict[int, nn.Parameter | None]:
        """The weights of products that become quantized, by what they are now (None: to be made); noted in the rows."""
        used = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        taken: Counter[int] = Counter()
        for swap in {id(old): swap for _, _, old, swap, _ in self.places}.values():
            taken.update(id(p) for p in swap.weights())
        held: dict[int, nn.Parameter | None] = {n: None for n in taken if used[n] == taken[n]}
        names: dict[int, str] = {}
        converted = {id(m) for _, _, old, _, _ in self.places for m in old.modules()}
        for name, module in model.named_modules():
            if id(module) not in converted:
                names |= {id(p): name for p in module._parameters.values() if p is not None and id(p) not in names}
        notes = {name: self._holding(swap, held, names) for _, _, _, swap, name in self.places}
        for i, row in enumerate(self.rows):
            if row.became and notes.get(row.name):
                self.rows[i] = replace(row, note="; ".join(filter(None, (row.note, notes[row.name]))))
        return held

    def _holding(self, swap: _Swap, held: dict[int, Any], names: dict[int, str]) -> str:
        """What becomes of a layer's weights."""
        plain = [p for p in swap.weights() if id(p) not in held]
        if plain:
            return f"weight in high precision: it is shared with {names.get(id(plain[0]), 'others')}"
        if not swap.products or self.held is None:
            return ""
        return f"weight held as {self.held.format}"

    def _decide(self, parent: nn.Module, key: str, child: nn.Module, name: str) -> _Swap | None:
        found = _found(child)
        if found is None:
            if any(p is not None for p in child._parameters.values()) and not isinstance(child, CallingModule):
                hint = f" (a norm? te.register_norm({type(child).__name__}))" if looks_like_a_norm(child) else ""
                self.keep(name, child, f"nothing here replaces it{hint}")
            return None
        if isinstance(parent, _READERS):
            found = f"{type(parent).__name__} reads its weights and may never call it"
        elif isinstance(found, _Swap) and not self.heads.isdisjoint(child.modules()):
            found = _HEAD if child in self.heads else "not fused: its last layer is the head"
        elif isinstance(found, _Swap) and self.filter is not None and not self.filter(name, child):
            found = "the filter said no"
        if isinstance(found, str):
            self.keep(name, child, found)
            return None
        note = _meaning(found.products, self.precision)
        self.rows.append(Conversion(name, _was(child), found.kind.__name__, note))
        self.places.append((parent, key, child, found, name))
        return found


def _was(module: nn.Module) -> str:
    if type(module) is nn.Sequential:
        return f"Sequential({', '.join(type(m).__name__ for m in module)})"
    return type(module).__name__


def _build(swap: _Swap, old: nn.Module, name: str, holds: bool) -> nn.Module:
    """The new module around the old one's parameters; nothing is allocated for it."""
    if swap.experts is not None:
        return as_moe_layer(old, swap.experts, name, holds)
    some = next(p for _, p in swap.parameters.values())
    norm = swap.kind in _NORMS.values()
    options = {"dtype": some.dtype} if norm else {"params_dtype": some.dtype, "name": name}
    new = swap.kind(**swap.options, **options, device="meta")
    for key, (_, parameter) in swap.parameters.items():
        new._parameters[key] = parameter
    for key, value in vars(new).items():
        if isinstance(value, torch.Tensor):  # the empty tensor that stands for no bias
            new.__dict__[key] = some.new_empty(0).detach()
    new.training = old.training
    if not isinstance(old, nn.Sequential):
        # Marks that a user's code has set on the module and may look for.
        new.__dict__.update({k: v for k, v in vars(old).items() if not hasattr(new, k)})
    return new


def _quantize(module: nn.Module, held: dict[int, nn.Parameter | None]) -> None:
    """Hold the weights of `held` quantized, as quantized_model_init says; weights that are one stay one."""
    if isinstance(module, MoELayer):
        for part in (module.fc1, module.fc2):
            _quantize(part, dict.fromkeys(map(id, part.parameters())) if initialising() else {})
    if not isinstance(module, BaseModule):
        return
    for gemm, name in enumerate(module._weight_names()):
        weight = module._parameters[name]
        if weight is None or id(weight) not in held:
            continue
        if weight.is_meta:
            module._quantize_later.append((name, gemm, initialisation()))
            continue
        made = held[id(weight)]
        if made is not None:
            module._parameters[name] = made
            module._primary = True
            module._held = (*module._held, f"{gemm} {type(made).__name__} of another module")
        elif quantize_parameter(module, name, gemm, initialisation()):
            made = held[id(weight)] = module._parameters[name]
            with torch.no_grad():
                made.copy_(weight)  # type: ignore[union-attr]  # trained values bring their scale, as written ones do
            module._primary = True


# -------------------------------------------------------------------- what a module can become

_HEAD = "the head: its rounding reaches the loss at once (include_head=True converts it)"


def _heads(model: nn.Module) -> set[nn.Module]:
    """The projections on a vocabulary: what the model says (as those of transformers do), what shares its weight with
    an embedding, and the last linear layer, if it is called lm_head or has a row for each row of an embedding."""
    modules = list(model.modules())
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
    weights = [embedding.weight for embedding in embeddings]
    heads: set[Any] = {m for m in linears if any(m._parameters.get("weight") is weight for weight in weights)}
    heads |= {said() for m in modules if callable(said := getattr(m, "get_output_embeddings", None))}
    for name, last in [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)][-1:]:
        if name.endswith("lm_head") or last.out_features in {e.num_embeddings for e in embeddings}:
            heads.add(last)
    return heads


def _found(module: nn.Module) -> _Swap | str | None:
    """What the module can become, why it cannot, or None if it is none of the kinds that are converted."""
    if type(module) is nn.Sequential:
        return _fused(module)
    experts = known_experts(module)
    if experts is not None:
        return _experts(module, experts)
    how = registered(type(module))
    if how is not None:
        return _foreign(module, how)
    if not isinstance(module, _SINGLE):
        return None
    if nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized"
    if type(module) not in _SINGLE:
        base = next(kind for kind in _SINGLE if isinstance(module, kind))
        return f"a subclass of nn.{base.__name__}, whose forward may differ"
    unfit = _attached(module) or _parameters_unfit(module)
    return unfit or (_linear(module) if isinstance(module, nn.Linear) else _norm(module))


def _experts(block: nn.Module, known: ForeignExperts | str) -> _Swap | str:
    """A block of experts of another library."""
    if isinstance(known, str):
        return known
    parts: list[Any] = [block, known.experts]
    unfit = next(filter(None, map(_attached, parts)), "")
    unfit = unfit or _mixed([p for part in parts[1:] for p in part.parameters()])
    width, ffn = known.options["hidden_size"], known.options["ffn_hidden_size"]
    return unfit or _Swap(MoELayer, known.options, {}, ((2 * ffn, width), (width, ffn)), known)


def _attached(module: nn.Module) -> str:
    """What is attached to a module and would be lost with it."""
    hooks = sorted(k.strip("_") for k, v in vars(module).items() if "_hooks" in k and v)
    if hooks:
        return f"it has {', '.join(hooks)}"
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled: convert first, then compile"
    return ""


def _parameters_unfit(module: nn.Module, names: tuple[str, ...] = ("weight", "bias")) -> str:
    extra = [*(module._parameters.keys() - set(names)), *module._buffers, *module._modules]
    if extra:
        return f"it has members that {type(module).__name__} does not know: {', '.join(sorted(extra))}"
    if getattr(module, "elementwise_affine", True) is False:
        return "elementwise_affine=False: the modules here have a weight"
    for name in names:
        p = getattr(module, name, None)
        if p is None and name == "bias":
            continue
        if type(p) is not nn.Parameter:
            return f"its {name} is a {type(p).__name__}: convert before wrapping or sharding"
        if p.dtype not in FLOATS:
            return f"its {name} is {p.dtype}; float32, bfloat16 and float16 are converted"
    return _mixed([p for p in module.parameters()])


def _mixed(parameters: list[nn.Parameter]) -> str:
    places = {(p.dtype, p.device) for p in parameters}
    return "" if len(places) < 2 else "its parameters differ in dtype or device"


def _linear(module: nn.Linear) -> _Swap | str:
    shape = (module.out_features, module.in_features)
    bias = module.bias
    if tuple(module.weight.shape) != shape or (bias is not None and tuple(bias.shape) != shape[:1]):
        return f"its weight or bias does not have the shape of out_features, in_features = {shape}"
    options = {"in_features": shape[1], "out_features": shape[0], "bias": bias is not None}
    return _Swap(Linear, options, _own(module), (shape,))


def _norm(module: nn.Module) -> _Swap | str:
    kind = next(new for old, new in _NORMS.items() if type(module) is old)
    shape, eps = tuple(module.normalized_shape), module.eps  # type: ignore[arg-type]
    if eps is None:
        return "eps=None follows the dtype of each input; the modules here have one eps"
    if kind is LayerNorm and module.bias is None:
        return "bias=False: LayerNorm here has a bias"
    parameters = _own(module)
    if any(tuple(p.shape) != shape for _, p in parameters.values()):
        return f"its parameters do not have the shape of normalized_shape = {shape}"
    return _too_long(parameters) or _Swap(kind, {"normalized_shape": shape, "eps": eps}, parameters)


def _too_long(parameters: dict[str, tuple[str, nn.Parameter]]) -> str:
    rows = parameters["weight"][1].numel()
    return "" if 1 <= rows <= MAX_ROW else f"rows of {rows} elements; 1 to {MAX_ROW} are allowed"


def _foreign(module: nn.Module, how: ForeignNorm) -> _Swap | str:
    """A norm of others that `register_norm` knows."""
    if nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized"
    if how.like is LayerNorm and getattr(module, "bias", None) is None:
        return "it has no bias: LayerNorm here has a bias"
    unfit = _attached(module) or _parameters_unfit(module, tuple(how.parameters().values()))
    if unfit:
        return unfit
    parameters = {own: (name, module.get_parameter(name)) for own, name in how.parameters().items()}
    options = how.options(module)
    if isinstance(options, str):
        return options
    return _too_long(parameters) or difference(module, how, options) or _Swap(how.like, options, parameters)


def _own(module: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    return {name: (name, p) for name, p in module._parameters.items() if p is not None}


def _fused(sequence: nn.Sequential) -> _Swap | str | None:
    """The fused module of norm, linear or norm, linear, activation, linear."""
    members = list(sequence._modules.items())
    kinds = [member for _, member in members]
    if len(kinds) not in (2, 4) or not all(isinstance(linear, nn.Linear) for linear in kinds[1::2]):
        return None
    if not isinstance(kinds[0], tuple(_NORMS)) and registered(type(kinds[0])) is None:
        return None
    attached = _attached(sequence)
    if attached:
        return f"not fused: {attached}"
    parts: dict[str, _Swap] = {}
    for i, (key, member) in enumerate(members):
        found = _attached(member) if i == 2 else _found(member)
        if isinstance(found, _Swap):
            parts[key] = found
        elif found:
            return f"not fused: {key}: {found}"
    misfit = _mixed([p for swap in parts.values() for _, p in swap.parameters.values()])
    if misfit:
        return f"not fused: {misfit}"
    return _norm_linear(parts) if len(kinds) == 2 else _norm_mlp(parts, kinds[2])


def _norm_options(norm: _Swap) -> dict[str, Any]:
    """A norm's options, by their names in a module that begins with it."""
    own = {name: value for name, value in norm.options.items() if name != "normalized_shape"}
    return {**own, "normalization": norm.kind.__name__}


def _norm_linear(parts: dict[str, _Swap]) -> _Swap | str:
    norm, linear = parts.values()
    width = linear.options["in_features"]
    if norm.options["normalized_shape"] != (width,):
        return f"not fused: the norm is over {norm.options['normalized_shape']}, the linear layer reads ({width},)"
    options = {**linear.options, **_norm_options(norm)}
    return _Swap(LayerNormLinear, options, dict(_joined(parts, ("layer_norm_", ""))), linear.products)


def _norm_mlp(parts: dict[str, _Swap], activation: nn.Module) -> _Swap | str:
    name = _ACTIVATIONS.get(type(activation))
    if name is None or getattr(activation, "approximate", "tanh") != "tanh":
        return f"not fused: LayerNormMLP has no activation equal to {activation}"
    norm, fc1, fc2 = parts.values()
    ((ffn, hidden),), ((out, back),) = fc1.products, fc2.products
    if norm.options["normalized_shape"] != (hidden,) or (out, back) != (hidden, ffn):
        return (
            f"not fused: LayerNormMLP's widths are hidden, ffn, hidden; here the norm is over "
            f"{norm.options['normalized_shape']}, the linear layers map {hidden} to {ffn} and {back} to {out}"
        )
    if fc1.options["bias"] != fc2.options["bias"]:
        return "not fused: LayerNormMLP has two biases or none"
    options = {
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "bias": fc1.options["bias"],
        "activation": name,
        **_norm_options(norm),
    }
    parameters = dict(_joined(parts, ("layer_norm_", "fc1_", "fc2_")))
    return _Swap(LayerNormMLP, options, parameters, (*fc1.products, *fc2.products))


def _joined(parts: dict[str, _Swap], prefixes: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, nn.Parameter]]]:
    for (key, swap), prefix in zip(parts.items(), prefixes, strict=True):
        for name, (old, parameter) in swap.parameters.items():
            yield f"{prefix}{name}", (f"{key}.{old}", parameter)


# ---------------------------------------------------------------------------------- the recipe


def _in_words(recipe: Recipe) -> str:
    precision = resolve(recipe)
    name = type(recipe).__name__
    if precision.factory is not None:
        return f"{name}: the operands are what its factory answers for each module"
    roles = (("input", precision.input), ("weight", precision.weight), ("gradient", precision.grad))
    held = ((role, "in high precision" if o is None else f"{o.format} ({o.scaling})") for role, o in roles)
    lines = [f"{name}: " + ", ".join(f"{role} {how}" for role, how in held)]
    able, reason = recipe_support(recipe)
    if not able:
        lines.append(f"on this machine: {reason}")
    return "\n".join(lines)


def _meaning(products: tuple[tuple[int, int], ...], precision: Precision | None) -> str:
    """What the recipe will mean for a layer of these weights."""
    if precision is None:
        return ""
    if not products:
        return "in high precision"
    if precision.weight is None:
        return ""
    pad = precision.weight.format.pad
    stored = [(n, k, up(n, pad), up(k, pad)) for n, k in products]
    odd = [f"{n} x {k} stored as {a} x {b}" for n, k, a, b in stored if (n, k) != (a, b)]
    return "; ".join(odd) + ", filled with zeros" if odd else ""
