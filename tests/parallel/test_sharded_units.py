"""Parts of a layer that are sharded by themselves: what they return outlasts their forward, what was freed is refused,
and parameters keep the marks that trainers go by.
"""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import te_torch as te
from te_core.errors import UnsupportedError
from te_torch.base.residual import Branch, bias_dropout_add
from tests.covering import covering
from tests.parallel.ranks import ROOT, Rank
from tests.parallel.steps import by_ranks, error_of, same, says
from tests.recipes import rule
from tests.recordings import tapes
from tests.world import values

H, S, B = 64, 16, 2
ATTENTION, MLP = "self_attention", "layernorm_mlp"
PARTS = [MLP, f"{ATTENTION}.proj", f"{ATTENTION} {MLP}", ATTENTION, f"{ATTENTION}.proj {ATTENTION}"]


def layer_of(device: str, **options: Any) -> Any:
    """A layer whose biases show where they are left out."""
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, "device": device} | options
    layer = te.TransformerLayer(H, H, 4, **options)
    with torch.no_grad():
        for p in layer.parameters():
            if p.ndim == 1:
                p.add_(0.5)
    return layer


def shard(layer: Any, parts: tuple[str, ...], engine: str, device: str) -> Any:
    """The layer with these parts as units of their own; `engine` is "2" (FSDP2), "2 kept" or "1"."""
    if engine != "1":
        for part in parts:
            fully_shard(layer.get_submodule(part), reshard_after_forward=engine == "2")
        return fully_shard(layer, reshard_after_forward=engine == "2")
    place: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device(device)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in parts:
            parent, _, name = part.rpartition(".")
            holder = layer.get_submodule(parent)
            setattr(holder, name, FullyShardedDataParallel(getattr(holder, name), **place))
        return FullyShardedDataParallel(layer, **place)


