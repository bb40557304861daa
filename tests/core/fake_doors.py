"""What the player in C calls of CUDA's libraries, as addresses that lead to a machine that is not there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

_LAUNCH = ctypes.CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
_FILL = ctypes.CFUNCTYPE(c_int, c_uint64, c_ubyte, c_size_t, c_void_p)
_MATMUL = ctypes.CFUNCTYPE(c_int, *[c_void_p] * 16)
_SET = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_size_t)


class Doors:
    """In the place of `native.doors`. `machine`: a `fake_cuda.Machine`."""

    def __init__(self, machine: Any) -> None:
        self.calls = 0

        def noted(function: Callable[[], Callable[..., Any]]) -> Callable[..., int]:
            def called(*arguments: int | None) -> int:
                self.calls += 1
                try:
                    return function()(*[argument or 0 for argument in arguments]) or 0
                except Exception as error:  # C knows none
                    return int(getattr(error, "status", 719))

            return called

        self._functions = (
            _LAUNCH(noted(lambda: machine.binding.launchKernel)),
            _FILL(noted(lambda: machine.lib.cuMemsetD8Async)),
            _MATMUL(noted(lambda: machine.lt.matmul)),
            _SET(noted(lambda: machine.lt.matmul_desc_set_attribute)),
        )

    def __call__(self, products: bool) -> tuple[int, ...]:
        found = [ctypes.cast(function, c_void_p).value or 0 for function in self._functions]
        return tuple(found if products else found[:2])
