"""Constructors: parameters and how they begin, what options change. Refused ones: test_bad_options.py."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import pytest
import torch

import te_torch as te
from tests.backends import on_devices
from tests.world import GEMM_MODULES, MODULES, RECIPES, WIDTH, differences, make, on, region, step, values

recipes = pytest.mark.parametrize("recipe", RECIPES)
gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)

NAMES = {
    "Linear": {"weight": (64, 48), "bias": (64,)},
    "LayerNormLinear": {"layer_norm_weight": (48,), "layer_norm_bias": (48,), "weight": (64, 48), "bias": (64,)},
    "LayerNormMLP": {
        "layer_norm_weight": (48,),
        "layer_norm_bias": (48,),
        "fc1_weight": (80, 48),
        "fc1_bias": (80,),
        "fc2_weight": (48, 80),
        "fc2_bias": (48,),
    },
    "LayerNorm": {"weight": (48,), "bias": (48,)},
    "RMSNorm": {"weight": (48,)},
}


@on_devices
@pytest.mark.parametrize("kind", MODULES)
def test_parameters(kind: str, device: str) -> None:
    """Names, shapes, dtype and place; and the state dict of a module that never ran in FP8 holds nothing else."""
    dtype_name = "params_dtype" if kind in GEMM_MODULES else "dtype"
    module = MODULES[kind](device=device, **{dtype_name: torch.float16})
    found = dict(module.named_parameters())
    assert {n: tuple(p.shape) for n, p in found.items()} == NAMES[kind]
    assert {p.dtype for p in found.values()} == {torch.float16} and all(p.requires_grad for p in found.values())
    on(device, *found.values())
    assert set(module.state_dict()) == set(NAMES[kind])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert next(MODULES[kind](device=device).parameters()).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    on(default, *MODULES[kind]().parameters())


def check_initial(name: str, p: torch.Tensor, zero_centered: bool = False) -> None:
    """Matrices normal(0, 0.023), biases zero, gains one."""
    p = p.detach().double()
    if p.ndim == 2:
        n = p.numel()
        assert abs(p.mean()) < 5 * 0.023 / n**0.5 and abs(p.std() / 0.023 - 1) < 5 / (2 * n) ** 0.5
        assert abs((p.abs() < 0.023).double().mean() - 0.6827) < 5 * (0.22 / n) ** 0.5, "normal, not uniform"
    else:
        assert (p == (not zero_centered if "weight" in name else 0)).all(), name


@on_devices
def test_init_methods(device: str) -> None:
    """Matrices only; fc2 has its own, which is the default one if not given, as documented."""

    def fill(value: float) -> Any:
        return lambda w: w.fill_(value)

    for kind in (te.Linear, te.LayerNormLinear):
        module = kind(8, 8, init_method=fill(3), device=device)
        assert (module.weight == 3).all() and not module.bias.any()
    options = {"device": device, "init_method": fill(3)}
    module = te.LayerNormMLP(8, 16, output_layer_init_method=fill(5), **options)
    assert (module.fc1_weight == 3).all() and (module.fc2_weight == 5).all() and not module.fc1_bias.any()
    assert (module.layer_norm_weight == 1).all()
    fc2 = te.LayerNormMLP(64, 128, **options).fc2_weight
    assert abs(fc2.mean().item()) < 1e-3 and abs(fc2.std().item() - 0.023) < 1e-3


class Tracker:
    """An RNG tracker as Megatron has it: a state by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Any:
        self.names.append(name)
        with torch.random.fork_rng():
            torch.manual_seed(77)
            yield


TRACKER = Tracker()


def get_tracker() -> Tracker:
    return TRACKER


