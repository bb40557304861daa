"""What compiled code tells eager code as it runs: the rule and the scales of states, reports, and checkpoints.

A checkpoint that is part of a compiled graph is one program for both runs; eager code around it knows of runs only what
these functions note.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_core.errors import UnsupportedError
from te_core.precision import Precision
from te_core.tensor import Tensor
from te_torch import state as scaling
from te_torch.autocast import active
from te_torch.calls import Call
from te_torch.draws import capturing
from te_torch.forks import keep_in_checkpoints
from te_torch.precisions import precision_of, recipe_of
from te_torch.program_names import name_of_program, read, written
from te_torch.reruns import Read, called, forward_ad, in_backward
from te_torch.runtime import constant_at_trace

_library = torch.library.Library("te_runtime", "FRAGMENT")


class Traced(NamedTuple):
    """A module's state as traced code has it."""

    state: scaling.ScalingState
    rule: str  # its update's, by name


_rules: dict[str, tuple[Precision, Any]] = {}  # of programs, with the recipes that user-supplied ones are shown


def rule_key(number: int) -> str:
    """The name by which a compiled program tells the state which precision it ran in."""
    rule, recipe = precision_of(number), recipe_of(number)
    assert rule is not None
    if torch.compiler.is_exporting():
        key = written(rule)
        _rules[key] = rule, recipe
        return key
    name = name_of_program("rule", rule)
    key, others = name, itertools.count(1)
    while _rules.setdefault(key, (rule, recipe))[0] is not rule:
        key = f"{name}-{next(others)}"
    return key


def note_run(call: Call, views: Sequence[Any], scale_bwd: torch.Tensor | None, rule: str) -> None:
    """Called by compiled code as it runs a call: tell the state, reports and checkpoints."""
    told = scale_bwd is not None and not in_backward()  # what a checkpoint in the graph runs again has been told
    if told and (state := scaling.of_tensor(scale_bwd)) is not None:  # type: ignore[arg-type]
        precision, recipe = _rules.get(rule) or (read(rule), None)
        state.ran_compiled(precision, recipe, active.region)
        if (left := _left(state)[0]) is not None:
            left.of_state(state, False)
    if call.layer.weights:
        weight = views[call.layer.weights[0]]
        if isinstance(weight, Tensor):
            address, storage = weight.owner.data_ptr(), weight.owner.untyped_storage()
            found = _last_compiled.get(address)
            if found is None or found.call is not call or found.weight.cdata != storage._cdata:
                if len(_last_compiled) >= _MOST_WEIGHTS:
                    _last_compiled.clear()
                again = () if found is None else found.checkpointed
                _last_compiled[address] = _Last(call, StorageWeakRef(storage), again)
            _check_recomputation(call, weight.owner)


class _Last(NamedTuple):
    call: Call
    weight: StorageWeakRef  # tells whether the address is still the same tensor's
    #: That of the last compiled forward that torch's reentrant checkpoint may run again.
    checkpointed: Any = ()


_last_compiled: dict[int, _Last] = {}  # by a weight's address
_MOST_WEIGHTS = 4096


def last_compiled(weight: torch.Tensor) -> Call | None:
    """What compiled code last ran with this weight: it does not know its module, reports do."""
    found = _last_compiled.get(weight.data_ptr())
    return None if found is None or found.weight.cdata != weight.untyped_storage()._cdata else found.call


def _check_recomputation(call: Call, weight: torch.Tensor) -> None:
    """A compiled module in torch's reentrant checkpoint is run again outside of the region that it ran in, and the
    compiler then takes its program without one: an error, not another precision.

    (Inside an autograd function's forward gradients are off both ways. What a compiler's own backward runs again is in
    none.)
    """
    if forward_ad() or torch.is_inference_mode_enabled():
        return
    precision, last = call.layer.linears(call.spec)[0].precision, _last_compiled[weight.data_ptr()]
    if not in_backward():
        if not call.needs_grad:
            _last_compiled[weight.data_ptr()] = last._replace(checkpointed=precision)
    elif (active.region is None or not active.region.recompute) and last.checkpointed != ():
        if last.checkpointed is not precision:
            raise UnsupportedError(
                "torch.compile",
                "a compiled module that torch.utils.checkpoint runs again outside of its region",
                "te_torch.checkpoint, which carries the region along, or a region inside the checkpointed function",
                "use te_torch.checkpoint",
            )


def _left(state: scaling.ScalingState) -> tuple[Read | None, bool]:
    """What this run of compiled code leaves, or what its first run left, in a checkpoint of ours. A CUDA graph of a
    compiler's leaves nothing: it lends memory for results of programs alone."""
    if active.running is None or capturing():
        return None, False
    return called(state, 0, active.running)


def _scale_op(scale: torch.Tensor, used: torch.Tensor, scale_bwd: torch.Tensor) -> torch.Tensor:
    state = scaling.of_tensor(scale_bwd)
    if state is not None:
        left, again = _left(state)
        if again and left is not None and left.scales is not None:
            return left.scales.clone()
    reads = not in_backward() or (state is not None and state.is_due())
    return (scale if reads else used).clone()


_library.define("scale_of_first_run(Tensor scale, Tensor used, Tensor scale_bwd) -> Tensor")
_library.impl("scale_of_first_run", _scale_op, "CompositeExplicitAutograd")
torch.library.register_fake(
    "te_runtime::scale_of_first_run", lambda scale, used, scale_bwd: torch.empty_like(scale), lib=_library
)


@constant_at_trace
def in_checkpoint() -> bool:
    """Whether what is traced now is in a checkpoint, of whatever kind, that is part of the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:  # torch.export without a compiler's frame: it runs nothing again
        return False
    while tracer is not None and "checkpoint" not in str(tracer.source_target):
        tracer = tracer.parent
    return tracer is not None


@constant_at_trace
def _keep_scales() -> None:
    """Have a checkpoint in the graph keep the scales that its first run read."""
    operator = torch.ops.te_runtime.scale_of_first_run.default
    if not operator.python_key_table:
        keep_in_checkpoints(operator)


def scale_to_read(given: Traced, recompute: bool) -> tuple[torch.Tensor, str]:
    """(the scales a traced forward quantizes with, the rule it tells its state; "" where it has run before).

    What runs again quantizes as its first run did, and records nothing. A checkpoint in the graph is one program for
    both runs, with an update of the scales between them.
    """
    state, rule = given
    if not recompute and not in_checkpoint():
        return state.scale_fwd, rule
    _keep_scales()
    scale = torch.ops.te_runtime.scale_of_first_run(state.scale_fwd, state.used_fwd, state.scale_bwd)
    return scale, "" if recompute else rule
