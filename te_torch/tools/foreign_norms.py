"""`register_norm`: which norm of ours a norm of others is, for `convert`; and the trial that it is that one.

te_torch.register_norm("transformers.models.llama.modeling_llama.LlamaRMSNorm")
te_torch.convert(model)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from te_core.errors import ArgumentError
from te_torch.base.options import check_values
from te_torch.modules.norm import LayerNorm, RMSNorm
from te_torch.values import is_number

#: Where norms keep the number that is added to the mean square, unless the registration says where.
EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")
#: How far the trial's values may be apart, relative to the largest of a row. Both sides compute in float32.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class ForeignNorm:
    """What a class of norms was registered as."""

    like: type[nn.Module]
    eps: str | float | None
    weight: str
    zero_centered_gamma: bool

    def parameters(self) -> dict[str, str]:
        """Our names of the parameters and theirs."""
        return {"weight": self.weight} | ({"bias": "bias"} if self.like is LayerNorm else {})

    def options(self, module: nn.Module) -> dict[str, Any] | str:
        """The arguments of our norm that would be this one, or why there are none."""
        eps: Any = self.eps
        if not is_number(eps):
            names = EPS_NAMES if eps is None else (eps,)
            eps = next((getattr(module, name) for name in names if hasattr(module, name)), None)
            if not is_number(eps) or eps < 0:
                return f"it has no {' or '.join(names)} that is a number: see register_norm's eps="
        shape = tuple(getattr(module, self.weight).shape)
        return {"normalized_shape": shape, "eps": float(eps), "zero_centered_gamma": self.zero_centered_gamma}


_registered: dict[type[nn.Module] | str, ForeignNorm] = {}


def register_norm(
    kind: type[nn.Module] | str,
    like: type[nn.Module] = RMSNorm,
    *,
    eps: str | float | None = None,
    weight: str = "weight",
    zero_centered_gamma: bool = False,
) -> None:
    """Let `convert` swap norms of this class for ours of the class `like`, from now on.

    kind: the class, or its full name ("package.module.Class") if it need not be imported yet; subclasses are other
    classes. eps: the name of the attribute that holds it, or the number (None: one of the usual names). weight: the
    name of the parameter. zero_centered_gamma: the weight is stored as the distance from one.

    Nothing is believed: before each swap both modules compute the same random rows, with random weights, and one that
    computes something else is left alone.
    """
    operation = "register_norm"
    if isinstance(kind, str):
        right = kind.count(".") >= 1 and all(part.isidentifier() for part in kind.split("."))
    else:
        right = isinstance(kind, type) and issubclass(kind, nn.Module)
    if not right:
        raise ArgumentError(
            operation,
            f"kind={kind!r}",
            "a class of torch modules, or its full name as in 'package.module.Class'",
            "pass the class itself",
        )
    if kind in (nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm):
        raise ArgumentError(
            operation, f"kind={kind!r}", "norms of others", "leave it out: it is swapped without being registered"
        )
    if like not in (LayerNorm, RMSNorm):
        raise ArgumentError(operation, f"like={like!r}", "te.RMSNorm or te.LayerNorm", "choose one of these")
    if not (eps is None or isinstance(eps, str) or (is_number(eps) and eps >= 0)):
        raise ArgumentError(operation, f"eps={eps!r}", "an attribute's name, a number >= 0, or None", "correct it")
    if not isinstance(weight, str):
        raise ArgumentError(operation, f"weight={weight!r}", "a parameter's name", "correct it")
    check_values(operation, {"zero_centered_gamma": zero_centered_gamma})
    _registered[kind] = ForeignNorm(like, eps, weight, zero_centered_gamma)


def registered(kind: type[nn.Module]) -> ForeignNorm | None:
    """What a class was registered as, by itself or by its name."""
    return _registered.get(kind) or _registered.get(f"{kind.__module__}.{kind.__qualname__}")


def looks_like_a_norm(module: nn.Module) -> bool:
    """Whether a class that nobody registered may be a norm."""
    shapes = [p.ndim for p in module._parameters.values() if p is not None]
    return "norm" in type(module).__name__.lower() and shapes in ([1], [1, 1])


def difference(module: nn.Module, how: ForeignNorm, options: dict[str, Any]) -> str:
    """What keeps a module from being the norm of these options: nothing, if copies of both compute the same."""
    place = next(module.parameters()).device
    device = torch.device("cpu") if place.type == "meta" else place
    draws = torch.Generator().manual_seed(0)
    ours = how.like(**options, dtype=torch.float32, device=device)
    shape, eps = options["normalized_shape"], options["eps"]
    # Rows as small as eps show where it stands, others what is divided by what.
    sizes = torch.tensor([1.0, 30.0, *([eps**0.5, 0.3 * eps**0.5, 0.0] if eps else [1e-3])])
    rows = (sizes.view(-1, *[1] * len(shape)) * (0.2 + torch.randn(len(sizes), *shape, generator=draws))).to(device)
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            theirs = copy.deepcopy(module)
            if place.type == "meta":
                theirs = theirs.to_empty(device=device)
            theirs = theirs.float()
            for own, name in how.parameters().items():
                value = torch.randn(shape, generator=draws).to(device)
                getattr(theirs, name).copy_(value)
                getattr(ours, own).copy_(value)
            found = theirs(rows.clone())
        except Exception as error:  # a user's code: what it raises is the reason
            return f"its forward could not be tried: {type(error).__name__}: {error}"
        wanted = ours(rows)
    verdict = f"it computes something else than {how.like.__name__} of {options}: "
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
        return f"{verdict}{what} for {tuple(wanted.shape)} of {wanted.dtype}"
    apart = (found - wanted).flatten(1).abs().amax(1) / wanted.flatten(1).abs().amax(1).clamp(min=1e-30)
    worst = float(apart.nan_to_num(torch.inf).max())
    return f"{verdict}values differ by {worst:.1%}" if worst > TOLERANCE else ""
