"""What a device can do. Dispatch, the doctor and the documentation ask the same predicates.

Every predicate takes a `DeviceInfo` (make one by hand to ask about a device that is not here) and answers
`(bool, reason)`; the reason says why not, or what makes it work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from te_core import dtypes, libraries
from te_core.quantized import Format
from te_core.tensor import Device, cuda_device

Answer = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One CUDA device, as far as decisions depend on it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    driver: tuple[int, int]  # the CUDA version it supports
    cublaslt: tuple[int, ...] = (13, 1, 0)  # the version in use; newest known where it is not loaded

    @property
    def compute(self) -> str:
        """The compute capability, in words."""
        return "{}.{}".format(*self.capability)

    @property
    def architecture(self) -> str:
        """The generation's name."""
        return {8: "Ada" if self.capability == (8, 9) else "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}.get(
            self.capability[0], "unknown"
        )


def info(index: int = 0) -> DeviceInfo:
    """A device of this machine. Asks the driver once; makes no context and loads no library but the driver."""
    return cuda_device(index).of(_asked)


def _asked(device: Device) -> DeviceInfo:
    driver, index = libraries.driver(), device.index
    return DeviceInfo(
        driver.name(index),
        (driver.attribute(index, "major"), driver.attribute(index, "minor")),
        driver.attribute(index, "multiprocessors"),
        driver.attribute(index, "l2_bytes"),
        driver.memory(index),
        libraries.driver_version(),
    )


def supported(device: DeviceInfo) -> Answer:
    """Whether te_core runs there at all."""
    return _at_least(device, (8, 0))


def fp8_supported(device: DeviceInfo) -> Answer:
    """FP8 matrix products with one scale a tensor."""
    return _at_least(device, (8, 9))


def fp8_block_supported(device: DeviceInfo) -> Answer:
    """FP8 products with a scale for each 1x128 or 128x128 block."""
    if device.capability[0] != 9:
        return False, f"cuBLASLt has 128-blocks on compute capability 9.x only, this is {device.compute}"
    return _library(device, (12, 9))


def mxfp8_supported(device: DeviceInfo) -> Answer:
    """FP8 products with a power-of-two scale for each 32 elements."""
    able, reason = _at_least(device, (10, 0))
    if able and device.capability[0] >= 12:
        return False, f"cuBLASLt restricts MXFP8 on compute capability {device.compute}, and nobody has tried it"
    return _untried(_library(device, (12, 8))) if able else (able, reason)


def nvfp4_supported(device: DeviceInfo) -> Answer:
    """FP4 products with an E4M3 scale for each 16 elements."""
    able, reason = _at_least(device, (10, 0))
    return _untried(_library(device, (12, 8))) if able else (able, reason)


def gemm_supported(device: DeviceInfo, a: Format, b: Format) -> Answer:
    """Matrix products of two quantized operands."""
    if a.scaling != b.scaling:
        return False, f"no product mixes the scales of {a} and {b}"
    if a.dtype is b.dtype is dtypes.float8_e5m2:
        return False, "no tensor core multiplies E5M2 by E5M2"
    if a.row_scaled or b.row_scaled:
        return False, "cuBLASLt takes one factor a product, not one a row"
    if a.scaling == "block" and a.tiled and b.tiled:
        return False, "cuBLASLt takes 128x128 tiles for one operand only"
    return _PRODUCTS[a.scaling](device)


def _at_least(device: DeviceInfo, capability: tuple[int, int]) -> Answer:
    wanted = f"{capability[0]}.{capability[1]}"
    if device.capability >= capability:
        return True, f"compute capability {device.compute} (needs {wanted})"
    return False, f"needs compute capability {wanted}, this is {device.compute}"


def _library(device: DeviceInfo, version: tuple[int, ...]) -> Answer:
    wanted, here = ".".join(map(str, version)), ".".join(map(str, device.cublaslt))
    if device.cublaslt >= version:
        return True, f"cuBLASLt {here} (needs {wanted})"
    return False, f"needs cuBLASLt {wanted}, this is {here}"


def _untried(answer: Answer) -> Answer:
    """What follows from the documentation alone."""
    able, reason = answer
    return able, f"{reason}; not run on hardware" if able else reason


#: What the products of a scaling ask of the device.
_PRODUCTS: dict[str, Callable[[DeviceInfo], Answer]] = {
    "tensor": fp8_supported,
    "block": fp8_block_supported,
    "mxfp8": mxfp8_supported,
    "nvfp4": nvfp4_supported,
}


# ---------------------------------------------------------------------------------------------- the table

#: What a recipe asks of the device.
RECIPES: dict[str, Callable[[DeviceInfo], Answer]] = {
    "float32 / tf32": supported,
    "bfloat16 / float16": supported,
    "DelayedScaling": fp8_supported,
    "Float8CurrentScaling": fp8_supported,
    "Float8BlockScaling": fp8_block_supported,
    "MXFP8BlockScaling": mxfp8_supported,
    "NVFP4BlockScaling": nvfp4_supported,
}

#: What this version of the runtime has built, by recipe: an operation joins when it works on both backends.
_PLAIN = ("gemm", "norm", "activation", "elementwise")
_CAST = ("gemm", "norm", "activation", "quantize")
BUILT: dict[str, tuple[str, ...]] = {
    "float32 / tf32": _PLAIN,
    "bfloat16 / float16": _PLAIN,
    "DelayedScaling": _CAST,
    "Float8CurrentScaling": _CAST,
    "Float8BlockScaling": _CAST,
    "MXFP8BlockScaling": _CAST,
    "NVFP4BlockScaling": _CAST,
}
#: Recipes whose products only run on Blackwell, and can be emulated elsewhere: all their other operations run there.
EMULATED = ("MXFP8BlockScaling", "NVFP4BlockScaling")
OPERATIONS = ("gemm", "norm", "activation", "quantize", "elementwise")


def can(device: DeviceInfo, recipe: str, operation: str) -> Answer:
    """Whether an operation runs in a recipe on a device."""
    anywhere = recipe in EMULATED and operation != "gemm"
    able, reason = (supported if anywhere else RECIPES[recipe])(device)
    if able and operation not in BUILT[recipe]:
        plain = operation in ("quantize", "elementwise")
        return False, "not part of this recipe" if plain and BUILT[recipe] else "not built in this version"
    return able, reason


def cpu_table() -> dict[str, dict[str, Answer]]:
    """The same for the reference backend, which computes every recipe."""
    why = {recipe: "exact emulation, bit for bit" if "quantize" in built else "" for recipe, built in BUILT.items()}
    return {recipe: {op: (op in BUILT[recipe], why[recipe]) for op in OPERATIONS} for recipe in RECIPES}


def gemm_table(device: DeviceInfo) -> dict[str, Answer]:
    """Whether each recipe's matrix products run on a device."""
    return {recipe: can(device, recipe, "gemm") for recipe in RECIPES}


def table(device: DeviceInfo) -> dict[str, dict[str, Answer]]:
    """Recipe x operation for a device."""
    return {recipe: {op: can(device, recipe, op) for op in OPERATIONS} for recipe in RECIPES}
