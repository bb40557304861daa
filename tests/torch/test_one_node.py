"""A TransformerLayer as one call with one node of autograd (te_torch/base/graph.py), and when its parts run."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.utils import prune, spectral_norm, weight_norm

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch.base import graph
from tests.backends import devices
from tests.covering import covering
from tests.recipes import region
from tests.recordings import tapes
from tests.world import bits, drawn, passed, randomise

ROWS, HIDDEN = 16, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"hidden_dropout": 0.0},
    "dropout": {"hidden_dropout": 0.3},
    "one qkv": {"hidden_dropout": 0.0, "fuse_qkv_params": True, "bias": False, "normalization": "RMSNorm"},
    "gated": {"hidden_dropout": 0.1, "activation": "swiglu", "num_gqa_groups": 1, "qkv_weight_interleaved": False},
}


def layer(device: str = "cpu", name: str = "plain", **more: Any) -> Any:
    given = {"attention_dropout": 0.0, "self_attn_mask_type": "causal", **OPTIONS[name], **more}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # which cuDNN's attention takes
    made = te.TransformerLayer(HIDDEN, 64, 2, device=device, params_dtype=dtype, **given)
    randomise(made)
    return made


@pytest.fixture(autouse=True)
def from_the_first_call() -> Iterator[None]:
    with tapes("first"):
        yield


def of(device: str) -> torch.Tensor:
    """An input."""
    return drawn(ROWS, 2, HIDDEN, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)


def stepped(module: Any, x: torch.Tensor, recipe: str | None = None) -> dict[str, Any]:
    """The bits of a step with equal draws and without gradients before it."""
    module.zero_grad()
    torch.manual_seed(1)
    return bits(passed(module, x, recipe))


def nodes(module: Any, recipe: str | None = None, angles: torch.Tensor | None = None, **more: Any) -> int:
    """How many nodes of ours a forward leaves."""
    with region(recipe):
        x = of(str(next(module.parameters()).device)).requires_grad_()
        y = module(x, **{"rotary_pos_emb": angles, **more})
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [n for n, _ in node.next_functions]
    return sum("_Eager" in node.name() for node in seen)


@pytest.mark.parametrize("turned", [False, True])
def test_one_trained_parameter_gets_its_gradient(turned: bool) -> None:
    """As in fine-tuning of biases: of the last bias no gradient goes on through the MLP."""
    module, x = layer(), of("cpu")
    angles = te.RotaryPositionEmbedding(16).to("cpu")(ROWS) if turned else None
    for name, p in module.named_parameters():
        for other in module.parameters():
            other.requires_grad_(other is p)
        found = []
        for _ in range(3):
            module.zero_grad()
            module(x, rotary_pos_emb=angles).square().sum().backward()
            assert p.grad is not None, name
            found.append(p.grad.clone())
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), name


@covering(
    turned=[False, True], name=OPTIONS, recipe=[None, "delayed", "current", "block", "mxfp8", "nvfp4"], device=devices()
)
def test_same_bits_as_its_parts(name: str, recipe: str | None, device: str, turned: bool) -> None:
    """Outputs, gradients, scales and histories, in training with an optimizer, and in evaluation."""
    angles = te.RotaryPositionEmbedding(16).to(device)(ROWS) if turned else None

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module, found = layer(device, name), []
        module.one_node = one
        for _ in range(3):
            found.append(passed(module, of(device), recipe, rotary_pos_emb=angles))
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(p.grad, alpha=-0.01)
                    p.grad = None
        assert nodes(module, recipe, angles) == (1 if one else 5 + turned)
        module.eval()
        with torch.no_grad(), region(recipe):
            for _ in range(3):
                found.append(module(of(device), rotary_pos_emb=angles))
        return found

    assert bits(program(True)) == bits(program(False))


def _bias() -> dict[str, Any]:
    return {
        "core_attention_bias": drawn(1, 2, ROWS, ROWS).requires_grad_(),
        "core_attention_bias_type": "post_scale_bias",
    }


def _encoded(**more: Any) -> dict[str, Any]:
    return {"encoder_output": drawn(ROWS, 2, HIDDEN).requires_grad_(), **more}


def _later() -> dict[str, Any]:
    return {"is_first_microbatch": False}


TURNS = {"rotary_pos_emb": te.RotaryPositionEmbedding(16).to("cpu")(ROWS)}
LENGTHS = torch.tensor([0, ROWS - 3, 2 * ROWS - 5], dtype=torch.int32)
HIDDEN_KEYS = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).triu(1)
#: Options of the constructor, what forward is given besides, and of how many nodes the parts are.
ONE: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], int]] = {
    "dropout in attention": ({"attention_dropout": 0.2, "hidden_dropout": 0.1}, dict, 5),
    "norm behind": ({"output_layernorm": True}, dict, 6),
    "residuals of the norm": ({"apply_residual_connection_post_layernorm": True}, dict, 5),
    "branches side by side": ({"parallel_attention_mlp": True}, dict, 6),
    "norms of queries and keys": ({"qk_norm_type": "RMSNorm"}, dict, 8),
    "one norm of queries and keys": ({"qk_norm_type": "L2Normalization"}, lambda: TURNS, 8),
    "a decoder": ({"layer_type": "decoder"}, _encoded, 9),
    "a decoder, turned": ({"layer_type": "decoder", "fuse_qkv_params": True}, lambda: _encoded(**TURNS), 12),
    "a bias of scores": ({}, _bias, 5),
    "a mask": ({"self_attn_mask_type": "arbitrary"}, lambda: {"attention_mask": HIDDEN_KEYS}, 5),
    "main_grad": ({"fuse_wgrad_accumulation": True, "fuse_qkv_params": True}, dict, 5),
    "microbatches": ({}, _later, 5),
}
#: What runs part by part, and why.
PARTS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], int]] = {
    "lengths on a CPU are looked at in each call": (
        {"self_attn_mask_type": "padding"},
        lambda: {"cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS},
        5,
    ),
    "torch's operations drop paths": ({"drop_path_rate": 0.1}, dict, 6),
    "lengths are counted in a mask": (
        {"self_attn_mask_type": "padding"},
        lambda: {"attention_mask": torch.zeros(2, 1, 1, ROWS, dtype=torch.bool)},
        5,
    ),
}


@covering(name={**ONE, **PARTS}, recipe=[None, "delayed", "current", "nvfp4"])
def test_what_is_one_node(name: str, recipe: str | None) -> None:
    """The bits are those of the parts."""
    options, given, count = {**ONE, **PARTS}[name]

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module, found, more = layer(**options), [], given()
        module.one_node = one
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p)
        for _ in range(3):
            found.append(passed(module, of("cpu"), recipe, **more))
        assert nodes(module, recipe, **more) == (1 if one and name in ONE else count)
        return [
            found,
            [p.main_grad for p in module.parameters()],
            [t.grad for t in more.values() if hasattr(t, "grad")],
        ]

    assert bits(program(True)) == bits(program(False))


class Looks:
    """An inspector that sees nothing."""

    request = frozenset(("fprop", "input"))

    def inspect(self, point: Any, *given: Any) -> None: ...


class Counting(te.MultiheadAttention):
    """An attention block that does something besides."""

    calls = 0

    def forward(self, *given: Any, **more: Any) -> Any:
        self.__dict__["calls"] += 1
        return super().forward(*given, **more)


class Doubled(torch.nn.Module):
    """A projection with something around it, as an adapter has."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.fp8_state = inner, None

    def forward(self, *given: Any) -> Any:
        out, bias = self.inner(*given)
        return out * 2, bias


