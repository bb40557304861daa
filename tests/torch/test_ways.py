"""Every way of running a module gives the bits of the eager, interpreted run: outputs, gradients, scaling state,
weights, and the next random number. What a way has of its own is tested in its file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests import recipes
from tests.backends import devices
from tests.recordings import tapes
from tests.tolerances import DB, snr_db
from tests.ways import MODULES, WAYS, Script, made, run

KINDS = (None, *recipes.KINDS)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def cases() -> Iterator[Any]:
    """Each way with each module that it takes, in one recipe and dtype; in all of them by --full. Of a compiled way
    `make test` has each third module, `make test-more` the others."""
    for device, way, (j, name) in product(devices(), WAYS, enumerate(MODULES)):
        chosen = WAYS[way]
        more = MODULES[name].recipes if device == "cpu" else ()  # on a GPU for heads of 128
        # On CUDA a compiler's draws from torch's own generator are others than eager code's.
        compiled = device == "cuda" and "compiled" in way
        if compiled and "dropout" in name:
            continue
        drawn = ("nvfp4",) if compiled else ()
        taken = [
            both for both in product((*KINDS, *more), DTYPES) if chosen.takes(name, *both) and both[0] not in drawn
        ]
        brief = [both for both in taken if not chosen.often or name in chosen.often and both[0] in chosen.recipes]
        picked = brief[(zlib.crc32(way.encode()) + 7 * j) % len(brief)] if brief else None
        for recipe, dtype in taken:
            rare = [pytest.mark.more] if "compiled" in way and j % 3 else []  # seconds each
            marks = rare if (recipe, dtype) == picked else [pytest.mark.full]
            case = (way, name, recipe, dtype, device)
            yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))


@pytest.mark.parametrize(("way", "name", "recipe", "dtype", "device"), cases())
def test_bits_of_the_eager_run(way: str, name: str, recipe: str | None, dtype: str, device: str) -> None:
    chosen = WAYS[way]
    script = Script(MODULES[name], DTYPES[dtype], device, **chosen.script)
    results: list[dict[str, Any]] = []
    for how, when in ((run, "never"), (chosen.run, chosen.tapes)):
        with tapes(when) as ran:
            results.append(how(made(script, recipe), script, recipe))
    wanted, got = {key: value for key, value in results[0].items() if key.startswith(chosen.gives)}, results[1]
    assert got.keys() == wanted.keys()
    other = [key for key in wanted if got[key] != wanted[key]]
    if device == "cuda" and any(part in name for part in ("Attention", "Transformer", "Decoder")):
        # Attention's backward adds in any order.
        floor = DB[{None: "bf16 attention block", "nvfp4": "nvfp4 attention"}.get(recipe, "fp8 attention dq")]
        exact = ("0.0 y", "next random number")
        other = [key for key in other if key in exact or snr_db(numbers(got[key]), numbers(wanted[key])) < floor]
    assert not other
    assert ran.replayed or chosen.tapes == "never" or name == "GroupedLinear" or "compiled" in way


def numbers(found: tuple[Any, ...]) -> torch.Tensor:
    """What `bits` made bytes of."""
    dtype, shape, data = found
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


@pytest.mark.full
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", [name for name in (*recipes.RECIPES, *recipes.OVERRIDES) if name not in KINDS])
def test_replays_in_every_recipe(recipe: str, name: str, device: str) -> None:
    test_bits_of_the_eager_run("replayed at once", name, recipe, "f32", device)
