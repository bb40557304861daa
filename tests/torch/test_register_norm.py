"""`te_torch.register_norm`: `convert` swaps norms of others, if they compute what was said of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import te_torch as te
from te_torch.tools import foreign_norms
from te_torch.tools.convert import convert
from tests.backends import on_devices
from tests.tolerances import DB, snr_db
from tests.world import randomise, values


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(foreign_norms, "_registered", {})
    yield


class LlamaNorm(nn.Module):
    """As models of the Llama family have it: float32 inside, eps under another name."""

    def __init__(self, width: int, eps: float = 1e-6, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), start))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, x = x.dtype, x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(dtype)


class GemmaNorm(LlamaNorm):
    """The weight is the distance from one."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (h * (1.0 + self.weight.float())).to(x.dtype)


class Centred(nn.Module):
    """A LayerNorm with names of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.bias, self.small = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.small) * self.scale + self.bias


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "llama": (lambda: LlamaNorm(48), {}),
    "gemma": (lambda: GemmaNorm(48, 1e-5), {"zero_centered_gamma": True}),
    "centred": (lambda: Centred(48), {"like": te.LayerNorm, "eps": "small", "weight": "scale"}),
}


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_computes_the_same(kind: str, dtype: torch.dtype, device: str) -> None:
    """Values and gradients, with the same parameters; alone, and fused with the linear behind it."""
    make, options = KINDS[kind]
    te.register_norm(type(make()), **options)
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": make(), "mixed": nn.Sequential(make(), nn.Linear(48, 32))}).to(device, dtype)
    randomise(model)
    plain = copy.deepcopy(model)
    held = dict(model.named_parameters())
    report = convert(model)
    assert [(row.name, row.was, row.became) for row in report.converted] == [
        ("norm", type(make()).__name__, "LayerNorm" if kind == "centred" else "RMSNorm"),
        ("mixed", f"Sequential({type(make()).__name__}, Linear)", "LayerNormLinear"),
    ]
    assert model["norm"].weight is held["norm.scale" if kind == "centred" else "norm.weight"]
    assert {report.keys.get(name, name) for name in held} == set(dict(model.named_parameters()))
    x = values(6, 48, device=device, dtype=dtype)
    for part in ("norm", "mixed"):
        results = []
        for m in (plain, model):
            leaf = x.detach().clone().requires_grad_()
            y = m[part](leaf)
            y.float().square().sum().backward()
            results.append((y, leaf.grad))
        for new, old in zip(results[1], results[0], strict=True):
            assert new.dtype == dtype and snr_db(new, old) > DB["fp32" if dtype == torch.float32 else "bf16"] - 6


def test_without_registration_the_report_says_how() -> None:
    model = nn.ModuleDict({"norm": LlamaNorm(8), "other": nn.PReLU()})
    notes = {row.name: row.note for row in convert(model).kept}
    assert "te.register_norm(LlamaNorm)" in notes["norm"] and "register_norm" not in notes["other"]


def test_by_name_before_the_class_is_there() -> None:
    """A class of a package that nobody has imported yet; a name is the whole path."""
    te.register_norm(f"{LlamaNorm.__module__}.LlamaNorm")
    model = nn.ModuleDict({"norm": LlamaNorm(8)})
    assert convert(model).converted and isinstance(model["norm"], te.RMSNorm)
    assert model["norm"].eps == 1e-6
    again = nn.ModuleDict({"norm": type("Same", (LlamaNorm,), {})(8)})
    assert not convert(again).converted, "a subclass is another class"


class Elsewhere(LlamaNorm):
    """The small number outside of the root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Dropping(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(super().forward(x), 0.5, self.training)


class Strange(LlamaNorm):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super().forward(x + residual)


class Buffered(LlamaNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros(1))


class Widened(LlamaNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


def without(module: nn.Module, name: str) -> nn.Module:
    delattr(module, name)
    return module


def hooked() -> nn.Module:
    module = LlamaNorm(8)
    module.register_forward_hook(lambda *_: None)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "another formula": (lambda: Elsewhere(8), {}, "it computes something else than RMSNorm"),
    "one and weight": (lambda: GemmaNorm(8), {}, "it computes something else than RMSNorm"),
    "weight, not one and weight": (lambda: LlamaNorm(8), {"zero_centered_gamma": True}, "something else than RMSNorm"),
    "another eps": (lambda: LlamaNorm(8), {"eps": 1e-3}, "it computes something else than RMSNorm"),
    "dropout": (lambda: Dropping(8), {}, "it computes something else than RMSNorm"),
    "float64": (lambda: Widened(8), {}, "it computes something else than RMSNorm"),
    "two inputs": (lambda: Strange(8), {}, "its forward could not be tried: TypeError"),
    "members": (lambda: Buffered(8), {}, "members that LlamaNorm does not know: count"),
    "no eps": (lambda: without(LlamaNorm(8), "variance_epsilon"), {}, "no eps"),
    "eps of another name": (lambda: LlamaNorm(8), {"eps": "small"}, "no small"),
    "hooks": (hooked, {}, "it has forward_hooks"),
    "no bias": (lambda: LlamaNorm(8), {"like": te.LayerNorm}, "LayerNorm here has a bias"),
    "float64 weight": (lambda: LlamaNorm(8).double(), {}, "float64"),
    "long rows": (lambda: LlamaNorm(65537), {}, "65536"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_left_alone(case: str) -> None:
    """With the reason; neither the module nor torch's random numbers are touched by the trial."""
    make, options, why = REFUSED[case]
    module = make()
    te.register_norm(type(module), **options)
    model, state = nn.ModuleDict({"norm": module}), torch.get_rng_state()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (row,) = convert(model).rows
    assert model["norm"] is module and row.became == "" and why.replace("LlamaNorm", type(module).__name__) in row.note
    assert torch.equal(torch.get_rng_state(), state) and module.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_zeros_do_not_hide_a_difference() -> None:
    """The trial takes weights of its own: a weight of zeros, or ones, would make formulas look alike."""
    te.register_norm(LlamaNorm)
    model = nn.ModuleDict({"norm": LlamaNorm(8, start=0.0)})
    assert convert(model).converted and torch.equal(model["norm"].weight, torch.zeros(8))


def test_on_the_meta_device() -> None:
    """The formula is tried on the CPU."""
    te.register_norm(LlamaNorm)
    te.register_norm(Elsewhere)
    with torch.device("meta"):
        model = nn.ModuleDict({"norm": LlamaNorm(8), "other": Elsewhere(8)})
    assert [row.name for row in convert(model).converted] == ["norm"] and model["norm"].weight.is_meta
