"""Which cuBLASLt algorithm a GEMM uses: the heuristic's first, or the fastest of those timed; and whether a kernel of
our own runs in its place.

Timing is done on request (`te_core.backends.cuda.gemm.tune`, TE_CORE_AUTOTUNE=1). Its choices are kept in a JSON
file of the cache folder, by device name, cuBLASLt version and GEMM, and used by every later process.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core import cache, device, dtypes, env, libraries
from te_core.backends.cuda import cublaslt as lt_
from te_core.backends.cuda import gemm_block
from te_core.backends.cuda.gemm_run import LtPlan, LtRoute, Prepared
from te_core.dtypes import DType
from te_core.plan_cache import drop_oldest
from te_core.quantized import pieces
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

if TYPE_CHECKING:
    from te_core.ops.gemm import GemmSpec

CANDIDATES = 16
#: A scale of one, as each scaling stores it.
_ONE = {"block": 1.0, "mxfp8": 127, "nvfp4": 0x38}
_REPEATS = 5
#: A product of our own runs where cuBLASLt takes so many times as long. Both are timed in rows of 25 ms (so many
#: operations, and at most so many products), for a GPU lowers its clock when it multiplies for long.
_GAIN, _ROW, _MOST = 1.03, 2.5e13, 100

_local = threading.local()
_lock = threading.RLock()
_store: dict[str, dict[str, Any]] | None = None
_MOST_NEIGHBOURS = _MOST_STORED = 4096


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm, the workspace it needs, and who chose it."""

    algorithm: Any
    workspace: int
    source: str


def choose(rt: Runtime, spec: GemmSpec, route: LtRoute, prepared: Prepared) -> Choice | str:
    """The algorithm for a route, or cuBLASLt's reason for having none."""
    tuning = getattr(_local, "forced", False) or env.switch("TE_CORE_AUTOTUNE")
    if _stored() and not getattr(_local, "forced", False):
        known = _stored().get(_key(rt, spec, route))
        if known is not None:
            choice = _check(prepared, bytes.fromhex(known["algorithm"]), "an earlier timing")
            if choice is not None:
                return choice
    ragged = None if tuning else _ragged_key(rt, spec, route)
    neighbours = rt.device.of(_neighbours)
    neighbour = neighbours.get(ragged)
    if neighbour is not None:
        choice = _check(prepared, neighbour, "cuBLASLt's heuristic for a size nearby")
        if choice is not None:
            return choice
    found = _heuristic(spec, route, prepared, CANDIDATES if tuning else 1)
    if ragged is not None and not isinstance(found, str):
        if len(neighbours) >= _MOST_NEIGHBOURS:
            neighbours.clear()
        neighbours[ragged] = bytes(found[0].algorithm)
    if isinstance(found, str) or not tuning or libraries.driver().is_capturing(rt.stream):
        return found if isinstance(found, str) else found[0]
    times = _time_all(rt, spec, route, prepared, found)
    best = min(range(len(found)), key=times.__getitem__)
    entry = {"algorithm": bytes(found[best].algorithm).hex(), "ms": round(times[best], 5)}
    _remember(_key(rt, spec, route), entry | {"heuristic_ms": round(times[0], 5)})
    return Choice(found[best].algorithm, found[best].workspace, f"timing {len(found)} algorithms")


def faster(rt: Runtime, plan: LtPlan) -> LtPlan | gemm_block.BlockPlan:
    """A block-scaled product's plan: cuBLASLt's, or one of our own that was faster by a _GAIN when both were timed."""
    spec, route = plan.spec, plan.route
    assert route is not None
    key, tuning = _key(rt, spec, route), getattr(_local, "forced", False)
    known = _stored().get(key, {})
    if "own_ms" in known and not tuning:
        wins, source = known["own_ms"] * _GAIN < known.get("ms", 0.0), "an earlier timing"
    elif (tuning or env.switch("TE_CORE_AUTOTUNE")) and not libraries.driver().is_capturing(rt.stream):
        own, source = gemm_block.plan(rt, spec, ""), "timing it beside cuBLASLt's"
        if own is None:
            return plan
        a, b, out, b_scale, a_scale = _operands(rt, spec, route)
        operands: Any = a, b, out, a_scale, b_scale, *[None] * 7
        count = min(_MOST, 1 + int(_ROW / (2 * spec.m * spec.n * spec.k)))

        def row(one: LtPlan | gemm_block.BlockPlan) -> None:
            for _ in range(count):
                one.run(rt, operands)

        ms, own_ms = (t / count for t in _time(rt, [partial(row, plan), partial(row, own)]))
        entry = {"algorithm": bytes(plan.algorithm).hex(), "ms": round(ms, 5), "own_ms": round(own_ms, 5)}
        _remember(key, known | entry)
        wins = own_ms * _GAIN < ms
    else:
        return plan
    return (gemm_block.plan(rt, spec, source) if wins else None) or plan