@on_devices
def test_rng_tracker(device: str) -> None:
    """Matrices are drawn inside its fork and leave the outer generator alone; the name is handed on."""
    TRACKER.names.clear()
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    first = te.Linear(16, 16, get_rng_state_tracker=get_tracker, device=device)
    assert torch.equal(torch.rand(4), expected)
    second = te.Linear(16, 16, get_rng_state_tracker=get_tracker, rng_tracker_name="expert", device=device)
    assert torch.equal(first.weight, second.weight) and TRACKER.names == ["model-parallel-rng", "expert"]
    te.LayerNormLinear(16, 16, get_rng_state_tracker=get_tracker, device=device)
    te.LayerNormMLP(16, 16, get_rng_state_tracker=get_tracker, device=device)
    assert len(TRACKER.names) == 5, "one fork for each matrix"
    again = pickle.loads(pickle.dumps(first))
    again.reset_parameters()
    assert torch.equal(again.weight, first.weight)


@on_devices
@recipes
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize(
    ("split", "rows"),
    [
        (("query_", "key", "value__"), {"query": 32, "key": 32, "value": 32}),
        (["a"], {"a": 96}),
        ({"q": 64, "kv_": 32}, {"q": 64, "kv": 32}),
    ],
    ids=["tuple", "list", "dict"],
)
def test_parameters_split(split: Any, rows: dict[str, int], kind: str, recipe: str, device: str) -> None:
    """Named parts of one weight: the same numbers come out, and each part gets its part of the gradient."""
    whole = getattr(te, kind)(WIDTH, 96, device=device)
    parts = getattr(te, kind)(WIDTH, 96, parameters_split=split, device=device)
    names = [n for n, _ in parts.named_parameters() if "layer_norm" not in n]
    assert names == [f"{n}_weight" for n in rows] + [f"{n}_bias" for n in rows]
    with torch.no_grad():
        whole.bias.normal_()
        for what in ("weight", "bias"):
            for n, piece in zip(rows, getattr(whole, what).split(list(rows.values())), strict=True):
                getattr(parts, f"{n}_{what}").copy_(piece)
    x = values(32, WIDTH, device=device, seed=1)
    for _ in range(2):  # by the module's own Python, then by a plan
        got, wanted = step(parts, x, recipe), step(whole, x, recipe)
        for what in ("weight", "bias"):
            got[what] = torch.cat([got.pop(f"{n}_{what}") for n in rows])
        assert not differences(got, wanted)
    without = getattr(te, kind)(WIDTH, 96, parameters_split=split, bias=False, device=device)
    assert all(getattr(without, f"{n}_bias").numel() == 0 for n in rows)
    assert not any("bias" in n and "norm" not in n for n, _ in without.named_parameters())


@on_devices
def test_split_with_return_bias(device: str) -> None:
    module = te.Linear(WIDTH, 96, parameters_split=("q", "k"), return_bias=True, device=device)
    with torch.no_grad():
        module.q_bias.fill_(1), module.k_bias.fill_(2)
    _, bias = module(values(2, WIDTH, device=device))
    assert bias.tolist() == [1.0] * 48 + [2.0] * 48


@on_devices
@pytest.mark.parametrize("bias", [False, True])
@gemm_modules
def test_return_bias_of_a_quantized_input(kind: str, bias: bool, device: str) -> None:
    """What another module gave in FP8 has no quantizer of its own to make an empty bias with."""
    module = make(kind, device, torch.bfloat16, return_bias=True, bias=bias)
    first = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device)
    x = values(32, WIDTH, device=device, dtype=torch.bfloat16, seed=1)
    with region("delayed"):
        quantized = first(x, fp8_output=True)
        assert isinstance(quantized, te.QuantizedTensor) and quantized._quantizer is None
        out, returned = module(quantized)
    assert type(returned) in (torch.Tensor, torch.nn.Parameter) and returned.dtype == out.dtype
    assert returned.device == out.device and bool(returned.numel()) == bias
    out.sum().backward()
    assert first.weight.grad is not None and first.weight.grad.isfinite().all()