def _around(forward: Any) -> Any:
    return lambda *given, **more: forward(*given, **more)


@contextmanager
def _of_another_class(m: Any) -> Iterator[None]:
    def become(kind: type) -> None:
        m.self_attention.__class__ = kind
        m.one_node = False
        m.one_node = True  # as any attribute that is set, it has plans made anew

    m.self_attention.__dict__["calls"] = 0
    become(Counting)
    yield
    assert m.self_attention.calls == 3
    become(te.MultiheadAttention)


@contextmanager
def _dropped(m: Any) -> Iterator[None]:
    m.drop_path = torch.nn.Hardtanh(-0.01, 0.01)
    yield
    m.drop_path = None
    m._modules.pop("drop_path")
    m.drop_path = None


@contextmanager
def _normed(m: Any) -> Iterator[None]:
    part = m.self_attention
    for name in ("q_norm", "k_norm"):
        part._modules[name] = torch.nn.LayerNorm(16)
        del part.__dict__[name]
    yield
    for name in ("q_norm", "k_norm"):
        del part._modules[name]
        part.__dict__[name] = None


@contextmanager
def _exchanged(m: Any) -> Iterator[None]:
    before = m.self_attention.proj
    m.self_attention.proj = torch.nn.Sequential()  # of another class
    m.self_attention.proj = Doubled(before)
    yield
    m.self_attention.proj = before


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda m: m.layernorm_mlp.register_forward_hook(lambda *_: None),
    "another part": _exchanged,
    "an inspector": lambda m: patch.object(m.layernorm_mlp, "inspector", Looks()),
    "a hook of all modules": lambda m: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    "a forward of its own": lambda m: patch.object(m.self_attention, "forward", _around(m.self_attention.forward)),
    "another class": _of_another_class,
    "a class with another forward": lambda m: patch.object(
        te.LayerNormMLP, "forward", _around(te.LayerNormMLP.forward)
    ),
    "asked for": lambda m: patch.object(m, "one_node", False),
    "dropped paths": _dropped,
    "other norms": _normed,
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_run_where_something_asks_for_them(change: str) -> None:
    module = layer()
    assert [nodes(module) for _ in range(3)][1:] == [1, 1]
    with CHANGES[change](module):
        assert all(nodes(module) >= 5 for _ in range(3))
    assert [nodes(module) for _ in range(3)][1:] == [1, 1]