def calls(layer: Any, x: torch.Tensor, more: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs, without gradients and with them (the last ones are replayed); the gradient of the input."""
    x = x.clone().requires_grad_()
    with torch.no_grad():
        found = [layer(x, **more)]
    for _ in range(3):
        y = layer(x, **more)
        y.square().mean().backward()
        found.append(y.detach())
    assert x.grad is not None
    return [y.cpu() for y in found], x.grad.cpu()


def wrapped(rank: Rank, parts: tuple[str, ...], engine: str, options: dict[str, Any]) -> None:
    plain, layer = layer_of(rank.device, **options), layer_of(rank.device, **options)
    x = values(S, B, H, seed=rank.number, device=rank.device)
    more = {"encoder_output": values(S, B, H, seed=9, device=rank.device)} if "layer_type" in options else {}
    wanted, wanted_dx = calls(plain, x, more)
    with tapes("first"):
        found, dx = calls(shard(layer, parts, engine, rank.device), x, more)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, wanted_dx, rtol=1e-5, atol=1e-7)
    if engine != "1":
        gradients = dict(layer.named_parameters())
        for name, p in plain.named_parameters():
            mean = p.grad / rank.world
            dist.all_reduce(mean)
            torch.testing.assert_close(gradients[name].grad.full_tensor(), mean, rtol=1e-5, atol=1e-7, msg=name)


@covering(parts=PARTS, engine=["2", "2 kept", "1"])
@by_ranks()
def test_parts_of_a_layer_as_units(rank: Rank, parts: str, engine: str) -> None:
    """`return_bias` hands out a parameter, whose memory the unit frees before the layer adds it."""
    if engine != "1" or parts != PARTS[-1]:  # FSDP1 wraps the inner one under another name
        wrapped(rank, tuple(parts.split()), engine, {})


@pytest.mark.parametrize("options", [{"layer_type": "decoder"}, {"drop_path_rate": 1e-9}, {"fuse_qkv_params": False}])
@by_ranks("two")
def test_layers_of_other_kinds(rank: Rank, options: dict[str, Any]) -> None:
    parts = (ATTENTION, "inter_attention", MLP) if "layer_type" in options else (ATTENTION, MLP)
    wrapped(rank, parts, "2", options)


@by_ranks("two")
def test_biases_that_modules_return(rank: Rank) -> None:
    """Biases that modules return to their caller, from units of one module."""
    x = values(S, H, device=rank.device)
    makers = (
        lambda: te.Linear(H, H, return_bias=True, device=rank.device),
        lambda: te.LayerNormLinear(H, H, return_bias=True, device=rank.device),
        lambda: te.LayerNormMLP(H, H, return_bias=True, device=rank.device),
        lambda: te.GroupedLinear(2, H, H, return_bias=True, device=rank.device),
    )
    for make in makers:
        module: Any = make()
        more = ([S // 2, S // 2],) if isinstance(module, te.GroupedLinear) else ()
        for p in module.parameters():
            if p.ndim == 1:
                torch.nn.init.constant_(p, 0.5)
        y, biases = fully_shard(module, reshard_after_forward=True)(x, *more)
        biases = biases if isinstance(biases, list) else [biases]
        assert all(torch.equal(bias, torch.full_like(bias, 0.5)) for bias in biases), module


def test_biases_are_returned_as_they_are() -> None:
    """Without shards nothing is copied: the bias is the parameter, and a layer's addition stays one pass."""
    for module in (te.Linear(H, H, return_bias=True, device="cpu"), te.MultiheadAttention(H, 4, return_bias=True)):
        module.to("cpu")
        _, bias = module(values(S, B, H))
        assert any(bias is p for p in module.parameters())


# -------------------------------------------------------------------------------------------------- what was freed


class Handing(torch.nn.Module):
    """A module of a user's, which returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.bias = torch.nn.Parameter(torch.ones(7)), torch.nn.Parameter(torch.ones(H))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.bias


class Adding(torch.nn.Module):
    def __init__(self, fused: bool, device: str) -> None:
        super().__init__()
        self.inner: Any = Handing().to(device)
        self.mlp = te.LayerNormMLP(H, H, device=device) if fused else None

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.inner(x)
        return self.mlp(Branch(out, x, bias)) if self.mlp is not None else bias_dropout_add(out, bias, x, 0.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("engine", ["2", "1"])
@by_ranks("two")
def test_a_parameter_without_memory(rank: Rank, engine: str, fused: bool) -> None:
    """Neither zeros nor a crash: FSDP1's parameters, parts of a flat one, have a low address then, and not 0."""
    model, x = Adding(fused, rank.device), values(S, H, device=rank.device).requires_grad_()
    with tapes("first"):
        for _ in range(3):  # recorded and replayed, while the parameter is there
            model(x)
        sharded = shard(model, ("inner",), engine, rank.device)
        for _ in range(2):
            said = error_of(lambda: sharded(x), UnsupportedError)
            says(said, "without memory", f"of shape ({H},)", "Allowed: ", "unshard()")


@by_ranks("two")
def test_parts_of_freed_memory(rank: Rank) -> None:
    """What FSDP1 leaves of a parameter: a part, not the first, of memory that is gone."""
    whole, r = torch.ones(2 * H, device=rank.device), values(S, H, device=rank.device)
    part, x = whole[H:], r.clone().requires_grad_()
    mlp, norm = te.LayerNormMLP(H, H, device=rank.device), te.LayerNorm(H, device=rank.device)
    with tapes("first"):
        for _ in range(3):  # from here on replayed
            bias_dropout_add(x, part, r, 0.0)
            mlp(Branch(x, r, part))
        whole.untyped_storage().resize_(0)
        assert 0 < part.data_ptr() < 1 << 33
        for call in (lambda: bias_dropout_add(x, part, r, 0.0), lambda: mlp(Branch(x, r, part)), lambda: norm(part)):
            says(error_of(call, UnsupportedError), "Error: te_torch: got a Tensor of shape", "without memory")


# ----------------------------------------------------------------------------------------------------------- marks

MARKS = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")


def marks_of(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {mark: getattr(p, mark) for mark in MARKS if hasattr(p, mark)} for name, p in module.named_parameters()
    }


def loop() -> str:
    """What docs/parallel.md has a trainer do with gradients."""
    page = (Path(ROOT) / "docs/parallel.md").read_text()
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = [block for block in found if "dist.all_reduce(" in block and '"sequence_parallel"' in block]
    return str(code)


@pytest.mark.four_ranks(engine="2", quantized=True)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("engine", ["none", "2"])
@by_ranks()
def test_the_trainers_loop(rank: Rank, engine: str, quantized: bool) -> None:
    """`fully_shard` makes parameters of its own, marked as the module's were, and the documented loop adds them up."""
    mesh = init_device_mesh(rank.device, (rank.world // 2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    with te.quantized_model_init(recipe=rule("current")) if quantized else nullcontext():
        spread: dict[str, Any] = {"set_parallel_mode": True, "sequence_parallel": True, "tp_group": group}
        model: Any = layer_of(
            rank.device, qk_norm_type="RMSNorm", output_layernorm=True, params_dtype=torch.bfloat16, **spread
        )
    before = marks_of(model)
    if engine == "2":
        for part in (model.self_attention, model.layernorm_mlp, model):
            fully_shard(part, mesh=mesh["dp"])
    x = values(S, B, H, seed=rank.number, device=rank.device, dtype=torch.bfloat16)
    with te.autocast(enabled=quantized, recipe=rule("current")):
        model(x).float().square().mean().backward()
    exec(loop(), {"model": model, "tp_group": group, "dist": dist, "torch": torch})
    summed = [p.grad for name, p in model.named_parameters() if before[name].get("sequence_parallel")]
    assert marks_of(model) == before and len(summed) >= 6
    for grad in summed:
        mine = grad.to_local() if hasattr(grad, "to_local") else grad
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine, group=group)
        assert torch.equal(*parts)
    cut = {name for name, marks in before.items() if marks.get("tensor_model_parallel")}
    assert {"layernorm_mlp.fc1_weight", "self_attention.proj.weight"} <= cut


@covering(way=["copied", "emptied", "assigned", "converted", "replaced"], quantized=[False, True])
def test_marks_outlast_parameters(way: str, quantized: bool) -> None:
    """Each of these puts other parameters in the place of the module's."""
    with te.quantized_model_init(recipe=rule("current")) if quantized else nullcontext():
        options: dict[str, Any] = {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": 2}
        model: Any = layer_of("cpu", qk_norm_type="RMSNorm", **options)
        other: Any = layer_of("meta" if way == "emptied" else "cpu", qk_norm_type="RMSNorm", **options)
    wanted = marks_of(model)
    assert wanted["self_attention.q_norm.weight"] == {"sequence_parallel": True}
    assert wanted["layernorm_mlp.fc2_weight"]["partition_dim"] == 1
    if way == "copied":
        model = copy.deepcopy(model)
    elif way == "emptied":
        model = other.to_empty(device="cpu")
    elif way == "assigned":
        model.load_state_dict(other.state_dict(), assign=True)
    elif way == "converted":
        model = model.to(torch.float64).to(torch.float32)
    else:
        # A program's own: Megatron-core asserts that it has no marks yet, and sets them.
        model.layernorm_mlp.fc2_bias = torch.nn.Parameter(torch.zeros(H))
        own = torch.nn.Parameter(torch.zeros(H))
        own.sequence_parallel = False  # type: ignore[attr-defined]
        model.layernorm_mlp.layer_norm_weight = own
        wanted["layernorm_mlp.fc2_bias"] = {}
        wanted["layernorm_mlp.layer_norm_weight"] = {"sequence_parallel": False}
        assert marks_of(model) == wanted
        model.double()  # this makes parameters, too
        wanted["layernorm_mlp.fc2_bias"] = {"sequence_parallel": True}
    assert marks_of(model) == wanted


# -------------------------------------------------------------------------------------- weights between microbatches


def microbatches(rank: Rank, engine: str) -> dict[str, Any]:
    """Two steps of three microbatches: their outputs, and of each whether the quantized weights are those kept."""
    torch.manual_seed(0)
    module: Any = te.LayerNormMLP(H, 2 * H, device=rank.device)
    model: Any = module
    if engine.startswith("2"):
        fully_shard(model, mesh=init_device_mesh(rank.device, (rank.world,)), reshard_after_forward=engine == "2")
    elif engine == "1":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(module, device_id=torch.device(rank.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"y": [], "kept": []}

    def forward(number: int, first: bool | None) -> torch.Tensor:
        before = {name: cached.value for name, cached in module._weight_cache.items()}
        with te.autocast(recipe=rule("current")):
            y: torch.Tensor = model(values(S, H, seed=number, device=rank.device), is_first_microbatch=first)
        found["y"].append(y.detach())
        found["kept"].append([before.get(name) is cached.value for name, cached in module._weight_cache.items()])
        return y

    for step in range(2):
        for number in range(3):
            if engine.startswith("2"):
                model.set_requires_gradient_sync(number == 2)
            forward(3 * step + number, number == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        forward(0, False)  # after a step: nobody said that this is a first one
        forward(0, False)
        if engine.startswith("2"):
            model.reshard()
            module.fc1_weight.to_local().mul_(2)  # as a checkpoint is loaded
            forward(0, False)
            forward(0, None)
    return found


@pytest.mark.parametrize("engine", ["none", "2", "2 kept", "1"])
@by_ranks()
def test_weights_between_microbatches(rank: Rank, engine: str) -> None:
    """A gathered weight is quantized once in a group of microbatches, and again after its shard has changed. Of FSDP1
    nothing tells whether what it gathered is what it was: each microbatch quantizes weights, and none stays."""
    mine, whole = microbatches(rank, engine), microbatches(rank, "none")
    kept, changed = [True, True], [False, False]
    wanted = [changed, kept, kept, changed, kept, kept, changed, kept]
    if engine == "1":
        wanted = [[]] * 8
    elif engine != "none":
        wanted += [[False, True], kept]  # the last call asks for none
        assert torch.equal(mine["y"][-2], mine["y"][-1]) and not torch.equal(mine["y"][-2], mine["y"][-3])
    assert mine["kept"] == wanted and same(mine["y"][:8], whole["y"])


def test_who_listens_hears_of_parameters() -> None:
    """A module exchanges its parameters by a way of its own: torch's hooks on registration are called all the same."""
    heard, layer = [], te.Linear(8, 8, device="cpu")
    handle = torch.nn.modules.module.register_module_parameter_registration_hook(lambda m, name, p: heard.append(name))
    try:
        layer.weight = torch.nn.Parameter(torch.zeros(8, 8))
    finally:
        handle.remove()
    assert heard == ["weight"] and not layer.weight.any()


def test_an_exchange_is_no_registration() -> None:
    """FSDP2 exchanges each parameter four times a step; Module's own way takes 3 us each time."""
    layer, other = te.Linear(8, 8, device="cpu"), torch.nn.Parameter(torch.zeros(8, 8))
    with mock.patch.object(torch.nn.Module, "register_parameter", side_effect=AssertionError("registered")):
        layer.weight = other
    assert layer.weight is other and dict(layer.named_parameters())["weight"] is other