def _neighbours(device: Device) -> dict[Hashable, bytes]:
    """By _ragged_key: the algorithm of the first size of its kind."""
    return {}


def _ragged_key(rt: Runtime, spec: GemmSpec, route: LtRoute) -> Hashable:
    """What sizes share one algorithm: nearby numbers of rows that are no whole tiles, as batches of varying length
    have them. A query of the heuristic takes 200 us, a check of a known algorithm a tenth.

    M and K count rows (K in weight gradients). Whole multiples of 128 always get a query of their own.
    """
    if spec.m % 128 == 0 and spec.k % 128 == 0:
        return None
    return (replace(spec, m=0, k=0), _near(spec.m), _near(spec.k), route)


def _near(size: int) -> tuple[int, int, int]:
    """A size to within a sixteenth, and the alignment that it gives a leading dimension."""
    step = max(128, 1 << max(0, size.bit_length() - 5))
    return -(-size // step), step, min(size & -size, 16)


@contextmanager
def forced() -> Iterator[None]:
    """Time what is planned in this block, also what has a stored choice."""
    _local.forced = True
    try:
        yield
    finally:
        _local.forced = False


def _heuristic(spec: GemmSpec, route: LtRoute, prepared: Prepared, wanted: int) -> list[Choice] | str:
    lt = lt_.bindings()
    preference = lt.matmul_preference_create()
    results = ctypes.create_string_buffer(lt_.RESULT_BYTES * wanted)
    count = ctypes.c_int(0)
    try:
        lt_.set_preference(lt, preference, lt_.PREF_WORKSPACE, prepared.cache.limit, 8)
        # Partial sums of a split K stay in float32, as the contract says (in place only where that is float32).
        scheme = lt_.REDUCE_COMPUTE_TYPE | (lt_.REDUCE_IN_PLACE if route.out is dtypes.float32 else 0)
        lt_.set_preference(lt, preference, lt_.PREF_REDUCTION_MASK, scheme)
        for attribute in lt_.PREF_ALIGNMENTS:
            lt_.set_preference(lt, preference, attribute, spec.alignment)
        addresses = ctypes.addressof(results), ctypes.addressof(count)
        lt.matmul_algo_get_heuristic(*prepared.problem, preference, wanted, *addresses)
    except Exception as error:  # nvmath's error type
        if getattr(error, "status", None) not in lt_.REFUSALS:
            raise
        return str(error)
    finally:
        lt.matmul_preference_destroy(preference)
    found = []
    for i in range(count.value):
        one = results.raw[lt_.RESULT_BYTES * i : lt_.RESULT_BYTES * (i + 1)]
        workspace, status = struct.unpack_from("=Qi", one, lt_.ALGO_BYTES)
        if not status:
            found.append(Choice(_algorithm(one), workspace, "cuBLASLt's heuristic"))
    return found or "no algorithm fits"


def _algorithm(content: bytes) -> Any:
    """A copy at an address of its own: the plan keeps it."""
    return (ctypes.c_uint64 * (lt_.ALGO_BYTES // 8)).from_buffer_copy(content[: lt_.ALGO_BYTES])


def _check(prepared: Prepared, stored: bytes, source: str) -> Choice | None:
    """A stored algorithm, unless this cuBLASLt does not take it."""
    lt = lt_.bindings()
    algorithm = _algorithm(stored)
    result = ctypes.create_string_buffer(lt_.RESULT_BYTES)
    try:
        lt.matmul_algo_check(*prepared.problem, ctypes.addressof(algorithm), ctypes.addressof(result))
    except Exception as error:  # nvmath's error type
        if getattr(error, "status", None) not in lt_.REFUSALS:
            raise
        return None
    needs = struct.unpack_from("=Q", result, lt_.ALGO_BYTES)[0]
    return Choice(algorithm, needs, source) if needs <= prepared.cache.limit else None


# ---------------------------------------------------------------------------------------------- timing


def _time_all(rt: Runtime, spec: GemmSpec, route: LtRoute, prepared: Prepared, found: list[Choice]) -> list[float]:
    """Milliseconds of each algorithm on random operands."""
    operands = _operands(rt, spec, route)
    a, b, out, *rest = operands
    pair = rt.tensor(np.array([1, route.accumulate], np.float32))
    # Alpha and beta of nvfp4 are read on the device.
    alpha = pair.ptr if spec.a_format is not None and spec.a_format.scaling == "nvfp4" else 0
    scratch, pointers = rt.workspace("cublasLt", prepared.cache.limit), tuple(t.ptr for t in rest)

    def run(choice: Choice) -> None:
        prepared.algo, prepared.needs = ctypes.addressof(choice.algorithm), choice.workspace
        prepared.run(rt, a.ptr, b.ptr, out.ptr, alpha, pointers, scratch)

    return _time(rt, [partial(run, choice) for choice in found])


def _time(rt: Runtime, runs: list[Callable[[], None]]) -> list[float]:
    """Milliseconds of each: the best of a few, taken in turns."""
    driver = libraries.driver()
    with driver.on(rt.device.index):
        start, stop = driver.create_event(timing=True), driver.create_event(timing=True)
        best = [float("inf")] * len(runs)
        for repeat in range(1 + _REPEATS):
            for i, run in enumerate(runs):
                driver.record(start, rt.stream)
                run()
                driver.record(stop, rt.stream)
                elapsed = driver.elapsed_ms(start, stop)
                if repeat:  # the first round loads the kernels
                    best[i] = min(best[i], elapsed)
        driver.destroy_event(start)
        driver.destroy_event(stop)
    return best


def _operands(rt: Runtime, spec: GemmSpec, route: LtRoute) -> list[Tensor]:
    """a, b, out, and what each of the route's pointers is to point at."""
    out = rt.zeros((spec.m, spec.n), route.out)
    made = [_random(rt, (spec.m, spec.k), spec.a), _random(rt, (spec.k, spec.n), spec.b), out]
    scales = {lt_.A_SCALE_POINTER: (spec.b_format, spec.n), lt_.B_SCALE_POINTER: (spec.a_format, spec.m)}
    for attribute, _ in route.attributes:
        form, rows = scales.get(attribute, (None, 0))
        if form is not None:
            parts = pieces(form, (rows, spec.k), False)
            made.append(rt.tensor(np.full(parts.scale, _ONE[form.scaling], parts.scale_type.numpy)))
        elif attribute == lt_.AUX_POINTER:
            made.append(rt.zeros((spec.m, spec.n), route.out))
        else:  # a scale, or a vector along M or N
            made.append(rt.tensor(np.ones(max(spec.m, spec.n), np.float32)))
    return made


def _random(rt: Runtime, shape: tuple[int, int], dtype: DType) -> Tensor:
    """Normal values: zeros or ones would draw less power, and so run faster, than real data."""
    if dtype is dtypes.float4_e2m1:  # any bytes are values
        return rt.tensor(np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // 2), np.uint8))
    size = shape[0] * shape[1]
    values = np.random.default_rng(0).standard_normal(min(size, 1 << 20)).astype(np.float32)
    return rt.tensor(np.resize(values.astype(dtype.numpy), size).reshape(shape))


# ---------------------------------------------------------------------------------------------- the store


def _key(rt: Runtime, spec: GemmSpec, route: LtRoute) -> str:
    version = lt_.bindings().get_version()
    parts = [getattr(spec, name) for name in type(spec).__slots__] + [route.epilogue, route.out]
    return f"{device.info(rt.device.index).name} | {version} | " + " ".join(map(str, parts))


def store_path() -> Path:
    """The file of tuned choices."""
    return cache.place("gemm.json")


def _stored() -> dict[str, dict[str, Any]]:
    global _store
    if _store is None:
        _store = _read_store()
    return _store


def _read_store() -> dict[str, dict[str, Any]]:
    """Nothing where there is none, or a damaged one: it holds nothing that cannot be measured again."""
    return cache.read_json(store_path(), _is_store) or {}


def _is_store(content: Any) -> bool:
    return isinstance(content, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("algorithm"), str)
        and re.fullmatch(rf"[0-9a-f]{{{2 * lt_.ALGO_BYTES}}}", entry["algorithm"])
        and all(isinstance(entry.get(name, 0.0), (int, float)) for name in ("ms", "own_ms"))
        for entry in content.values()
    )


def _remember(key: str, entry: dict[str, Any]) -> None:
    """Add a choice to the file, keeping what other processes added meanwhile."""
    global _store
    with _lock:
        _store = {**_stored(), **_read_store()}
        while len(_store) >= _MOST_STORED:  # sizes that differ at every step are timed at every step, too
            drop_oldest(_store)
        _store[key] = entry
        cache.write(store_path(), json.dumps(_store, indent=1, sort_keys=True).encode())
