"""What a checkpoint may not bring into FP8 state: scales that no number can be multiplied with, lying histories."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling
from tests.backends import on_devices
from tests.covering import covering
from tests.world import differences, fp8_state, make, step, values

ENTRIES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
INF, NAN = float("inf"), float("nan")
BAD = {
    f"{name} {value}": (name, value)
    for names, bad in ((ENTRIES[::2], (NAN, 0.0, -1.0, INF, -INF)), (ENTRIES[1::2], (NAN, -1.0, -INF)))
    for name in names
    for value in bad
}


def ran(device: str = "cpu", prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A module with state, and its checkpoint."""
    module = make("Linear", device)
    step(module, values(16, 48, device=device), DelayedScaling(amax_history_len=4))
    return module, {prefix + name: t.clone() for name, t in module.state_dict().items()}


def spoil(t: torch.Tensor, value: float) -> torch.Tensor:
    bad = t.clone()
    bad.view(-1)[1] = value
    return bad


def by_state_dict(name: str, value: float, device: str, **options: Any) -> None:
    module, saved = ran(device, "a.")
    key = f"a.fp8_state.{name}"
    torch.nn.ModuleDict({"a": module}).load_state_dict({**saved, key: spoil(saved[key], value)}, **options)


def by_state_dict_of_the_state(name: str, value: float, device: str) -> None:
    module, _ = ran(device)
    saved = module.fp8_state.state_dict()
    module.fp8_state.load_state_dict({**saved, name: spoil(saved[name], value)})


def by_peer(name: str, value: float, device: str) -> None:
    module, saved = ran(device)
    state = {entry: saved.pop(f"fp8_state.{entry}").cpu() for entry in ENTRIES}
    module.load_state_dict({**saved, "_extra_state": pickle.dumps({**state, name: spoil(state[name], value)})})


def by_reset(name: str, value: float, device: str) -> None:
    module, _ = ran(device)
    taken = module.get_fp8_meta_tensors()
    tensors = taken[f"scaling_{name[-3:]}"]
    at = 0 if name.startswith("scale") else 1
    tensors[at] = spoil(tensors[at], value)
    module.reset_fp8_meta_tensors(taken)


def by_whole_module(name: str, value: float, device: str) -> None:
    module, _ = ran(device)
    with torch.no_grad():
        getattr(module.fp8_state, name).view(-1)[1] = value
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    torch.load(file, weights_only=False)


ROUTES: dict[str, Callable[[str, float, str], None]] = {
    "state_dict": by_state_dict,
    "assign": lambda *a: by_state_dict(*a, assign=True),
    "not strict": lambda *a: by_state_dict(*a, strict=False),
    "the state's own": by_state_dict_of_the_state,
    "the peer's": by_peer,
    "reset_fp8_meta_tensors": by_reset,
    "whole module": by_whole_module,
}


@on_devices
@covering(bad=BAD, route=ROUTES)
def test_unusable_values_are_refused_by_name(bad: str, route: str, device: str) -> None:
    name, value = BAD[bad]
    with pytest.raises(ArgumentError, match=rf"{name}.*\[(0, )?1\] is {value}.*To do: ") as caught:
        ROUTES[route](name, value, device)
    if route in ("state_dict", "assign"):
        assert f"a.fp8_state.{name}" in str(caught.value)
    if route == "the peer's":
        assert "_extra_state" in str(caught.value)


@pytest.mark.parametrize("assign", [False, True])
def test_a_refused_checkpoint_leaves_the_state_alone(assign: bool) -> None:
    module, saved = ran()
    before = fp8_state(module)
    saved = {name: t * 2 for name, t in saved.items()}
    with pytest.raises(ArgumentError):
        module.load_state_dict({**saved, "fp8_state.scale_bwd": torch.full((2,), NAN)}, assign=assign)
    assert not differences(fp8_state(module), before)


def test_a_scale_that_float32_cannot_hold() -> None:
    """Looked at as what it becomes."""
    module, saved = ran()
    for value in (1e300, 1e-300):
        with pytest.raises(ArgumentError, match="scale_fwd"):
            module.load_state_dict({**saved, "fp8_state.scale_fwd": torch.full((3,), value, dtype=torch.float64)})
    module.load_state_dict({**saved, "fp8_state.scale_fwd": torch.full((3,), 2.0, dtype=torch.float64)})
    assert module.fp8_state.scale_fwd.tolist() == [2, 2, 2]


