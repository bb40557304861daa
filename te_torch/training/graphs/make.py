"""`make_graphed_callables`, and the few functions around it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Recipe
from te_torch.base.module import BaseModule
from te_torch.training.graphs import arguments, schedule
from te_torch.training.graphs import device as seam
from te_torch.training.graphs.arguments import Options
from te_torch.training.graphs.device import unsupported, wrong
from te_torch.training.graphs.replay import Graphed, as_function, put_into
from te_torch.training.graphs.schedule import BACKWARD, FORWARD, Schedule
from te_torch.training.graphs.traces import Traces
from te_torch.training.graphs.unit import Unit
from te_torch.training.graphs.weights import weights_of

_capturing = False
_captures = 0  # that run now, in all threads
_before = (False, True)  # what was before the first of them: `_capturing`, whether garbage is collected
_begins_or_ends = RLock()


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Recipe | None) -> list[Any]:
    """Copies of the scales and histories in these modules, for `restore_fp8_tensors`; None for one without.

    Histories are cut first, or filled with zeros, to the length that the recipe says.
    """
    parts = _parts(modules)
    if isinstance(recipe, DelayedScaling):
        for part in parts:
            if part._scaling() is not None:
                part.adjust_amax_history_length(recipe.amax_history_len)
    return [part.get_fp8_meta_tensors() for part in parts]


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: Sequence[Any]) -> None:
    """Put back what `save_fp8_tensors` gave of these modules."""
    parts = _parts(modules)
    if len(parts) != len(fp8_tensors):
        got = f"{len(fp8_tensors)} states for {len(parts)} modules"
        allowed = "what save_fp8_tensors gave of these modules"
        raise ArgumentError("restore_fp8_tensors", got, allowed, "pass both the same modules")
    for part, saved in zip(parts, fp8_tensors, strict=True):
        part.reset_fp8_meta_tensors(saved)


def _parts(modules: Iterable[torch.nn.Module]) -> list[BaseModule]:
    return list(dict.fromkeys(part for module in modules for part in module.modules() if isinstance(part, BaseModule)))


def is_graph_capturing() -> bool:
    """Whether make_graphed_callables is warming up or capturing now, or set_capture_start() has said so."""
    return _capturing


def set_capture_start() -> None:
    """Say that a capture begins."""
    global _capturing
    _capturing = True


def set_capture_end() -> None:
    """Say that it has ended."""
    global _capturing
    _capturing = False


def graph_pool_handle() -> Any:
    """A pool of memory that graphs can share, for `pool=`."""
    return seam.device.pool()


def make_graphed_callables(
    modules: torch.nn.Module | tuple[torch.nn.Module, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[float] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Any] | None = None,
) -> Any:
    """The modules with CUDA graphs in the place of their forward and backward, captured on `sample_args`.

    A call copies its arguments, which have the shapes of the samples, into static ones and replays. Called inside
    `autocast` with the recipe given here, a replay updates FP8 states as an eager step does. A single module, or each
    of a tuple, comes back with `.forward` replaced; with `_order` (a pipeline's schedule) the result is a tuple of
    functions, one for each sample. Each has `.backward_dw()` for delayed weight gradients, and `.reset()`, which lets
    go of the graphs. Warm-up and capture change no FP8 state and no random numbers.

    cache_quantized_params: quantized weights are kept between microbatches; every call then says
    `is_first_microbatch=True` or `False`. retain_graph_in_backward: a backward may be repeated.
    clone_param_grads_on_return=False: gradients of parameters are handed out in the graph's own memory.
    _reuse_graph_input_output_buffers: microbatches that never overlap in `_order` share static inputs and outputs.
    capture_time_hooks: for each module {kind: {id: hook(module)}}, called in warm-up and capture, outside of graphs.

    Raises:
        ArgumentError: Samples, modules or the schedule do not fit together.
        UnsupportedError: There is no GPU, or a module cannot be captured.

    Returns:
        The module, a tuple of the modules, or with `_order` a tuple of functions.
    """
    given = arguments.newer({k: v for k, v in locals().items() if k in _PRECISION})
    found = arguments.check_modules(modules)
    arguments.check_ambience()
    several = isinstance(modules, tuple) or _order is not None
    samples = arguments.samples(sample_args, sample_kwargs, several)
    plan = _planned(found, len(samples), _order, _num_layers_per_chunk)
    options = Options(
        allow_unused_input,
        retain_graph_in_backward,
        clone_param_grads_on_return,
        bool(given["cache_quantized_params"]),
        _reuse_graph_input_output_buffers,
        found[0].training,
    )
    if options.reuse and _order is None:
        raise wrong("_reuse_graph_input_output_buffers without _order", "both, or none", "pass the schedule as _order")
    if options.reuse and not options.training:
        raise unsupported(
            "_reuse_graph_input_output_buffers with modules in eval mode",
            "modules that train: a backward says when buffers are free",
            "leave it out",
        )
    if not isinstance(num_warmup_iters, int) or isinstance(num_warmup_iters, bool) or num_warmup_iters < 0:
        got = f"num_warmup_iters={num_warmup_iters!r}"
        raise wrong(got, "a whole number from 0", "leave it out for 3")
    regions, hooks = arguments.hows(given, len(found)), arguments.check_hooks(capture_time_hooks, len(found))
    tensors = _static(samples, plan, options.reuse)
    seam.device.require([*(p for m in found for p in m.parameters()), *tree_leaves(tensors)])
    units = [
        Unit(found[i], sample, regions[i], options, hooks[i]) for i, sample in zip(plan.modules, tensors, strict=True)
    ]
    around = (pre_warmup_hook, post_warmup_hook)
    _capture_all(found, units, plan, num_warmup_iters, pool, around)
    if _order is not None:
        return tuple(as_function(Graphed(unit, unit.module.forward)) for unit in units)
    made = [put_into(unit.module, Graphed(unit, unit.module.forward)) for unit in units]
    return tuple(made) if isinstance(modules, tuple) else made[0]


_PRECISION = (*arguments.OLDER, *arguments.OLDER.values())


def _planned(modules: Sequence[torch.nn.Module], count: int, order: Any, layers: Any) -> Schedule:
    if order is not None:
        return schedule.of_pipeline(order, layers, len(modules), count)
    if layers is not None:
        raise wrong("_num_layers_per_chunk without _order", "both, or none", "pass _order")
    if count != len(modules):
        raise wrong(f"{count} sample_args for {len(modules)} modules", "a tuple for each module", "pass as many")
    if len(set(modules)) < len(modules):
        raise wrong(
            "a module that comes twice",
            "each module once, as its forward is replaced; or _order, which gives functions",
            "pass _order, with sample_args for each microbatch",
        )
    return schedule.in_turn(count)


def _static(samples: list[Any], plan: Schedule, reuse: bool) -> list[Any]:
    """The static inputs of each callable: the samples themselves, unless another callable has them already.

    With `reuse` a callable takes those of one of the same module whose backward comes before its forward.
    """
    taken: set[int] = set()

    def own(t: torch.Tensor) -> torch.Tensor:
        spread = any(step == 0 and n > 1 for n, step in zip(t.shape, t.stride(), strict=True))
        made = t.detach()
        if spread or t.data_ptr() in taken:
            made = made.clone(memory_format=torch.contiguous_format if spread else torch.preserve_format)
        taken.add(made.data_ptr())
        return made.requires_grad_(t.requires_grad)

    found: list[Any] = [None] * len(samples)
    free: dict[Any, list[Any]] = {}
    for what, i in plan.steps:
        leaves, spec = torch.utils._pytree.tree_flatten(samples[i])
        key = (plan.modules[i], str(spec), *[(t.shape, t.stride(), t.dtype, t.requires_grad) for t in leaves])
        if what == FORWARD:
            waiting = free.get(key) if reuse else None
            found[i] = waiting.pop(0) if waiting else torch.utils._pytree.tree_map(own, samples[i])
        elif what == BACKWARD:
            free.setdefault(key, []).append(found[i])
    return found


@contextmanager
def _capture_time(traces: Traces) -> Iterator[None]:
    """Around warm-up and capture: no garbage is collected, and afterwards everything is as before."""
    global _capturing, _captures, _before
    if not _captures:  # not in the middle of another thread's
        gc.collect()
    with _begins_or_ends:
        if not _captures:
            _before = _capturing, gc.isenabled()
        _captures += 1
        gc.disable()
        _capturing = True
    try:
        yield
    finally:
        with _begins_or_ends:
            _captures -= 1
            if not _captures:  # the last of those that overlap, in other threads
                _capturing, collects = _before
                if collects:
                    gc.enable()
        traces.put_back()


def _capture_all(
    modules: Sequence[torch.nn.Module], units: list[Unit], plan: Schedule, iterations: int, pool: Any, around: Any
) -> None:
    """Warm up and capture every callable in the order of the schedule."""
    options = units[0].options
    traces = Traces(modules, {t.device for unit in units for t in (*unit.inputs, *unit.module.parameters())})
    generators = traces.random.generators
    before, after = around
    with _capture_time(traces):
        _say_microbatch(modules, options.cached, True)
        if before is not None:
            before()
        with seam.device.warming():
            for _ in range(max(iterations, options.cached)):  # what is to be cached is known from a run
                _run_all(units, plan)
        if after is not None:
            after()
        pool = seam.device.pool() if pool is None else pool
        everything, read = weights_of(modules)
        for weights in everything:
            weights.capture(generators, pool)
        _say_microbatch(modules, options.cached, False)
        for what, i in plan.steps:
            _capture_step(units[i], what, plan.apart, generators, pool)
        for unit in units:
            unit.weights = read[id(unit.module)]
            for weights in unit.weights:
                weights.users += 1


def _say_microbatch(modules: Sequence[torch.nn.Module], cached: bool, first: bool) -> None:
    """Tell the modules inside which microbatch this is: callers need not hand it through."""
    if cached:
        for part in (part for module in modules for part in module.modules()):
            if isinstance(part, BaseModule):
                part._microbatch, part._special = first, True


def _run_all(units: list[Unit], plan: Schedule) -> None:
    for what, i in plan.steps:
        unit = units[i]
        if what == FORWARD:
            unit.warm_forward()
        elif what == BACKWARD:
            unit.warm_backward()
            unit.weight_gradients()  # so that none waits, and their kernels have run


def _capture_step(unit: Unit, what: str, apart: bool, generators: Sequence[torch.Generator], pool: Any) -> None:
    if what == FORWARD:
        unit.capture_forward(generators, pool)
        return
    if what == BACKWARD:
        unit.capture_backward(generators, pool)
        if apart:
            return
    unit.capture_weight_gradients(generators, pool)
    if unit.options.reuse:
        unit.lend()
