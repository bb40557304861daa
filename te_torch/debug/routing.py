"""How a layer comes to be looked at while nvdlfw_inspect is initialised, and how it runs its fast path otherwise.

A module's attribute `inspector` is then a `Door`, until the features were asked in the layer's first forward of an
iteration. If none wants anything the attribute is None, as without debugging, until the iteration that the features
named; else the door stays, and gives an inspector for each product. An inspector belongs to what it does (its
`Plan`): two iterations with the same plan are the same call of the layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_core.errors import UnsupportedError
from te_core.layers.inspector import ATTENTION_POINTS, PLAIN, PLAIN_ATTENTION, Request
from te_core.tokens import living
from te_torch.base.module import BaseModule
from te_torch.base.watching import Choice, watching
from te_torch.debug.gemm import GemmInspector
from te_torch.debug.layers import Team, product_names, team_of
from te_torch.debug.schedule import EveryOne
from te_torch.debug.state import TEDebugState
from te_torch.precisions import precision_of

_NEVER = 1 << 62
_SHOWN = 8  # names of layers in a warning
#: Each tensor of a product, and the GEMMs that it is in: along its rows, along its columns.
_OPERANDS = {"activation": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "gradient": ("dgrad", "wgrad")}
_RESULTS = {"output": "fprop", "wgrad": "wgrad", "dgrad": "dgrad"}
#: Those of attention in FP8.
_OF_ATTENTION = {tensor: (direction,) for direction, tensor in sorted(ATTENTION_POINTS)}
_POINTS = _OPERANDS | {tensor: (gemm,) for tensor, gemm in _RESULTS.items()} | _OF_ATTENTION
#: All that a configuration may name.
TENSORS = tuple(_POINTS)


class Plan(NamedTuple):
    """What is done with the tensors of a product in an iteration; pairs are (gemm, tensor)."""

    high: frozenset[tuple[str, str]]  # operands that stay in high precision
    modified: frozenset[tuple[str, str]]
    inspected: frozenset[str]  # tensors
    older: frozenset[tuple[str, str]]  # operands for the older call

    @property
    def idle(self) -> bool:
        """Whether the layer may run as it does without debugging."""
        return not any(self)

    @property
    def request(self) -> Request:
        """The points that an inspector has to see, and those of them where it always has something else."""
        points = set(self.high | self.modified | self.older)
        points.update((_OPERANDS[tensor][0], tensor) for _, tensor in self.older)
        points.update(PLAIN_ATTENTION[gemm] for gemm, tensor in self.high if tensor == "attention")
        points.update(PLAIN[point] for point in self.high | self.modified if point in PLAIN)
        for tensor in self.inspected:
            points.update((gemm, tensor) for gemm in _POINTS[tensor])
        return frozenset(points)


_NOTHING = Plan(*[frozenset()] * 4)


class Door(Choice):
    """Stands in the place of a module's inspectors, and says which ones there are."""

    def __init__(self) -> None:
        self.current: tuple[Any, ...] | None = None  # what was chosen for the forward that runs
        self.due = 0  # the iteration in which the features have to be asked again
        self.traced = False  # a compiled program was made while nobody looked
        self._iteration = -1
        self._decided: dict[bool, tuple[Any, ...] | None] = {}
        self._made: dict[tuple[str, Plan, Team], GemmInspector] = {}
        self._told: set[tuple[str, bool]] = set()
        self._settled: dict[Any, bool] = {}  # questions that were answered for good
        self._for_good: dict[tuple[str, bool], Plan] = {}

    def touches(self, module: Any) -> bool:
        """Whether the configuration names features for a layer of this module."""
        return TEDebugState.is_enabled() and any([_settled(name) for name in product_names(module, module.name)])

    @property
    def high(self) -> tuple[bool, bool]:
        """Of attention. What features put in the place of its tensors only FP8 attention takes: then that is rounded
        at nothing else."""
        plan = self.current[0].plan if self.current else None
        if plan is None:
            return False, False
        forward, backward = (("fprop", "attention") in plan.high, ("dgrad", "attention") in plan.high)
        return (False, False) if plan.modified else (forward, forward or backward)

    def choose(self, module: Any, precision: int) -> None:
        """Ask the features what they want of a forward in this precision; in an iteration once."""
        if not TEDebugState.is_enabled():
            self.current = None
            _set(module, None)
            return
        now = TEDebugState.get_iteration()
        self._choose(module, bool(precision), now)
        if self.current is not None:
            _refuse(module, precision)
        elif self.due > now:
            _set(module, None)

    def refuse_traced(self, module: Any, precision: int) -> None:
        """A compiled step is one that nobody looks at, or it is refused. What was decided is part of the program."""
        if not TEDebugState.is_enabled():
            return
        now = TEDebugState.get_iteration()
        self._choose(module, bool(precision), now)
        self.traced = self.due > now
        if self.current is not None:
            if torch.compiler.is_exporting():
                raise _refused(module, "a program that is exported", "export it without, or leave the layer out")
            raise _refused(module, "a step that torch.compile compiles", "do not compile it, or leave the layer out")

    def _choose(self, module: Any, quantized: bool, now: int) -> None:
        if now != self._iteration:
            self._iteration, self._decided = now, {}
        if quantized not in self._decided:
            self._decided[quantized] = self._decide(module, quantized, now)
        self.current = self._decided[quantized]

    def _decide(self, module: Any, quantized: bool, now: int) -> tuple[Any, ...] | None:
        names = product_names(module, module.name)
        settled = [_settled(name) for name in names]
        due, found = _NEVER, []
        for number, (name, configured) in enumerate(zip(names, settled, strict=True)):
            plan, again = self._asked(module, name, quantized, now) if configured else (_NOTHING, _NEVER)
            if module._weight_names():
                self._tell(name, plan, quantized)
            due = min(due, again)
            made = None
            if not plan.idle:
                team = team_of(module, number)
                made = self._made.get((name, plan, team))
                if made is None:
                    made = self._made[name, plan, team] = GemmInspector(name, plan.request, plan, team)
            found.append(made)
        # What features say of a layer in high precision tells nothing about it in a quantized one.
        self.due = now + 1 if any(found) else now if any(settled) and not quantized else max(due, now + 1)
        return tuple(found * (module.gemms // len(names))) if any(found) else None

    def _asked(self, module: Any, name: str, quantized: bool, now: int) -> tuple[Plan, int]:
        """(what the features want, the first iteration in which that may be something else)."""
        plan = self._for_good.get((name, quantized))
        if plan is None:
            questions = _Questions(name, now, self._settled)
            ask = _ask if module._weight_names() else _ask_attention
            plan = ask(questions, quantized)
            if questions.open:
                return plan, min(questions.later, default=_NEVER)
            self._for_good[name, quantized] = plan
        return plan, _NEVER

    def _tell(self, name: str, plan: Plan, quantized: bool) -> None:
        """The lines of the log that say what happens to each operand: once for each layer."""
        if (name, quantized) in self._told or not quantized and (name, True) in self._told:
            return
        self._told.add((name, quantized))
        from nvdlfw_inspect import api

        for tensor, gemms in _OPERANDS.items():
            for gemm in gemms:
                how = "FP8 quantization" if quantized and (gemm, tensor) not in plan.high else "High precision"
                if (gemm, tensor) in plan.modified:
                    how = "modify_tensor()"
                text = f"Tensor: {tensor}, gemm {gemm} - {how}"
                api.log_message(text, layer_name=name, extra_cachable_args=(gemm, tensor, how))

    def __deepcopy__(self, memo: Any) -> Door:
        return Door()

    def __reduce__(self) -> tuple[Any, ...]:
        return Door, ()


def _set(module: Any, value: Any) -> None:
    module.__dict__["inspector"] = value  # Module.__setattr__ would cost a microsecond


def _settled(name: str) -> bool:
    """Whether the configuration names features of ours for the layer. The older name of the QKV projection counts."""
    from nvdlfw_inspect.config_manager import ConfigManager

    config = ConfigManager.get_config_for_layer(name)
    if not config and ".layernorm_linear_q" in name:
        config = ConfigManager.get_config_for_layer(name.replace(".layernorm_linear_q", ".layernorm_q"))
        if config:
            ConfigManager.layer_name_to_config_cache[name] = config
    return bool(config.get("transformer_engine"))


class _Questions:
    """Asks the features of a layer, but for what is settled."""

    def __init__(self, name: str, now: int, settled: dict[Any, bool]) -> None:
        self.name, self.now, self.settled = name, now, settled
        self.later: list[int] = []  # the iterations in which answers may be others
        self.open = False  # whether there are such

    def __call__(self, call: str, **what: Any) -> bool:
        from nvdlfw_inspect import api

        question = (self.name, call, *what.values())
        if question in self.settled:
            return self.settled[question]
        answer = getattr(api.transformer_engine, call)(layer_name=self.name, iteration=self.now, **what)
        yes, after = answer if isinstance(answer, tuple) else (answer, self.now + 1)
        never = after is None and bool(yes) == (call == "fp8_gemm_enabled")
        if never or isinstance(after, EveryOne):
            self.settled[question] = bool(yes)
        else:
            self.open = True
        self.later.append(_NEVER if after is None else max(int(after), self.now + 1))
        return bool(yes)


def _ask_attention(says: _Questions, quantized: bool) -> Plan:
    """What the features want of attention, whose forward is called fprop and whose backward dgrad."""
    if not quantized:  # it is not looked at, and has nothing to switch
        return _NOTHING
    seen = frozenset(tensor for tensor in _OF_ATTENTION if says("inspect_tensor_enabled", tensor_name=tensor))
    modified = frozenset(p for p in ATTENTION_POINTS if says("modify_tensor_enabled", gemm=p[0], tensor_name=p[1]))
    high = frozenset((gemm, "attention") for gemm in PLAIN_ATTENTION if not says("fp8_gemm_enabled", gemm=gemm))
    return Plan(high, modified, seen, frozenset())


def _ask(says: _Questions, quantized: bool) -> Plan:
    """What the features want of a product now."""
    high, modified, inspected, older = set(), set(), set(), set()
    for tensor, gemms in _OPERANDS.items():
        if says("inspect_tensor_enabled", tensor_name=tensor):
            inspected.add(tensor)
        for gemm in gemms:
            if says("inspect_tensor_postquantize_enabled", gemm=gemm, tensor_name=tensor):
                older.add((gemm, tensor))
        for gemm in gemms:
            if says("modify_tensor_enabled", gemm=gemm, tensor_name=tensor):
                modified.add((gemm, tensor))
            elif quantized and not says("fp8_gemm_enabled", gemm=gemm):
                high.add((gemm, tensor))
    for tensor, gemm in _RESULTS.items():
        if says("inspect_tensor_enabled", tensor_name=tensor):
            inspected.add(tensor)
        if says("modify_tensor_enabled", gemm=gemm, tensor_name=tensor):
            modified.add((gemm, tensor))
    return Plan(frozenset(high), frozenset(modified), frozenset(inspected), frozenset(older))


def _refuse(module: Any, precision: int) -> None:
    """What a layer that features touch cannot do."""
    if module._microbatch is not None:  # the documented error
        got = "a CUDA graph that is to keep quantized weights for its microbatches"
        raise AssertionError(str(_refused(module, got, "capture it without, or leave the layer out")))
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise _refused(module, "a step that a CUDA graph captures", "capture it without, or leave the layer out")
    if module.delay_wgrad_compute:
        raise _refused(module, "delay_wgrad_compute=True", "make the layer without it, or leave it out")
    rule = precision_of(precision)
    if rule is not None and rule.input is not None and rule.input.scaling == "calibrate":
        raise _refused(module, "a region that calibrates", "calibrate without features, or leave the layer out")


def _refused(module: Any, what: str, do: str) -> UnsupportedError:
    where = f"precision debugging of {type(module).__name__} {module.name!r}"
    return UnsupportedError(where, what, "features in eager steps", f"{do} of the configuration")


# -------------------------------------------------------------------------------------------- while it is on

_last: int | None = None  # the iteration of the last step


def _attach(module: Any) -> None:
    if module.__dict__.get("inspector") is None:
        door = Door()
        module.__dict__["_door"] = door
        _set(module, door)


def _doors() -> Iterator[tuple[Any, Door]]:
    for module in living(torch.nn.Module):
        door = module.__dict__.get("_door")
        if door is not None:
            yield module, door


def begin() -> None:
    """All modules, those there are and those to come, ask the features before they run."""
    global _last
    _last = None
    for module in living(torch.nn.Module):
        if isinstance(module, BaseModule):
            _attach(module)
    watching.new = _attach


def stepped() -> None:
    """An iteration has begun: wake the layers whose features may want something now."""
    global _last
    now = TEDebugState.get_iteration()
    expected, _last = now if _last is None else _last + 1, now
    for module, door in _doors():
        awake = door.due <= now or now != expected
        if awake and module.__dict__["inspector"] is None:
            _set(module, door)
        elif awake and door.traced:
            door.generation, door.traced = str(now), False


def warn_unmatched(namespace: str) -> None:
    """Warn of each section of the configuration with features of ours that selects none of the layers that ran."""
    from nvdlfw_inspect.config_manager import ConfigManager

    ran = ConfigManager.layer_name_to_config_cache
    for section in ConfigManager.configs:
        features = section.extension_config
        if features.get(namespace) and not any(found is features for found in ran.values()):
            chosen = {name: value for name, value in vars(section.layers).items() if value is not None}
            pattern = chosen.pop("layer_type_regex_pattern", None)
            names = ", ".join(list(ran)[:_SHOWN]) + f" and {len(ran) - _SHOWN} more" * (len(ran) > _SHOWN)
            warnings.warn(
                f"precision debugging: {', '.join(features[namespace])} of the configuration acts on nothing: no layer "
                f"that ran on this process is one of layers: {chosen or pattern}. These ran: {names}.",
                stacklevel=3,
            )


def end() -> None:
    """Nobody asks any more."""
    watching.new = None
    for module, door in _doors():
        del module.__dict__["_door"]
        if module.__dict__["inspector"] is door:
            _set(module, None)
