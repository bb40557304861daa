"""Weights held quantized by delayed scaling before the layer has run: each write begins anew, no maxima are known."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import te_torch as te
from tests.tolerances import snr_db
from tests.torch.test_quantized_parameters import K, N, build, inputs, on_devices, region


def copied(weight: Any, values: torch.Tensor) -> None:
    weight.copy_(values)


def drawn(weight: Any, values: torch.Tensor) -> None:
    weight.normal_()  # by an initializer
    weight.copy_(values)


def multiplied(weight: Any, values: torch.Tensor) -> None:
    weight.copy_(values / 64)
    weight.mul_(64)


def as_bytes(weight: Any, values: torch.Tensor) -> None:
    weight.copy_(_held(weight, values))


def _held(weight: Any, values: torch.Tensor) -> torch.Tensor:
    """The weight of another module, with these values."""
    other: Any = build("Linear", "delayed", str(weight.device))
    other = other.to(weight.dtype)
    other.weight.copy_(values)
    found: torch.Tensor = other.weight.detach()
    return found


def by_foreach(weight: Any, values: torch.Tensor) -> None:
    torch._foreach_copy_([weight.detach()], [values])


WRITES: dict[str, Any] = {
    "copy_": copied,
    "after normal_": drawn,
    "mul_": multiplied,
    "foreach": by_foreach,
    "bytes": as_bytes,
    "quantize_": lambda weight, values: weight.quantize_(values),
    "data": lambda weight, values: setattr(weight, "data", values),
    "a part of it": lambda weight, values: [weight[:64].copy_(values[:64]), weight[64:].copy_(values[64:])],
}


def written(way: str, name: str, device: str, then: Any = lambda module: module) -> tuple[Any, torch.Tensor]:
    """A module after values far above those that it was made with, and these."""
    module = then(build("Linear", name, device))
    weight: Any = module.weight
    values = (7 * torch.randn(N, K, generator=torch.Generator().manual_seed(2))).to(weight.device, weight.dtype)
    with torch.no_grad():
        WRITES[way](weight, values)
    return module, values


@on_devices
@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("way", WRITES)
def test_a_first_write_brings_its_scale(way: str, name: str, device: str) -> None:
    """Delayed scaling has no maxima yet, and that of the initial values says nothing of others."""
    module, values = written(way, name, device)
    if way == "a part of it":  # which keeps the scale that it shares with the rest
        assert torch.equal(module.weight._scale_inv, build("Linear", name, device).weight._scale_inv)
        return
    assert snr_db(module.weight.dequantize().float(), values.float()) > 25
    top = values.abs().max().float()
    assert torch.allclose(module.weight._scale_inv, top / 448, rtol=1e-6)
    with region(name):
        y = module(inputs(device))
    assert snr_db(y.float(), (inputs(device) @ values.T).float()) > 25
    if name == "delayed":
        assert torch.allclose(module.fp8_state.amax_history_fwd[:, 1].max(), top, rtol=1e-6)
        with torch.no_grad():  # an optimizer's change: with the scale that the maxima have made
            module.weight.mul_(1.0)
        assert snr_db(module.weight.dequantize().float(), values.float()) > 25


@on_devices
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_the_first_step_is_that_of_plain_weights(kind: str, device: str) -> None:
    """Both are cast with the state's scale, which is 1; and the scale of the second step is of the same maxima."""
    held, plain = build(kind, "delayed", device), build(kind, None, device)
    found = []
    for module in (held, plain):
        x = inputs(device)
        with region("delayed"):
            y = module(x)
        y.sum().backward()
        grads = [p.grad for p in module.parameters()]
        found.append([y, x.grad, *grads, module.fp8_state.scale_fwd])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for (name, p), q in zip(held.named_parameters(), plain.parameters(), strict=True):
        assert (p.float() - q.float()).abs().max() <= 2.0**-4 * q.float().abs().max(), name


