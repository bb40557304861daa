"""FP8 state in checkpoints, its size and its values, and training that goes on where it stopped, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_torch import updates
from te_torch.autocast import Ran
from te_torch.base.checkpoint_state import plain_state_dict, prepare_state
from te_torch.state import ScalingState
from te_torch.training.graphs.make import restore_fp8_tensors, save_fp8_tensors
from tests.backends import on_devices
from tests.covering import covering
from tests.world import GEMM_MODULES, MODULES, WIDTH, differences, fp8_state, make, step, values

gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)
SHORT = DelayedScaling(amax_history_len=4)
ENTRIES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


# ------------------------------------------------------------------------------------------------- exact resume


# ------------------------------------------------------------------------------------------------------ entries


@on_devices
@pytest.mark.parametrize("kind", MODULES)
def test_entries_of_a_module(kind: str, device: str) -> None:
    """Parameters, four float32 entries of a module with a history, and nothing else."""
    module = make(kind, device)
    plain = set(module.state_dict())
    assert plain == {name for name, _ in module.named_parameters()}
    step(module, values(16, 48, device=device), "current")
    assert set(module.state_dict()) == plain
    step(module, values(16, 48, device=device), "delayed")
    new = set(module.state_dict()) - plain
    assert new == ({f"fp8_state.{name}" for name in ENTRIES} if kind in GEMM_MODULES else set())
    assert {module.state_dict()[name].dtype for name in new} <= {torch.float32}


@on_devices
def test_prepare_state(device: str) -> None:
    """The entries that training makes, before any: names and shapes equal, values those of a start."""
    model, twin = (torch.nn.ModuleDict({k: make(k, device) for k in MODULES}) for _ in range(2))
    assert prepare_state(model, Float8CurrentScaling()) == []
    assert prepare_state(model, MXFP8BlockScaling()) == prepare_state(model, Float8BlockScaling()) == []
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert prepare_state(model, SHORT) == list(GEMM_MODULES)
    assert prepare_state(model, SHORT) == []
    x = values(16, 48, device=device)
    for kind in MODULES:
        step(twin[kind], x, SHORT)
    shapes = {name: (t.shape, t.dtype, t.device) for name, t in model.state_dict().items()}
    assert shapes == {name: (t.shape, t.dtype, t.device) for name, t in twin.state_dict().items()}
    for kind in MODULES:  # and the first step is that of a module that was not prepared
        assert not differences(step(model[kind], x, SHORT), step(make(kind, device), x, SHORT))
        assert not differences(fp8_state(model[kind]), fp8_state(twin[kind]))


@on_devices
@gemm_modules
def test_a_prepared_module_takes_either_checkpoint(kind: str, device: str) -> None:
    """That of FP8 training, and one without FP8 state, by which it starts anew: strictly, with entries kept."""
    source, target, x = make(kind, device), make(kind, device, seed=1), values(16, 48, device=device)
    plain = {name: t.clone() for name, t in source.state_dict().items()}
    for i in (1, 2):
        step(source, i * x, SHORT)
    prepare_state(target, SHORT)
    entries = {name: t for name, t in target.state_dict().items() if "fp8_state" in name}
    target.load_state_dict(source.state_dict(), strict=True)
    assert all(target.state_dict()[name].data_ptr() == t.data_ptr() for name, t in entries.items()), "filled in place"
    assert not differences(fp8_state(target), fp8_state(source))
    target.load_state_dict(plain, strict=True)
    assert not differences(target.state_dict(), {**plain, **make_start(target)})
    fresh = make(kind, device)
    assert not differences(step(target, x, SHORT), step(fresh, x, SHORT))
    assert not differences(fp8_state(target), fp8_state(fresh))


def make_start(module: Any) -> dict[str, torch.Tensor]:
    """Scales of one and empty histories in the shapes of a module's own."""
    return {
        name: torch.ones_like(t) if "scale" in name else torch.zeros_like(t) for name, t in fp8_state(module).items()
    }


@on_devices
@covering(turns=3, length=[2, 4, 7], ran=[False, True], assign=[False, True], kind=GEMM_MODULES)
def test_other_history_lengths(length: int, ran: bool, assign: bool, kind: str, device: str) -> None:
    """Rows of the checkpoint are cut, or zeros follow them, at the next forward."""
    source, target, x = make(kind, device), make(kind, device, seed=1), values(16, 48, device=device)
    for i in (3, 1, 2):
        step(source, i * x, SHORT)
    kept = {name: t.clone() for name, t in source.state_dict().items()}
    if ran:
        step(target, x, DelayedScaling(amax_history_len=length))
    target.load_state_dict(kept, assign=assign)
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=length)):
        target(0 * x)
    for direction in ("fwd", "bwd"):
        old, new = kept[f"fp8_state.amax_history_{direction}"], getattr(target.fp8_state, f"amax_history_{direction}")
        assert new.shape == (length, old.shape[1])
        rows = min(length, 4)
        assert torch.equal(new[1:rows], old[1:rows]) and not new[rows:].any()
        assert torch.equal(getattr(target.fp8_state, f"scale_{direction}"), kept[f"fp8_state.scale_{direction}"])


