"""The size guards measure what they say, and the exception list can only shrink."""

from __future__ import annotations

from tools.tail_guards import LIMITS, Size, cuda_sizes, python_sizes, violations

PYTHON = """
import functools

class Layer:
    @functools.cache
    def __init__(self, a, /, b, *rest, c=1, **options):
        def inner(x):
            for i in x:
                while i:
                    pass
        with a:
            if b:
                pass
            elif c:
                pass
            else:
                try:
                    pass
                finally:
                    pass
"""

CUDA = r"""// braces in a comment { { {
#include "common/numeric.cuh"
#define LOOP(n) for (int i = 0; i < n; ++i) { \
    body(i); }
namespace te {
struct __align__(16) Pack { float v[4]; };
template <typename T, int N = sizeof(T)>
__device__ __forceinline__ T twice(T x) { return x + x; }
}  // namespace te
extern "C" __global__ void __launch_bounds__(256, 2)
scale(const float* __restrict__ x, float* y, int n) {
#if VECTOR
  for (int i = threadIdx.x; i < n; i += 256) {
#else
  for (int i = 0; i < n; ++i) {
#endif
    if (x[i] > 0) {
      const char* s = "}{";
      y[i] = x[i];
    } else if (x[i] < 0) {
      switch (i) { case 0: { y[i] = float{0}; } }
    }
  }
}
"""


def by_key(sizes) -> dict[tuple[str, str], int]:
    return {(size.rule, size.name): size.value for size in sizes}


def test_python_functions_are_measured() -> None:
    found = by_key(python_sizes("m.py", PYTHON))
    assert found["python-file", "m.py"] == PYTHON.count("\n")
    assert found["python-function", "m.py::Layer.__init__"] == 15  # from `def`, without its decorator
    assert found["parameters", "m.py::Layer.__init__"] == 3  # a, b, c
    assert found["nesting", "m.py::Layer.__init__"] == 3  # with, if, try; elif adds none, inner starts anew
    assert found["nesting", "m.py::Layer.__init__.inner"] == 2
    assert found["parameters", "m.py::Layer.__init__.inner"] == 1


def test_cuda_functions_are_measured() -> None:
    found = by_key(cuda_sizes("k.cu", CUDA))
    assert found["cuda-file", "k.cu"] == CUDA.count("\n")
    assert found["cuda-function", "k.cu::twice"] == 1
    assert found["nesting", "k.cu::scale"] == 3  # for, else if, switch
    kernel = next(s for s in cuda_sizes("k.cu", CUDA) if s.rule == "cuda-kernel")
    lines = CUDA.split("\n")
    assert kernel.name == "k.cu::scale" and lines[kernel.line - 1].startswith("scale(")
    assert lines[kernel.line + kernel.value - 2] == "}"
    assert {s.name for s in cuda_sizes("k.cu", CUDA)} == {"k.cu", "k.cu::twice", "k.cu::scale"}


def test_only_what_is_too_large_is_reported() -> None:
    top = LIMITS["parameters"]
    assert not violations([Size("parameters", "m.py::f", top, 1)], [])
    shown = violations([Size("parameters", "m.py::f", top + 1, 7)], [])
    assert shown == [f"m.py:7: parameters f: {top + 1}, limit {top}"]


def test_exceptions_can_only_shrink() -> None:
    entry = {"rule": "parameters", "where": "m.py::f", "size": 12, "reason": "a documented constructor"}
    assert not violations([Size("parameters", "m.py::f", 12, 1)], [entry])
    for value in (5, 11, 13):  # no longer needed, smaller than listed, grown
        assert len(violations([Size("parameters", "m.py::f", value, 1)], [entry])) == 1
    assert len(violations([], [entry])) == 1  # gone
    assert len(violations([Size("parameters", "m.py::f", 12, 1)], [{**entry, "reason": " "}])) == 1
    assert violations([Size("parameters", "m.py::f", 12, 1)], [entry, entry])