def test_a_hook_that_unfreezes_what_has_run() -> None:
    """The layer's call was without that gradient; no later call is."""
    module, x = layer(), of("cpu")
    weight = module.layernorm_mlp.fc1_weight.requires_grad_(False)
    hook = module.layernorm_mlp.register_forward_hook(lambda *_: setattr(weight, "requires_grad", True))
    module(x)
    hook.remove()
    for _ in range(2):
        weight.grad = None
        module(x).sum().backward()
        assert weight.grad is not None


def _buffered(part: Any, name: str) -> None:
    value = part._parameters.pop(name).detach() * 2
    part.register_buffer(name, value)


IN_PLACE: dict[str, Callable[[Any, str], Any]] = {
    "pruned": lambda part, name: prune.l1_unstructured(part, name, 0.5),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "a buffer": _buffered,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("how", IN_PLACE)
def test_something_in_the_place_of_a_parameter(how: str, planned: bool) -> None:
    """A hook of torch's older kind computes it, or a program puts a buffer there, before or after a plan is made."""

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module, x, found = layer(), drawn(ROWS, 2, HIDDEN), []
        module.one_node = one
        for _ in range(2 * planned):
            passed(module, x)
        for part, name in ((module.layernorm_mlp, "fc1_weight"), (module.self_attention.proj, "weight")):
            IN_PLACE[how](part, name)
        for _ in range(3):
            module.zero_grad()
            found.append(passed(module, x))
        assert nodes(module) == (1 if one and how == "a buffer" else 5)
        return found

    assert bits(program(True)) == bits(program(False))


def test_a_parameter_under_two_names() -> None:
    """They are two parameters after weights were loaded, and each has its own gradient."""

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module, x, found = layer(), drawn(ROWS, 2, HIDDEN), []
        module.one_node = one
        module.layernorm_mlp.layer_norm_bias = module.self_attention.layernorm_qkv.layer_norm_bias
        for _ in range(3):
            module.zero_grad()
            found.append(passed(module, x))
        state = {name: t * 2 if "mlp.layer_norm_bias" in name else t for name, t in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        for _ in range(3):
            module.zero_grad()
            found.append(passed(module, x))
        assert nodes(module) == (1 if one else 5)
        return found

    assert bits(program(True)) == bits(program(False))


@pytest.mark.parametrize("name", ["query_weight", "key_weight", "value_weight"])
def test_the_dtype_of_one_of_several_weights(name: str) -> None:
    """torch.cat would promote it in silence."""
    module, x = layer(), drawn(ROWS, 2, HIDDEN)
    weight = getattr(module.self_attention.layernorm_qkv, name)
    for _ in range(3):
        module(x)
    weight.data = weight.data.bfloat16()
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{name} is torch.bfloat16"):
            module(x)


def test_states_of_nodes_without_a_backward() -> None:
    """What made the keys of a frozen decoder's cross attention sees no gradient."""

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module = layer(layer_type="decoder")
        module.one_node = one
        for i in range(6):
            module.requires_grad_(i < 1)
            x = of("cpu").requires_grad_()
            with te.autocast(recipe=DelayedScaling(amax_history_len=2), emulate=True):
                module(x, encoder_output=of("cpu")).square().sum().backward()
        return dict(module.named_buffers())

    assert bits(program(True)) == bits(program(False))


def test_biases_of_several_dtypes() -> None:
    """They are cast one by one, where no plan joins them."""

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module, x = layer(output_layernorm=True), drawn(ROWS, 2, HIDDEN)
        module.one_node = one
        bias = module.self_attention.qkv.query_bias
        bias.data = bias.data.bfloat16()
        return [passed(module, x, "current") for _ in range(3)]

    assert bits(program(True)) == bits(program(False))


@pytest.mark.parametrize("engine", ["grad", "inputs"])
@pytest.mark.parametrize("turned", [False, True])
def test_one_gradient_is_asked_for(turned: bool, engine: str) -> None:
    """The backward of the node goes as far as those of parts would: others see no gradient, and note no maxima."""
    angles = te.RotaryPositionEmbedding(16).to("cpu")(ROWS) if turned else None
    rule = DelayedScaling(amax_history_len=3)

    def program(one: bool) -> Any:
        torch.manual_seed(0)
        module, found = layer(), {}
        module.one_node = one
        for i in range(3 + len([*module.parameters()])):
            x = of("cpu").requires_grad_()
            given = [("x", x), *module.named_parameters()]
            with te.autocast(recipe=rule, emulate=True):
                y = module(x, rotary_pos_emb=angles).square().sum()
            name, t = given[i - 2] if i > 1 else ("all", None)
            if t is None:
                y.backward()
            elif engine == "grad":
                found[f"{name} gradient"] = torch.autograd.grad(y, t)
            else:
                t.grad = None
                y.backward(inputs=[t])
                found[f"{name} gradient"] = t.grad.clone()
            found[name] = [b.clone() for b in module.buffers()]
        return found

    assert bits(program(True)) == bits(program(False))


def test_hooks_on_what_is_saved_see_parts() -> None:
    """Memory goes to the host part by part, and a checkpoint runs parts again."""
    module, x = layer(), drawn(ROWS, 2, HIDDEN)
    assert [nodes(module) for _ in range(3)][1:] == [1, 1]
    with torch.autograd.graph.save_on_cpu():
        assert nodes(module) == 5
    for checkpoint in (te.checkpoint, torch.utils.checkpoint.checkpoint):
        found = []
        for again in (False, True, True):
            module.zero_grad()
            y = checkpoint(module, x, use_reentrant=False) if again else module(x)
            y.sum().backward()
            found.append(bits([y, [p.grad for p in module.parameters()]]))
        assert found[0] == found[1] == found[2]


def test_attributes_and_shapes_count() -> None:
    module, other = layer(), layer()
    other.load_state_dict(module.state_dict())
    other.one_node = False
    for rows in (16, 24, 16):
        for name, eps in (("layernorm_mlp", 1e-5), ("layernorm_mlp", 0.5), ("self_attention", 0.25)):
            for m in (module, other):
                part = getattr(m, name)
                getattr(part, "layernorm_qkv", part).eps = eps
            x = drawn(rows, 2, HIDDEN)
            for _ in range(2):
                assert stepped(module, x) == stepped(other, x)


def test_large_gradients_are_not_held_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of one node arrive together: where some are there already, parts give theirs one after another."""
    monkeypatch.setattr(graph, "_SMALL", 0)
    module, x = layer(), drawn(ROWS, 2, HIDDEN)
    for _ in range(3):
        passed(module, x)
        module.zero_grad(set_to_none=True)
    assert nodes(module) == 1
    passed(module, x)
    assert nodes(module) == 5
    module.zero_grad(set_to_none=True)
    assert nodes(module) == 1
    hook = module.layernorm_mlp.fc1_weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert nodes(module) == 5
    hook.remove()
    assert nodes(module) == 1


def test_nothing_holds_the_layer() -> None:
    """A layer goes as soon as nobody has it, without the garbage collector."""
    module = layer()
    for _ in range(3):
        passed(module, drawn(ROWS, 2, HIDDEN), "delayed")
    gone = weakref.ref(module.layernorm_mlp)
    gc.collect()
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_copies_have_plans_of_their_own() -> None:
    module, x = layer(), drawn(ROWS, 2, HIDDEN)
    for _ in range(3):
        passed(module, x)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.layernorm_mlp.fc1_weight.mul_(2)
    assert not other._plans
    wanted = bits(passed(module, x)["y"])
    assert all(bits(passed(other, x)["y"]) != wanted for _ in range(3)) and bits(passed(module, x)["y"]) == wanted


def test_two_recipes_in_turns() -> None:
    module, other, x = layer(), layer(), drawn(ROWS, 2, HIDDEN)
    other.load_state_dict(module.state_dict())
    other.one_node = False
    for turn in range(8):
        recipe = (None, "delayed", "current", "delayed")[turn % 4]
        assert stepped(module, x, recipe) == stepped(other, x, recipe), turn
    assert nodes(module) == nodes(module, "current") == 1