def as_file(some: Any) -> Any:
    file = io.BytesIO()
    torch.save(some, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_state_dict(some: Any) -> Any:
    module, optimizer = build("Linear", "delayed", "cpu"), te.optimizers.FusedAdam
    module.load_state_dict(some[0].state_dict())
    made = optimizer(module.parameters(), lr=0.05, master_weights=True)
    made.load_state_dict(some[1].state_dict())
    return module, made


def averaged(some: Any) -> Any:
    module: Any = torch.optim.swa_utils.AveragedModel(some[0]).module
    return module, te.optimizers.FusedAdam(module.parameters(), lr=0.05, master_weights=True)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "optimizer first": lambda some: copy.deepcopy(some[::-1])[::-1],
    "copy": lambda some: (copy.copy(some[0]), some[1]),
    "pickle": lambda some: pickle.loads(pickle.dumps(some)),
    "file": as_file,
    "state dict": by_state_dict,
    "averaged": averaged,
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_copies_begin_as_well(way: str, ran: bool) -> None:
    """The scale of a copy's weight follows what is written, before the first forward and after it."""
    module = build("Linear", "delayed", "cpu")
    some = (module, te.optimizers.FusedAdam(module.parameters(), lr=0.05, master_weights=True))
    for step in range(6):
        if step == 1:
            some = COPIES[way](some)
        module, optimizer = some
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        master = optimizer.state[module.weight]["master_param"]
        if step > 1 and ran:  # the maximum of this step makes the next one's scale
            with region("delayed"):
                module(inputs("cpu"))
            assert torch.allclose(module.fp8_state.scale_fwd[1], 448 / master.abs().max(), rtol=1e-6)
        elif step:
            assert snr_db(module.weight.dequantize(), master) > 25


@pytest.mark.parametrize("ran", [False, True])
def test_a_weight_in_the_place_of_another(ran: bool) -> None:
    """`module.weight = ...` follows the module's maxima as the weight did that was there before."""
    module, other = build("Linear", "delayed", "cpu"), build("Linear", "delayed", "cpu")
    for m in (module, other) if ran else ():
        with region("delayed"):
            m(inputs("cpu"))
    module.weight = torch.nn.Parameter(other.weight.detach())
    for step in range(4):
        values = torch.full((N, K), 2.0**step)
        with torch.no_grad():
            module.weight.copy_(values)
        if not ran:
            assert torch.equal(module.weight.dequantize(), values.bfloat16())
            continue
        with region("delayed"):
            module(inputs("cpu"))
        assert module.fp8_state.scale_fwd[1] == 448 / 2**step


@on_devices
def test_what_is_gone_makes_no_scale(device: str) -> None:
    """Of values that were there before, and greater, nothing is left among the maxima."""
    module, values = written("copy_", "delayed", device)
    with torch.no_grad():
        module.weight.copy_(values / 64)
    assert module.fp8_state.amax_history_fwd[:, 1].max() == (values / 64).abs().max()
    for _ in range(2):
        with region("delayed"):
            module(inputs(device))
    assert torch.allclose(module.fp8_state.scale_fwd[1], 64 * 448 / values.abs().max().float(), rtol=1e-6)


@on_devices
def test_later_writes_follow_the_maxima(device: str) -> None:
    """Once the layer has run, a write keeps the scale, as delayed scaling says: the next update brings another."""
    module, values = written("copy_", "delayed", device)
    with region("delayed"):
        module(inputs(device))
    before = module.weight._scale_inv.clone()
    with torch.no_grad():
        module.weight.copy_(4 * values)
    assert torch.equal(module.weight._scale_inv, before)
    assert module.weight.dequantize().abs().max() <= 1.01 * values.abs().max()
    with region("delayed"):
        module(inputs(device))
    with torch.no_grad():
        module.weight.copy_(4 * values)
    assert snr_db(module.weight.dequantize().float(), (4 * values).float()) > 25


@pytest.mark.parametrize("how", ["traced", "update"])
def test_compiled_runs_count(how: str) -> None:
    """No forward of a compiled module is seen: tracing it says that it runs, and so does an update of its scales."""
    module, values = written("copy_", "delayed", "cpu")
    if how == "traced":

        @torch.compile(backend="eager", fullgraph=True)
        def step(x: torch.Tensor) -> torch.Tensor:
            with region("delayed"):  # ends inside, where no Python of ours runs
                y: torch.Tensor = module(x)
            return y

        step(inputs("cpu"))
    else:
        module.fp8_state.begins = None
    before = module.weight._scale_inv.clone()
    with torch.no_grad():
        module.weight.copy_(4 * values)
    assert torch.equal(module.weight._scale_inv, before)


@on_devices
@pytest.mark.parametrize("move", ["device", "dtype"])
def test_a_module_that_was_moved_has_not_run(move: str, device: str) -> None:
    """`model.cuda()` comes before the weights are sent or loaded as often as after."""
    there = torch.device(device)
    begins, to = ("cpu", there) if move == "device" else (device, torch.float32)
    module, values = written("copy_", "delayed", begins, lambda m: m.to(to))
    assert module.weight.device.type == there.type
    assert torch.allclose(module.weight._scale_inv, values.abs().max().float() / 448, rtol=1e-6)
    assert snr_db(module.weight.dequantize().float(), values.float()) > 25
    with region("delayed"):
        y = module(inputs(device).to(module.weight.dtype))
    assert snr_db(y.float(), (inputs(device).float() @ values.T.float())) > 25


@on_devices
def test_loaded_maxima_count(device: str) -> None:
    """A checkpoint with scales and maxima is that of a layer that has run."""
    trained, values = written("copy_", "delayed", device)
    with region("delayed"):
        trained(inputs(device))
    module = build("Linear", "delayed", device)
    module.load_state_dict(trained.state_dict())
    with torch.no_grad():
        for m in (trained, module):
            m.weight.copy_(4 * values)
    assert torch.equal(module.weight.dequantize(), trained.weight.dequantize())


@on_devices
def test_loaded_bytes_bring_their_scale(device: str) -> None:
    """A checkpoint of quantized weights alone says nothing of maxima: they are those of what it brings."""
    source, values = written("copy_", "delayed", device)
    module: Any = build("Linear", "delayed", device)
    module.load_state_dict({"weight": source.weight.detach()}, strict=False)
    assert torch.equal(module.weight.dequantize(), source.weight.dequantize())
    assert torch.allclose(module.fp8_state.scale_fwd[1], 448 / values.abs().max().float(), rtol=1e-6)
    with region("delayed"):
        module(inputs(device))
    with torch.no_grad():
        module.weight.mul_(1.0)
    assert snr_db(module.weight.dequantize().float(), values.float()) > 25