@on_devices
def test_an_infinity_in_a_history_is_honest(device: str) -> None:
    """A step that overflowed leaves one, and the update passes over it: such a checkpoint loads and trains on."""
    module, _ = ran(device)
    x = values(16, 48, device=device)
    x[0, 0] = INF
    step(module, x, DelayedScaling(amax_history_len=4))
    saved = module.state_dict()
    assert torch.isinf(saved["fp8_state.amax_history_fwd"]).any()
    fresh = make("Linear", device)
    fresh.load_state_dict(saved)
    again = values(16, 48, device=device)
    assert not differences(
        step(fresh, again, DelayedScaling(amax_history_len=4)), step(module, again, DelayedScaling(amax_history_len=4))
    )


def test_a_nan_in_the_data_leaves_no_mark_in_what_is_saved() -> None:
    """So no checkpoint of ours is refused for what training did."""
    module, _ = ran()
    step(module, values(16, 48) * NAN, DelayedScaling(amax_history_len=4))
    make("Linear").load_state_dict(module.state_dict())


def test_the_first_scale_of_a_tiny_weight_is_finite() -> None:
    """What is written to weights held quantized starts at the scale of its own maximum, which float32 may not hold."""
    with te.quantized_model_init(recipe=DelayedScaling()):
        module = te.Linear(32, 32, device="cpu")
    with torch.no_grad():
        module.weight.fill_(1e-42)
    scales = module.fp8_state.scale_fwd
    assert torch.isfinite(scales).all() and scales[1] > 1e38
    te.Linear(32, 32, device="cpu").load_state_dict({**te.plain_state_dict(module)})


# ------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("route", ["ours", "the peer's"])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_history_without_columns_makes_no_memory(has_state: bool, route: str) -> None:
    """A million million rows of nothing are a few bytes in a file; a state of so many rows is not made for them."""
    module = ran()[0] if has_state else make("Linear")
    plain = {name: t for name, t in module.state_dict().items() if "fp8_state" not in name}
    shapes = {"scale_fwd": (0,), "amax_history_fwd": (1 << 40, 0), "scale_bwd": (0,), "amax_history_bwd": (1 << 40, 0)}
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    entry: dict[str, Any] = {f"fp8_state.{name}": t for name, t in state.items()}
    if route == "the peer's":
        entry = {"_extra_state": pickle.dumps({n: t if t.ndim == 1 else Hollow(t.shape) for n, t in state.items()})}
    with pytest.raises((ArgumentError, RuntimeError), match=r"size mismatch|cannot be read safely"):
        module.load_state_dict({**plain, **entry})


class Hollow:
    """Pickles as a tensor of this shape over a storage of three numbers."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __reduce__(self) -> Any:
        storage = torch.ones(3)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(self.shape), (1, 1), False, {})


def test_a_history_that_is_one_row_repeated_is_refused() -> None:
    """torch.load makes it of a file of 12 bytes; the state would be of the size that it claims."""
    module, saved = ran()
    saved["fp8_state.amax_history_fwd"] = torch.zeros(1, 3).expand(1 << 34, 3)
    for target in (module, make("Linear")):
        with pytest.raises(ArgumentError, match="fp8_state.amax_history_fwd.*contiguous"):
            target.load_state_dict(saved)
    saved["fp8_state.amax_history_fwd"] = torch.ones(3, 5).t()  # columns one behind another are as good
    module.load_state_dict(saved)
    assert module.fp8_state.amax_history_fwd.tolist() == [[1, 1, 1]] * 5


def test_reset_takes_what_get_gave_and_nothing_broadcast() -> None:
    module, _ = ran()
    taken = module.get_fp8_meta_tensors()
    before = fp8_state(module)
    cases: list[Any] = [
        {**taken, "scaling_fwd": [torch.ones(1), taken["scaling_fwd"][1]]},
        {**taken, "scaling_fwd": taken["scaling_fwd"][:1]},
        {**taken, "scaling_bwd": [*taken["scaling_bwd"], torch.ones(2)]},
        {"scaling_fwd": taken["scaling_fwd"]},
        {**taken, "scaling_bwd": [1.0, 2.0]},
        [],
    ]
    for case in cases:
        with pytest.raises(ArgumentError, match="reset_fp8_meta_tensors"):
            module.reset_fp8_meta_tensors(case)
        assert not differences(fp8_state(module), before)
