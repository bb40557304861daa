"""`FusedAdam`: Adam and AdamW in one launch for a group of tensors, its state in the format that the user chooses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.ops.optimizer import AdamQuantized, AdamRule, AdamTensors, fuses
from te_core.runtime import Runtime
from te_torch.optimizers.parts import FusedOptimizer, changed, core, gradient, local, number, refuse_quantized
from te_torch.optimizers.states import FP8, MASTER, MOMENTS, Formats, States, seen_as
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_CORE, runtime_for
from te_torch.tensors.changing import Kept, change_to, end_all

_NAME = "FusedAdam"


class Known(NamedTuple):
    """The core's views of a plain parameter and its states, for as long as these lie where they do."""

    tensors: tuple[Any, ...]
    states: tuple[torch.Tensor, ...]

    def fit(self, p: torch.Tensor, state: dict[str, Any]) -> bool:
        """Whether they are those of the parameter now."""
        param, *parts = self.tensors
        if len(state) != len(self.states) or param.ptr != p.data_ptr() or param.dtype is not TO_CORE[p.dtype]:
            return False
        for now, then, part in zip(state.values(), self.states, parts, strict=False):
            if now is not then or part.ptr != now.data_ptr():
                return False
        return param.shape == p.shape and p.is_contiguous()


class FusedAdam(FusedOptimizer):
    """Adam (`adam_w_mode=False`: with weight decay in the gradient) and AdamW.

    The arithmetic is float32 whatever is stored. A step of a group is one launch for all tensors of one sort; moments
    in float16 and FP8, which have a scale each, take one more, that finds their maxima.

    - `exp_avg_dtype`, `exp_avg_sq_dtype`: float32, bfloat16, float16 or uint8 (FP8 E4M3).
    - `master_weights`: parameters below float32 have a master in `master_weight_dtype`, float32 or float16; with
      `store_param_remainders` a bfloat16 parameter is the upper half of its master, and only the lower one is kept.
    - `capturable`: lr and the step are tensors on the device (lr may be assigned in place), so a CUDA graph may hold
      `step()`; `step(grad_scaler=...)` then skips an update without waiting for the device.
    - `use_decoupled_grad`: gradients are read from `p.decoupled_grad`.

    Raises:
        ArgumentError: An option has a value that is not allowed.
        UnsupportedError: `amsgrad`, or a parameter in float64. By `step()`: a quantized parameter without masters.

    Example:
        layer = te.Linear(64, 64, device="cpu")
        optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-3, weight_decay=0.1)
        layer(torch.randn(32, 64)).sum().backward()
        optimizer.step()
    """

    _KEPT = (
        "adam_w_mode",
        "capturable",
        "master_weights",
        "set_grad_none",
        "store_param_remainders",
        "use_decoupled_grad",
        "_formats",
        "_states",
    )

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise UnsupportedError(_NAME, "amsgrad=True", "amsgrad=False", "use torch.optim.AdamW(amsgrad=True)")
        self.adam_w_mode, self.capturable = adam_w_mode, capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self._formats = Formats(exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, store_param_remainders)
        self._note_set_grad_none(set_grad_none)
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self._known: dict[torch.Tensor, Known] = {}
        self._states = States(self.state, self._formats, master_weights)

    def _check_group(self, operation: str, group: dict[str, Any]) -> None:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            if not self.capturable or lr.numel() != 1:
                got, allowed = f"lr={lr!r}", "a number, or with capturable=True a tensor of one element"
                raise ArgumentError(operation, got, allowed, "pass a number, or capturable=True")
            group = {name: value for name, value in group.items() if name != "lr"}
        super()._check_group(operation, group)

    # --------------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_scaler: Any = None,
        *,
        grad_scale: torch.Tensor | None = None,
    ) -> Any:
        """One step; `grad_scale` (float32, one element, on the device) is a factor of all gradients.

        What `clip_by_norm` returns is such a factor. `grad_scaler`, a torch.amp.GradScaler that has scaled the loss:
        gradients are unscaled as they are read, and the step is skipped where one is not finite.
        """
        loss = self._loss(closure)
        if grad_scale is not None and not (isinstance(grad_scale, torch.Tensor) and grad_scale.numel() == 1):
            got, do = f"grad_scale={grad_scale!r}", "pass the factor that clip_by_norm returned"
            raise ArgumentError(f"{_NAME}.step", got, "a tensor of one element", do)
        skip, factor = self._of_scaler(grad_scaler)
        if grad_scale is not None:
            given = grad_scale.detach().float().reshape(1)
            factor = given if factor is None else factor * given
        work = [(group, self._lists(group)) for group in self.param_groups]
        if skip is not None and not self.capturable:
            if skip.item():
                return loss
            skip = None
        for group, lists in work:
            self._count(group, skip)
            for (device, kinds), some in lists.items():
                rule = self._rule(group, device, factor, skip)
                rt = runtime_for(some[0][1].m.owner)
                if kinds[1] is None:
                    self._step_quantized(rt, some, rule)
                    continue
                ops.adam(rt, [tensors for _, tensors in some], rule)
                for p, tensors in some:
                    changed(p, tensors.param.owner)  # type: ignore[union-attr]
        return loss

    def _of_scaler(self, scaler: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(what is not zero where a gradient is not finite, 1 / scale) of a GradScaler, both on the device."""
        operation, allowed = f"{_NAME}.step", "a torch.amp.GradScaler that has scaled the loss"
        if scaler is None:
            return None, None
        if not isinstance(scaler, torch.amp.GradScaler):
            raise ArgumentError(operation, f"grad_scaler={scaler!r}", allowed, "pass the scaler, or leave it out")
        if not scaler.is_enabled():
            return None, None
        if self.use_decoupled_grad:
            got, do = "grad_scaler with use_decoupled_grad=True", "pass grad_scale=, the factor of decoupled gradients"
            raise UnsupportedError(operation, got, "gradients where a GradScaler looks for them", do)
        scale = scaler._get_scale_async()
        if scale is None:
            got, do = "a GradScaler without a scale", "call scaler.scale(loss).backward() before"
            raise ArgumentError(operation, got, allowed, do)
        known = scaler._per_optimizer_states[id(self)]
        unscaled = known["stage"] is OptState.UNSCALED  # by scaler.unscale_(optimizer), which has looked, too
        found = list((known["found_inf_per_device"] if unscaled else scaler._check_inf_per_device(self)).values())
        skip: Any = found[0].reshape(1) if found else None
        for other in found[1:]:
            skip = torch.maximum(skip, other.to(skip.device).reshape(1))
        return skip, None if unscaled else scale.double().reciprocal().float().reshape(1)

    def _lists(self, group: dict[str, Any]) -> dict[Any, list[tuple[Any, AdamTensors]]]:
        """The parameters that one launch updates, by what they have in common."""
        lists: dict[Any, list[tuple[Any, AdamTensors]]] = {}
        for p in group["params"]:
            grad = gradient(f"{_NAME}.step", p, "decoupled_grad" if self.use_decoupled_grad else "grad")
            if grad is not None and not self.master_weights:
                refuse_quantized(f"{_NAME}.step", p, "quantized parameters with masters", "pass master_weights=True")
            state = self._states.made(p)
            if grad is None or not grad.numel():
                continue
            tensors = self._tensors(p, state, grad)
            kinds = tuple([None if t is None else t.dtype for t in tensors[:5]])
            lists.setdefault((grad.device, kinds), []).append((p, tensors))
        return lists

    def _step_quantized(self, rt: Runtime, some: list[tuple[Any, AdamTensors]], rule: AdamRule) -> None:
        """Masters, and the bytes of their parameters: in one pass where the scale is given or of a tile. Others are
        cast afterwards, those alike in one launch, those of shards that agree on a maximum after one message.
        """
        passes: dict[Any, list[AdamQuantized]] = {}
        apart, together = [], []
        for p, tensors in some:
            kept, master = Kept.of(local(p)), tensors.master
            if kept is None or kept.group is not None or not fuses(kept.cast, tensors.m.dtype, tensors.v.dtype, master):
                apart.append((p, tensors))
                continue
            parts: Any = [
                t.reshape(*kept.q.shape) for t in (tensors.grad, tensors.m, tensors.v, master) if t is not None
            ]
            cast = kept.cast
            found = passes.setdefault((cast.key, cast.epsilon, cast.power_of_two), [])
            found.append(AdamQuantized._make([*parts, kept.q, cast]))
            together.append(p)
        for matrices in passes.values():
            ops.adam_quantized(rt, matrices, rule)
        for p in together:
            local(p)._wrote()
        maxima: list[Any] = [None] * len(apart)
        if rule.skip is None and self._formats.master is torch.float32:  # else they are not those of what is stored
            maxima = [*torch.zeros((len(apart), 1), dtype=torch.float32, device=local(some[0][0]).device)]
            apart = [(p, t._replace(amax=core(a))) for (p, t), a in zip(apart, maxima, strict=True)]
        ops.adam(rt, [tensors for _, tensors in apart], rule)
        values = [local(self._states.read(p, MASTER)) for p, _ in apart]
        end_all([change_to(local(p), v, a) for (p, _), v, a in zip(apart, values, maxima, strict=True)])
        for p, _ in some:
            changed(p)

    def _count(self, group: dict[str, Any], skip: torch.Tensor | None) -> None:
        """The group's step, which begins at 1; skipped ones do not count."""
        if not self.capturable:
            group["step"] = int(group.get("step", 0)) + 1
            return
        device = local(group["params"][0]).device if group["params"] else torch.device("cpu")
        for name, dtype in (("step", torch.int32), ("lr", torch.float32)):
            value = group.get(name, 0)
            if not isinstance(value, torch.Tensor) or value.device != device or value.dtype != dtype:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    got, allowed = f"{name} = {value!r}", f"a tensor of {dtype} on {device}"
                    do = "call step() once before the capture, and assign lr in place (group['lr'].fill_(...))"
                    raise ArgumentError(f"{_NAME}.step in a capture", got, allowed, do)
                group[name] = torch.as_tensor(value, dtype=dtype).to(device).clone()
        if skip is None:
            group["step"] += 1
        else:
            group["step"] += (skip == 0).to(group["step"].device, torch.int32).reshape(group["step"].shape)

    def _tensors(self, p: Any, state: dict[str, Any], grad: torch.Tensor) -> AdamTensors:
        known = self._known.get(p)
        if known is not None and known.fit(p, state):
            return AdamTensors(core(grad), *known.tensors)
        mine, master, scales = local(p), state.get(MASTER), self._states.scales.get(p)
        param = None
        if not isinstance(mine, QuantizedTorch):
            param = core(mine.detach() if mine.is_contiguous() else mine.detach().contiguous())
        parts = [None if t is None else core(local(t)) for t in (*[state[name] for name in MOMENTS], master, scales)]
        if mine is p and param is not None and mine.is_contiguous():
            self._known[p] = Known((param, *parts), tuple(state.values()))
        return AdamTensors(core(grad), param, *parts)  # type: ignore[arg-type]

    def _rule(
        self, group: dict[str, Any], device: torch.device, factor: torch.Tensor | None, skip: torch.Tensor | None
    ) -> AdamRule:
        lr, step = group["lr"], group["step"]
        if self.capturable:
            lr, step = core(lr.to(device).reshape(1)), core(step.to(device).reshape(1))
        return AdamRule(
            lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=self.adam_w_mode,
            bias_correction=bool(group["bias_correction"]),
            grad_scale=None if factor is None else core(factor.to(device)),
            skip=None if skip is None else core(skip.to(device)),
        )

    # --------------------------------------------------------------------------------------------- the rest

    def _zero(self, none: bool) -> None:
        """With `use_decoupled_grad` the decoupled gradients alone."""
        if not self.use_decoupled_grad:
            super()._zero(none)
            return
        for p in [p for group in self.param_groups for p in group["params"]]:
            if none:
                p.decoupled_grad = None
            elif getattr(p, "decoupled_grad", None) is not None:
                p.decoupled_grad.zero_()

    def initialize_state(self, param: Any, store_param_remainders: bool | None = None) -> None:
        """The state of a parameter before its first step."""
        self._states.initialize(param, store_param_remainders)

    def get_unscaled_state(self, param: Any, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """The values of a state in float32 (remainders, and with `skip_unscale` all: as they are stored)."""
        return self._states.read(param, state_name, stored=skip_unscale)

    def set_scaled_state(self, param: Any, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store values as a state."""
        self._states.write(param, state_name, unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """torch's form; all states in float32, but for remainders (int16)."""
        found = super().state_dict()
        numbered = [(key, p) for key, p in self._numbered(found) if p in self.state]
        state = {key: {name: self._states.read(p, name) for name in self.state[p]} for key, p in numbered}
        return {**found, "state": state}

    def __getstate__(self) -> dict[str, Any]:
        """With FP8 as bytes: pickle writes torch's float8 tensors, and cannot read them."""
        found = super().__getstate__()
        if torch.uint8 in (self._formats.exp_avg, self._formats.exp_avg_sq):
            found["state"] = defaultdict(dict, {p: seen_as(FP8, torch.uint8, of) for p, of in self.state.items()})
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = {}
        self._states.of = self.state
        for of in self.state.values():
            of.update(seen_as(torch.uint8, FP8, of))

    def _load(self, state_dict: dict[str, Any]) -> None:
        """States are stored in the formats of this optimizer."""
        super()._load({**state_dict, "state": {}})
        if not self.capturable:
            for group in self.param_groups:
                group["lr"] = number(group["lr"])
        for key, p in self._numbered(state_dict):
            given: dict[str, Any] | None = state_dict["state"].get(key)
            if given is not None:
                self._states.load(p, given)

    def _check_loaded(self, operation: str, given: Any) -> None:
        super()._check_loaded(operation, given)
        for key, p in self._numbered(given):
            self._states.check(operation, key, p, given["state"].get(key) or {})

    def _numbered(self, given: dict[str, Any]) -> list[tuple[Any, Any]]:
        """The number that a state dict gives each parameter, and the parameter."""
        pairs = zip(given["param_groups"], self.param_groups, strict=True)
        return [pair for a, b in pairs for pair in zip(a["params"], b["params"], strict=True)]
