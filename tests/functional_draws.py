"""Calls of `te_core.functional` with anything wrong, drawn from a seed, in memory between guard bands.

    python -m tests.functional_draws 10000 [SEED]
    python -m tests.functional_draws 1 1234 --verbose      # one draw

Each call gives a result or is refused by an error of ours, in four parts. All else is a fault: a write outside of what
may be written, an error of another kind, a crash.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import traceback
from collections import Counter
from typing import Any

import numpy as np

from te_core import dtypes
from te_core import functional as te
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core_draws import FaultError, Guarded
from tests.functional_cases import DTYPES, RECIPES, Right, right

OURS = (ArgumentError, UnsupportedError, LibraryError)
_ODD = (None, 1.5, "x", (), [1, 2], np.float32(1), object(), True, {}, np.array(["a"]), np.ma.masked_array([1.0]))
_VALUES = (None, -1, 0, 1.5, 10**30, float("nan"), "x", (1, 2), (-1, 0), True, [0], object(), "causal", "thd")
_TYPES = (np.float32, np.float16, np.float64, np.int32, np.int64, np.uint8, np.bool_, DTYPES["bf16"], np.dtype(">f4"))


class Draw:
    """One call, its memory, and what is wrong with it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.r = seed, random.Random(seed)
        self.memory = Guarded(Runtime.cpu())
        self.said: list[str] = []

    def guarded(self, array: Any, writable: bool = False) -> Any:
        """The array between guard bands."""
        if isinstance(array, list):
            return [self.guarded(part) for part in array]
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        base, at = self.memory.place("an argument", data, np.full(data.size, writable), 0)
        begin = at - base.ptr
        return base.owner[begin : begin + data.size].view(array.dtype).reshape(array.shape)

    def wrong(self, array: Any) -> Any:
        """Another array in the place of this one."""
        if isinstance(array, list) and array and self.r.random() < 0.8:
            at = self.r.randrange(len(array))
            return [*array[:at], self.wrong(array[at]), *array[at + 1 :]][: self.r.choice((None, -1))]
        if isinstance(array, list) or self.r.random() < 0.15:
            return self.r.choice(_ODD)
        kind = self.r.choice(("shape", "rank", "dtype", "strided", "read-only", "core", "values", "empty", "turned"))
        self.said.append(kind)
        if kind == "shape" and array.ndim:
            at = self.r.randrange(array.ndim)
            return np.resize(
                array, [max(0, n + (i == at) * self.r.choice((-1, 1, 7))) for i, n in enumerate(array.shape)]
            )
        if kind == "rank":
            return array[None] if self.r.random() < 0.5 else array.reshape(-1)
        if kind == "dtype":
            return array.astype(self.r.choice(_TYPES))
        if kind == "strided":
            return np.repeat(array, 2, axis=-1)[..., ::2] if self.r.random() < 0.7 else array[..., ::-1]
        if kind == "read-only":
            array = array.view()
            array.flags.writeable = False
            return array
        if kind == "core":
            device = te_device(self.r)
            return Tensor(array.ctypes.data, array.shape, dtypes.dtype(array.dtype), device, array)
        if kind == "values" and array.dtype.kind in "iu":
            return np.full_like(array, self.r.choice((-(2**31), -1, 3, 2**31 - 1)))
        if kind == "values":
            return np.full_like(array, self.r.choice((np.nan, np.inf, 0)))
        return array[:0] if kind == "empty" else array.T

    def call(self) -> None:
        """The call, its backward, and what may be wrong with both."""
        r, case = self.r, right(self.seed)
        arrays = {name: self.guarded(array) for name, array in case.arrays.items()}
        options = dict(case.options)
        recipe, scaling = case.recipe, case.scaling()
        if "turned" in case.function.layer.options and r.random() < 0.3:
            options["turned"] = True
            arrays |= {n: self.guarded(case.arrays[n].T.copy()) for n in case.function.layer.products}
        if r.random() < 0.6:
            name = r.choice([*arrays])
            arrays[name] = self.wrong(arrays[name])
            if r.random() < 0.1:
                arrays[r.choice((*arrays, "bias", "y"))] = self.wrong(np.zeros(16, np.float32))
        if r.random() < 0.15:
            names = [*case.function.layer.options, "m_splits", "seed", "recipe_", "needs"]
            options[r.choice(names)] = r.choice(_VALUES)
        if r.random() < 0.1:
            recipe = r.choice([*RECIPES.values()])
        if r.random() < 0.1:
            scaling = right(r.randrange(1000), "linear", "delayed").scaling()
        if r.random() < 0.2 and "needs" not in options:
            options["needs"] = tuple(n for n in case.arrays if r.random() < 0.5)
        if r.random() < (0.3 if case.function.layer.products else 0.02):
            options["quantized"] = self.quantized(case, arrays)
        if r.random() < 0.7:
            options["rt"] = Runtime(self.memory.plain.device, 0, self.memory, self.memory.plain.backend)
        given = {k: v for k, v in (("recipe", recipe), ("scaling", scaling)) if v is not None}
        y, back = case.function(**arrays, **{**given, **options})
        self.backward(case, y, back)
        if scaling is not None and r.random() < 0.5:
            te.update(scaling)

    def quantized(self, case: Right, arrays: dict[str, Any]) -> Any:
        """Weights quantized before, mostly right ones."""
        name = self.r.choice([n for n in arrays if "weight" in n] or [*arrays][:1])
        weight = arrays[name][0] if isinstance(arrays[name], list) and arrays[name] else arrays[name]
        recipe = case.recipe or RECIPES["current"]
        assert recipe is not None
        q = te.quantize(weight, recipe, scaling=case.scaling(), name=name)
        if self.r.random() < 0.3:
            piece = self.r.choice(("rowwise", "columnwise", "rowwise_scale", "columnwise_scale", "block"))
            setattr(q, piece, self.r.choice((None, getattr(q, self.r.choice(("rowwise", "columnwise_scale"))))))
        if self.r.random() < 0.3:
            arrays[name] = q
        return {name: q} if self.r.random() < 0.9 else self.r.choice(_ODD)

    def backward(self, case: Right, y: Any, back: te.Back) -> None:
        r = self.r
        parts = y if isinstance(y, tuple) else (y,)
        dys: list[Any] = [self.guarded(np.ones_like(np.asarray(part))) for part in parts]
        if r.random() < 0.3:
            at = r.randrange(len(dys))
            dys[at] = self.wrong(dys[at])
        options: dict[str, Any] = {}
        if r.random() < 0.3:
            name = r.choice([n for n in case.arrays if "weight" in n] or [*case.arrays])
            like = case.arrays[name]
            main = self.guarded(np.zeros(np.shape(like[0] if isinstance(like, list) else like), np.float32), True)
            main = self.wrong(main) if r.random() < 0.3 else main
            options = {"into": {name: main} if r.random() < 0.9 else r.choice(_ODD), "accumulate": r.random() < 0.5}
        if r.random() < 0.2:
            options["keep"] = True
        for _ in range(2 if r.random() < 0.1 else 1):
            back(tuple(dys) if len(dys) > 1 or r.random() < 0.1 else dys[0], **options)


def te_device(r: random.Random) -> Any:
    """The host, or a device that nobody has."""
    from te_core.tensor import CPU, Device

    return r.choice((CPU, CPU, Device("cuda", 9), Device("meta")))


def run(seed: int) -> str:
    """What came of the draw: "result" or "refused"; raises what is a fault."""
    draw = Draw(seed)
    try:
        draw.call()
        said = "result"
    except OURS as error:
        if not (error.operation and error.got and error.allowed and error.do):
            raise FaultError(f"an error without its four parts: {error}") from error
        said = "refused"
    draw.memory.check()
    return said


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    faulthandler.enable()
    found, faults = Counter[str](), 0
    for seed in range(given.seed, given.seed + given.count):
        try:
            found[run(seed)] += 1
        except Exception as error:
            faults += 1
            print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if given.verbose:
                traceback.print_exc()
    print(f"{given.count} draws: {dict(found)}, {faults} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
