"""What the ranks of a group compare before they first run a layer together, and how they are told what differs.

A rank's facts are words by name: the layer, its operands, and all that its spec says. Ranks exchange a digest of them,
and the facts themselves only where digests differ. What follows from one rank alone, and changes no result, is no fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.precision import Operand
from te_core.quantized import Format

Facts = Mapping[str, str]

#: Fields that a rank may have for itself: what a region reports or refuses, how and on which stream a kernel runs, the
#: longest of sequences (which is another one in each step).
_OWN = frozenset(
    ("check_finite", "strict", "emulate", "forward_margin", "backward_margin", "deterministic", "max_q", "max_kv")
    + ("stream",)
)
#: Fields whose names say nothing to who reads the difference, and those that recipes and constructors name otherwise.
_SAID = {
    "linear": "",
    "precision": "",
    "parallel": "",
    "power_of_two": "power_of_two (use_power_2_scales)",
    "transform": "transform (disable_rht)",
    "stochastic": "stochastic (disable_stochastic_rounding)",
    "tiled": "tiled (scaling of dimension 2)",
    "eps": "epsilon",
}
_SHOWN = 6  # differences in an error
_TENSOR = "tensor parallelism"


def meet(rt: Any, comm: Any, layer: str, spec: Any, operation: str = _TENSOR, /, **operands: Any) -> None:
    """At the first call on this communicator, see that all ranks run the same: the layer, what its spec says, which
    operands it has, and their shapes. What they have agreed on before they do not compare again: a rank that alone has
    made its call anew would wait for the others."""
    if not comm.met:
        given = {name: "none" if t is None else f"{tuple(t.shape)}" for name, t in operands.items()}
        agree_once(rt, comm, {"layer": layer, **given, **dict(facts_of(spec)), **comm.around}, operation)
        comm.met = True


def agree_once(rt: Any, comm: Any, facts: Facts, operation: str = _TENSOR) -> None:
    """Raise on every rank where the ranks' facts differ. Facts that they have compared before cost no exchange."""
    text = repr(facts)
    if text not in comm.agreed:
        comm.agree(rt, operation, facts)
        comm.agreed.add(text)


def facts_of(spec: Any, *path: str) -> Iterator[tuple[str, str]]:
    """What a spec (a dataclass, or a tuple with names) says, part by part."""
    split = getattr(spec, "parallel", None)
    if split is not None and split.sequence:  # what an inspector leaves plain travels in high precision
        plain = [f"{tensor} of {gemm} left plain" for gemm, tensor in sorted(spec.plain)]
        yield _name(*path, "inspected"), "no" if spec.inspect is None else ", ".join(("yes", *plain))
    names = spec._fields if hasattr(spec, "_fields") else [f.name for f in fields(spec) if f.compare]
    for name in names:
        if name in _OWN or name == "inspect" or (name == "bias" and path[-1:] == ("needs",)):
            continue
        where, value = (*path, name), getattr(spec, name)
        yield _name(*where), words(value)
        if is_dataclass(value) or hasattr(value, "_fields"):
            yield from facts_of(value, *where)


def _name(*path: str) -> str:
    return " ".join(said for part in path if (said := _SAID.get(part, part))) or path[-1]


def words(value: Any) -> str:
    """A value in words that are those of every rank with an equal one: no addresses."""
    if isinstance(value, np.generic):
        value = value.item()
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return repr(plain(value))
    if isinstance(value, (DType, Format)):
        return repr(value)
    if isinstance(value, Operand):
        return f"{value.format} by {value.scaling} scaling"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"({', '.join(map(words, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(words, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{words(k)}: {words(v)}' for k, v in value.items()))}}}"
    if isinstance(value, partial):
        return f"{words(value.func)} of {words(value.args)} {words(value.keywords)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return "none" if value is None else type(value).__qualname__


def disagreement(operation: str, ranks: Sequence[Facts]) -> ArgumentError:
    """The error of ranks that do not run the same, alike on each of them: what differs, and which rank has what."""
    names = list(dict.fromkeys(name for facts in ranks for name in facts))
    differing = [name for name in names if len({facts.get(name) for facts in ranks}) > 1]
    everywhere = [name for name in differing if all(name in facts for facts in ranks)]
    told = everywhere or differing  # parts of what only some ranks have say less than that these have it
    lines = [f"{name}: {_by_rank([facts.get(name, 'none') for facts in ranks])}" for name in told[:_SHOWN]]
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    layers = sorted({facts.get("layer", "a layer") for facts in ranks})
    return ArgumentError(
        operation,
        f"ranks that differ in what they run ({' and '.join(layers)}). {'; '.join(lines)}{more}",
        "the same module with the same options, in the same recipe and mode, and with inputs of the same shape, on all "
        "ranks of a group",
        "give all ranks alike what differs here (an environment variable may be a recipe's default), or look for ranks "
        "that call their modules in different orders",
    )


def _by_rank(values: Sequence[str]) -> str:
    """Each value with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in found.items()
    )
