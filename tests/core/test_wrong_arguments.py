"""What a stranger's first call gets wrong, over every operation and layer: an error in four parts, and no other.

Each argument of a right call in turn becomes what it is often mistaken for (tests/core/face.py has the calls).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.arguments import explained
from te_core.errors import ArgumentError
from te_core.layers import linear, norm
from te_core.ops import raw
from te_core.ops.quantize import ScalingState
from te_core.quantize.state import Scales
from te_core.quantized import Cast, QuantizedTensor
from te_core.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core import face

CPU = Runtime.cpu()
OPERATIONS = face.operations(CPU)
LAYERS = {
    f"{name} {type(recipe).__name__}": right
    for recipe in (DelayedScaling(), NVFP4BlockScaling())
    for name, right in face.layers(CPU, recipe).items()
    if recipe.delayed() or "linear" in name or "mlp" in name
}
CALLS = {**OPERATIONS, **LAYERS}
FOUR_PARTS = re.compile(r"^[\w. ()]+: got .+\. Allowed: .+\. To do: .+\.$", re.DOTALL)


#: What a call does not read: the inverse of what is written, the draws that backward takes, states for a later run.
UNREAD = re.compile(
    r"attention_fp8_forward-scales-\[4\] \[1\]|attention_fp8_backward-scales-\[[789]\] \[1\]"
    r"|(linear|mlp) forward NVFP4BlockScaling-[468]-|plan_update-1"
)


class NotOurs:
    """Has nothing that anything of ours has."""


def mistakes(value: Any) -> dict[str, Any]:
    """What is passed in the place of a right argument."""
    if isinstance(value, Tensor):
        array = np.zeros(value.shape, np.float32)
        return {"an array": array, "a list": array.tolist(), "an object": NotOurs()}
    if isinstance(value, QuantizedTensor):
        return {"an array": np.zeros(value.shape, np.float32), "a plain tensor": face.tensor(CPU, *value.shape)}
    if isinstance(value, Runtime):
        return {"None": None, "a device's name": "cuda", "a class": Runtime}
    if isinstance(value, Cast):
        return {"a dtype": dtypes.float8_e4m3, "a recipe": Float8CurrentScaling()}
    if isinstance(value, Scales):
        return {"a dictionary": {}, "an array": np.ones(6, np.float32)}
    if is_dataclass(value) and not isinstance(value, (type, ScalingState)):
        return {"None": None, "a recipe": DelayedScaling(), "an object": NotOurs()}
    if isinstance(value, ScalingState):
        return {"an object": NotOurs()}
    if isinstance(value, str):
        return {"another name": "no such name", "None": None, "a number": 3}
    return {}


def nested(value: Any) -> Iterator[tuple[str, Any]]:
    """(where, the argument with one mistake in it) for an argument and all that stands in it."""
    for name, wrong in mistakes(value).items():
        yield name, wrong
    if isinstance(value, (list, tuple)) and "Saved" not in type(value).__name__:
        for i, part in enumerate(value):
            for name, wrong in nested(part):
                changed = [*value[:i], wrong, *value[i + 1 :]]
                made = type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
                yield f"[{i}] {name}", made


def refusal(right: face.Right, key: int | str, wrong: Any) -> ArgumentError | Exception | None:
    """What a call raises whose argument at `key` is wrong."""
    args, options = list(right.args), dict(right.options)
    place: Any = args if isinstance(key, int) else options
    place[key] = wrong
    try:
        right.function(*args, **options)
    except Exception as error:
        return error
    return None


def arguments(right: face.Right) -> Iterator[tuple[int | str, Any]]:
    """Each argument of a call, by its position or name."""
    yield from enumerate(right.args)
    yield from right.options.items()


def is_explained(error: Exception | None) -> bool:
    return isinstance(error, ArgumentError) and bool(FOUR_PARTS.match(str(error)))


@pytest.mark.parametrize("calls", [OPERATIONS, LAYERS], ids=["operations", "layers"])
def test_a_wrong_argument_is_explained(calls: dict[str, face.Right]) -> None:
    errors = {
        f"{call}-{key}-{name}": refusal(right, key, wrong)
        for call, right in calls.items()
        for key, value in arguments(right)
        for name, wrong in nested(value)
        if not UNREAD.match(f"{call}-{key}-{name}".removeprefix("grouped_").removeprefix("norm_"))
    }
    assert len(errors) > 400
    assert {place: error for place, error in errors.items() if not is_explained(error)} == {}


def test_the_calls_are_all_there_are() -> None:
    """And right: nothing public is left out, and each runs."""
    assert set(OPERATIONS) | face.NO_TENSORS == set(ops.__all__)
    for right in CALLS.values():
        right.run()


@pytest.mark.parametrize("calls", [OPERATIONS, LAYERS], ids=["operations", "layers"])
def test_nothing_in_the_place_of_an_argument(calls: dict[str, face.Right]) -> None:
    """Where it may be left out the call runs; elsewhere it is explained. So is what forward should have kept."""
    errors = {}
    for call, right in calls.items():
        for key, value in arguments(right):
            errors[f"{call}-{key}"] = refusal(right, key, None)
            if "Saved" in type(value).__name__ and hasattr(value, "_fields"):
                for name in value._fields:
                    errors[f"{call}-{key}-{name}"] = refusal(right, key, value._replace(**{name: None}))
    assert len(errors) > 150
    assert {place: error for place, error in errors.items() if error is not None and not is_explained(error)} == {}


# ------------------------------------------------------------------------------------------ what was met most


@pytest.mark.parametrize("dtype", [np.float32, "float32", np.dtype("float32"), "torch.float32"], ids=str)
def test_a_spec_takes_every_name_of_a_dtype(dtype: Any) -> None:
    needs = linear.Needs(True, True, True)
    assert linear.LinearSpec(dtype, None, needs) == linear.LinearSpec(dtypes.float32, None, needs)
    assert linear.LinearSpec(dtype, None, needs, weight_dtype=dtype).weight_dtype is dtypes.float32
    assert norm.NormSpec(dtype, "RMSNorm", 0.0).dtype is dtypes.float32


@pytest.mark.parametrize("dtype", [np.float32, "float32", np.dtype("float32")], ids=str)
def test_memory_is_asked_for_with_every_name_of_a_dtype(dtype: Any, rt: Runtime) -> None:
    for make in (rt.empty, rt.zeros):
        assert make((2, 3), dtype).dtype is dtypes.float32 and make([2, 3], dtype).shape == (2, 3)
    assert not rt.numpy(rt.zeros((4,), dtype)).any()


def test_kinds_with_parameters_are_looked_for() -> None:
    """A `dict[str, int]` is a dict; Python 3.10 takes such a hint for a type and fails where it is one."""

    @explained
    def total(table: dict[str, int], weight: Callable[[int], int]) -> int:
        return sum(weight(n) for n in table.values())

    assert total({"a": 2}, abs) == 2
    with pytest.raises(ArgumentError, match="table"):
        total([2], abs)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="weight"):
        total({"a": 2}, 3)  # type: ignore[arg-type]


def test_another_failure_stays_what_it_is() -> None:
    """Of right arguments nothing is wrong: the error is not explained away."""

    class Broken:
        """An allocator that runs out."""

        def empty(self, *_: Any) -> Any:
            raise MemoryError("all gone")

    x = face.tensor(CPU, 4, 16)
    with pytest.raises(MemoryError, match="all gone"):
        ops.add(Runtime.cpu(Broken()), x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        ops.add(CPU, x, x, where=3)  # type: ignore[call-arg]


def test_our_own_callers_do_not_pay() -> None:
    """Layers and adapters call operations, and torch's modules layers, without the look at what fails."""
    root = Path(face.__file__).parents[2]
    for path in (*(root / "te_core").rglob("*.py"), *(root / "te_torch").rglob("*.py")):
        if path.parts[-2:] != ("ops", "__init__.py"):
            assert not re.search(r"^\s*from te_core import .*\bops\b", path.read_text(), re.MULTILINE), path
    assert all(hasattr(getattr(ops, name), "__wrapped__") for name in OPERATIONS)
    assert not any(hasattr(getattr(raw, name), "__wrapped__") for name in OPERATIONS)