@on_devices
def test_loading_by_assignment_onto_a_meta_model(device: str) -> None:
    source, x = make("Linear", device), values(16, 48, device=device)
    step(source, x, SHORT)
    target = te.Linear(48, 64, device="meta")
    target.load_state_dict({n: t.clone() for n, t in source.state_dict().items()}, assign=True, strict=True)
    assert not differences(step(target, 2 * x, SHORT), step(source, 2 * x, SHORT))
    assert not differences(fp8_state(target), fp8_state(source))


@on_devices
@gemm_modules
@pytest.mark.parametrize("recipe", [SHORT, DelayedScaling(amax_compute_algo=lambda history: history.amax(0))])
def test_a_model_without_memory_in_a_region(
    kind: str, recipe: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives shapes, and its state begins as a new one once it gets memory, which is not what lay there."""
    module, new = (make(kind, where) for where in ("meta", device))
    x = torch.randn(16, 48, device="meta", requires_grad=True)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = module(x)
        y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and y.is_meta
    module.zero_grad()  # to_empty() would give gradients memory, too
    with monkeypatch.context() as patch:  # memory has something in it
        patch.setattr(torch, "empty_like", lambda t, **options: torch.full_like(t, 7.0, **options))
        module.to_empty(device=device)
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), new.parameters(), strict=True):
            mine.copy_(theirs)
    given = values(16, 48, device=device)
    for _ in range(2):
        assert not differences(step(module, given, recipe), step(new, given, recipe))
    assert not differences(fp8_state(module), fp8_state(new))


@on_devices
def test_state_of_a_checkpoint_in_half_precision_is_float32_again(device: str) -> None:
    source, x = make("Linear", device), values(16, 48, device=device)
    step(source, x, SHORT)
    for assign in (False, True):
        target = make("Linear", device)
        target.load_state_dict({n: t.bfloat16() for n, t in source.state_dict().items()}, assign=assign)
        assert {t.dtype for t in fp8_state(target).values()} == {torch.float32}


@on_devices
@gemm_modules
def test_adjust_amax_history_length(kind: str, device: str) -> None:
    module, x = make(kind, device), values(16, 48, device=device)
    module.adjust_amax_history_length(3)  # no state yet: nothing to do
    for i in (3, 1, 2):
        step(module, i * x, SHORT)
    before = fp8_state(module)
    module.adjust_amax_history_length(6, fwd=True)
    module.adjust_amax_history_length(2, fwd=False)
    state = module.fp8_state
    forward, backward = before["fp8_state.amax_history_fwd"], before["fp8_state.amax_history_bwd"]
    assert torch.equal(state.amax_history_fwd, torch.cat([forward, torch.zeros_like(forward[:2])]))
    assert torch.equal(state.amax_history_bwd, backward[:2])
    module.adjust_amax_history_length(4)
    assert torch.equal(state.amax_history_fwd, forward) and state.amax_history_bwd.shape == backward.shape


@on_devices
def test_meta_tensors(device: str) -> None:
    """Taken, set back, and begun anew, in place."""
    module, x = make("Linear", device), values(16, 48, device=device)
    assert module.get_fp8_meta_tensors() is None
    module.reset_fp8_meta_tensors()
    step(module, x, SHORT)
    before, taken = fp8_state(module), module.get_fp8_meta_tensors()
    assert set(taken) == {"scaling_fwd", "scaling_bwd"}
    step(module, 5 * x, SHORT)
    assert differences(fp8_state(module), before)
    module.reset_fp8_meta_tensors(taken)
    assert not differences(fp8_state(module), before)
    module.reset_fp8_meta_tensors()
    assert not differences(fp8_state(module), make_start(module))


@on_devices
def test_tensors_of_several_modules(device: str) -> None:
    """As a program saves them before a capture, and puts them back; one module has not run."""
    model, x = torch.nn.ModuleList(make("Linear", device, seed=i) for i in range(2)), values(16, 48, device=device)
    step(model[1], x, SHORT)
    saved = save_fp8_tensors([model], DelayedScaling(amax_history_len=2))
    before = fp8_state(model)
    assert saved[0] is None and {len(t) for name, t in before.items() if "history" in name} == {2}
    step(model[1], 5 * x, DelayedScaling(amax_history_len=2))
    assert differences(fp8_state(model), before)
    restore_fp8_tensors([model], saved)
    assert not differences(fp8_state(model), before)


@on_devices
@gemm_modules
@pytest.mark.parametrize("how", ["data", "buffers"])
def test_buffers_that_get_other_memory(how: str, kind: str, device: str) -> None:
    """As FSDP1 moves them (`buffer.data = ...`), and Accelerate (`module._buffers[name] = ...`): nothing is told."""
    module, x = make(kind, device), values(16, WIDTH, device=device)
    expected = make(kind, device)
    left: list[torch.Tensor] = []
    for number in range(4):
        assert not differences(step(module, (1 + number) * x, SHORT), step(expected, (1 + number) * x, SHORT))
        assert not differences(fp8_state(module), fp8_state(expected))
        assert all(torch.isnan(t).all() for t in left)  # nobody wrote what is not the state's any more
        for name, buffer in module.fp8_state.named_buffers():
            old, new = buffer.detach(), buffer.detach().clone()
            if how == "data":
                buffer.data = new
            else:
                module.fp8_state._buffers[name] = new
            left.append(old)
            old.fill_(float("nan"))


# -------------------------------------------------------------------------------------------------- plain tensors


@on_devices
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_plain_state_dict(dtype: torch.dtype | None, device: str) -> None:
    """Plain, contiguous, each in memory of its own; FP8 state stays float32, integers stay what they are."""
    module = make("Linear", device, torch.float16)
    step(module, values(16, 48, device=device, dtype=torch.float16), SHORT)
    model = torch.nn.ModuleDict({"a": module, "tied": torch.nn.Linear(48, 64, device=device, dtype=torch.float16)})
    model["tied"].weight = module.weight
    model["tied"].register_buffer("counts", torch.arange(4, device=device))
    model["tied"].register_buffer("turned", values(3, 5, device=device).t())
    model["tied"].register_buffer("part", values(8, device=device)[2:5])
    quantized = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(values(32, 32, device=device, dtype=torch.bfloat16))
    model["tied"].bias = torch.nn.Parameter(quantized, requires_grad=False)
    state, plain = model.state_dict(), plain_state_dict(model, dtype)
    assert list(plain) == list(state)
    for name, t in plain.items():
        assert type(t) is torch.Tensor and t.is_contiguous() and not t.requires_grad
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size(), name
        fixed = "fp8_state" in name or name == "tied.counts"
        assert t.dtype == (state[name].dtype if fixed or dtype is None else dtype), name
        wanted = (quantized.dequantize() if name == "tied.bias" else state[name]).to(t.dtype)
        assert torch.equal(t, wanted), name
    assert len({t.untyped_storage().data_ptr() for t in plain.values()}) == len(plain)
    model.load_state_dict({n: t for n, t in plain.items() if n != "tied.bias"}, strict=False)
    assert not differences(fp8_state(module), {n[2:]: t for n, t in plain.items() if "fp8_state" in n})


WRONG: dict[str, Any] = {
    "columns": lambda name, t: torch.cat([t, t], -1),
    "dimensions": lambda name, t: t[None],
    "half": lambda name, t: t[..., ::2].contiguous(),
    "no rows": lambda name, t: t[:0],
    "no tensor": lambda name, t: 3,
    "NaN": lambda name, t: t * float("nan"),
}


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("how", WRONG)
def test_a_refused_load_leaves_the_state_alone(how: str, entry: str, ran: bool) -> None:
    """One of the four entries does not fit: none of them is taken, and no history is cut or lengthened."""
    module, other = make("Linear"), make("Linear")
    for m, rows in ((module, 4), (other, 7)):
        if ran or m is other:
            step(m, values(32, WIDTH), DelayedScaling(amax_history_len=rows))
    given = dict(other.state_dict())
    given[f"fp8_state.{entry}"] = WRONG[how](entry, given[f"fp8_state.{entry}"])
    before = {name: t.clone() for name, t in fp8_state(module).items()}
    assert bool(before) is ran
    with pytest.raises((RuntimeError, ArgumentError), match=f"fp8_state.{entry}"):
        module.load_state_dict(given)
    after = fp8_state(module)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert not differences(after, before)


def test_a_refused_reset_leaves_the_state_alone() -> None:
    module = make("Linear")
    te.prepare_state(module, SHORT)
    module.fp8_state.in_use = False
    good = module.fp8_state.copies()
    for wrong in ({"scaling_fwd": good["scaling_fwd"][0]}, {**good, "scaling_bwd": 3}, [good], {"scaling_fwd": [1, 2]}):
        with pytest.raises(ArgumentError, match="^reset_fp8_meta_tensors: "):
            module.fp8_state.assign(wrong)
        assert not module.fp8_state.in_use


def test_replayed_states_come_in_the_order_of_their_running() -> None:
    """Which is the same in every process, as numbers of states need not be: they are reduced in that order."""
    states = [ScalingState(1, 4, torch.device("cpu")) for _ in range(4)]
    order = [states[i] for i in (2, 0, 3, 1)]
    for state in order:
        state.watch()
    updates.region_begins()  # whatever else is watched has run before
    for state in states:  # as a CUDA graph's replay does, of which no operator tells
        state.amax_history_fwd[0].fill_(1)
    assert updates.traced_that_ran(None, Ran()) == [state.token for state in order]
    updates.region_begins()
    assert updates.traced_that_ran(None, Ran()) == []
