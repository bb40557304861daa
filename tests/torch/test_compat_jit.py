"""The documented module `jit`: what is left out of compiled programs, and functions that have nothing to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError


@pytest.fixture
def jit() -> Iterator[Any]:
    """Without the alias: classes say where they are of."""
    import te_torch.compat

    te_torch.compat.uninstall()
    from te_torch.compat import jit

    yield jit


def graphs(call: Callable[..., Any], *args: Any) -> tuple[int, list[str]]:
    """In how many programs a function compiles, and what was warned of."""
    count = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.compile(call, backend=backend)(*args)
    return count, [str(w.message) for w in seen if "Falling back" in str(w.message)]


def test_functions_that_compilers_leave_out(jit: Any) -> None:
    traced = []

    def twice(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return x * by

    x = torch.randn(4)
    plain, out = (lambda x: twice(x + 1) - 1), jit.no_torch_dynamo()(twice)
    assert out.__name__ == "twice" and torch.equal(out(x), 2 * x)
    assert graphs(plain, x) == (1, [])
    traced.clear()
    assert graphs(lambda x: out(x + 1) - 1, x) == (2, []), "before it and behind it"
    assert traced == [False]


def test_calls_that_compilers_leave_out(jit: Any) -> None:
    asked = lambda call: "by 3 it is not traced" if call.get("by") == 3.0 else None  # noqa: E731

    @jit.no_torch_dynamo(when=asked)
    def times(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by

    x = torch.randn(4)
    assert torch.equal(times(x, 3.0), 3 * x)
    assert graphs(lambda x: times(x + 1) - 1, x) == (1, [])
    count, said = graphs(lambda x: times(x + 1, by=3.0) - 1, x)
    assert count == 2 and {text.partition(": ")[2] for text in said} == {"by 3 it is not traced"}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(lambda x: times(x, 3.0), backend="eager", fullgraph=True)(x)
    with pytest.raises(ArgumentError, match="named arguments"):
        jit.no_torch_dynamo(when=asked)(lambda *args: args)


def test_functions_of_layers(jit: Any) -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    norm = x.float() / (x.float().square().sum(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(jit.l2normalization_fused(x, 0.1), norm.bfloat16())
    assert jit.set_jit_fusion_options() is None
    assert jit.warmup_jit_bias_gelu_all_dtypes(64, 32, 2) is None
