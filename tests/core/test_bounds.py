"""Nothing in te_core grows without bound: every container that outlives a call is listed here with what bounds it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from te_core.backends.cuda import gemm_tune, norm_tiling
from tools.house import sources

#: Of a module or a class, and what keeps each finite. A new one has to find its place here.
BOUNDS = {
    "c_library.USERS": "packages of ours that may use the library in C",
    "c_library._loaded": "libraries that TE_CORE_LIBRARY named",
    "dtypes._BY_NAME": "our dtypes",
    "embed.doors._closers": "libraries",
    "embed.doors._things": "what C has not let go of",
    "env._told": "1000",
    "kernels.compiler._headers": "header files",
    "layers.attention._parts": "1024, the least recently used goes",
    "layers.graph.Graph.of_states": "one value, of a graph",
    "layers.graph.Graph.reach": "one value, of a graph",
    "layers.overlap_choice.measured": "one table",
    "described._done": "classes and functions of the packages",
    "layers.context.sides.planned": "1024, the least recently used goes",
    "libraries._handles": "libraries",
    "naming._renamed": "our classes",
    "ops.declare.BESIDE": "classes and functions of te_core.ops",
    "ops.declare.OPERATIONS": "operations",
    "precision._resolved": "living precisions",
    "precision.rule_of": "1024, the least recently used goes",
    "quantized.Format._known": "dtypes, scalings and their options",
    "quantized.cached_pieces": "4096, the least recently used goes",
    "tokens._by_token": "living recipes, modules, forks of trackers",
    "recipe_fields._fields": "fields of the recipe classes",
    "tape.recorder._signature": "256",
    "tape.walk._numbers": "_MOST_NUMBERS",
    "tape.walk._unknown": "types of arguments",
    "tensor.Device._known": "devices",
}
_MAKERS = {"dict", "list", "set", "OrderedDict", "defaultdict", "deque", "WeakValueDictionary", "WeakKeyDictionary"}


def _is_container(value: ast.expr | None) -> bool:
    """Whether a value is one that something is put into later."""
    if isinstance(value, (ast.Dict, ast.List, ast.Set)):
        return not (getattr(value, "keys", None) or getattr(value, "elts", None))
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func)
    return name.split(".")[-1] in _MAKERS and not value.args or name.startswith(("lru_cache", "cache(", "functools."))


def _containers(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _containers(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            if any("cache" in ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list):
                yield prefix + node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_container(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + ast.unparse(t) for t in targets if isinstance(t, ast.Name))


def test_every_container_is_listed_with_its_bound() -> None:
    found = {
        name
        for module, path in sources().items()
        if module.startswith("te_core.")
        for name in _containers(ast.parse(path.read_text()).body, module.removeprefix("te_core.") + ".")
    }
    assert found == set(BOUNDS), found ^ set(BOUNDS)


def test_numbers_that_are_named() -> None:
    assert gemm_tune._MOST_NEIGHBOURS == gemm_tune._MOST_STORED == 4096


def test_stored_choices_of_gemms_have_a_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Batches of ever new sizes under TE_CORE_AUTOTUNE=1: the first ones make room."""
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gemm_tune, "_store", None)
    monkeypatch.setattr(gemm_tune, "_MOST_STORED", 8)
    for i in range(30):
        gemm_tune._remember(f"gemm {i:03}", {"algorithm": bytes([i]).hex() * 64, "ms": 1.0})
    held = gemm_tune._read_store()
    assert len(held) == 8 and held == gemm_tune._stored() and "gemm 029" in held and "gemm 000" not in held


def test_rows_of_every_width_share_few_kernels() -> None:
    """A kernel is compiled for a tiling, never for a width: of 16,384 widths a few hundred."""
    tilings = set()
    for cols in range(1, 16_385):
        width = norm_tiling.vector_width(cols, 0, (2,), 8)
        team = norm_tiling.forward_team(cols, width, 2)
        tilings.add((width, team.size, team.iters))
    assert len(tilings) < 300, len(tilings)