@on_devices
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_initialisation(kind: str, zero_centered: bool, device: str) -> None:
    """No memory on the meta device until reset_parameters; then the usual start, on the default device or another."""
    options = {} if kind == "Linear" else {"zero_centered_gamma": zero_centered}
    module = MODULES[kind](device="meta", **options)
    module.requires_grad_(False)
    assert all(p.is_meta for p in module.parameters())
    assert module(torch.empty(3, 5, WIDTH, device="meta")).shape[:2] == (3, 5)
    module.reset_parameters()
    on("cuda" if torch.cuda.is_available() else "cpu", *module.parameters())
    assert not any(p.requires_grad for p in module.parameters())
    placed, made = (MODULES[kind](device=where, **options) for where in ("meta", device))
    for name, p in made.named_parameters():
        check_initial(name, p, zero_centered)
    placed.to_empty(device=device)
    with torch.no_grad():
        [p.fill_(9) for one in (placed, made) for p in one.parameters()]
    placed.reset_parameters(), made.reset_parameters()
    for one in (module, placed, made):
        for name, p in one.named_parameters():
            check_initial(name, p, zero_centered)
    on(device, *placed.parameters(), placed(values(2, WIDTH, device=device)))


# ------------------------------------------------------------------------------------- refused and deprecated


@on_devices
@gemm_modules
def test_options_without_effect_on_one_rank(kind: str, device: str) -> None:
    """What a tensor-parallel script passes on one rank: accepted, and the numbers are the same."""
    options: dict[str, Any] = {"sequence_parallel": True, "tp_group": None, "tp_size": 1}
    options |= {"set_parallel_mode": True} if kind == "LayerNormMLP" else {"parallel_mode": "Column"}
    plain, module = make(kind, device), make(kind, device, **options)
    module.set_tensor_parallel_group(None)
    x = values(8, WIDTH, device=device, seed=1)
    assert torch.equal(module(x), plain(x))
    for first in (True, False, None):
        assert torch.equal(module(x, is_first_microbatch=first), plain(x))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_older_norm_arguments(kind: str) -> None:
    norm = getattr(te, kind)
    with pytest.warns(DeprecationWarning, match="hidden_size") as seen:
        module = norm(hidden_size=12, device="cpu")
    assert module.weight.shape == (12,) and seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="params_dtype"):
        assert norm(12, params_dtype=torch.bfloat16, device="cpu").weight.dtype == torch.bfloat16
    assert norm(12, 0.5, device="cpu").eps == 0.5
    marked = norm(12, sequence_parallel=True, device="meta")
    marked.reset_parameters()
    assert all(p.sequence_parallel for p in marked.parameters())
    assert not hasattr(norm(12, device="cpu").weight, "sequence_parallel")


def test_layer_names() -> None:
    assert te.Linear(4, 4, name="mine", device="cpu").name == "mine"
    a, b = (te.LayerNormMLP(4, 4, device="cpu").name for _ in range(2))
    assert a.startswith("Layer_") and int(b.removeprefix("Layer_")) == int(a.removeprefix("Layer_")) + 1


# ------------------------------------------------------------------------------------- activations of the MLP


# ------------------------------------------------------------------------------------- options that change no number


@on_devices
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_gathered_norm_output(kind: str, device: str) -> None:
    """On one rank the gathered norm output is the norm output."""
    plain, gathered = (
        make(kind, device, **{name: True}) for name in ("return_layernorm_output", "return_layernorm_output_gathered")
    )
    x = values(8, WIDTH, device=device, seed=1)
    for a, b in zip(plain(x), gathered(x), strict=True):
        assert torch.equal(a, b)


@on_devices
def test_expected_shapes_are_taken(device: str) -> None:
    x = values(8, 2, WIDTH, device=device, seed=1)
    expecting = make("LayerNormMLP", device, seq_length=8, micro_batch_size=2)
    assert torch.equal(expecting(x), make("LayerNormMLP", device)(x))
