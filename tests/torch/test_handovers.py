"""What goes from module to module quantized: the receiver's history sees its maxima, so that the receiver has a true
scale when it has to quantize by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.backends import devices, on_devices
from tests.tolerances import DB, snr_db

HEADS, HEAD = 2, 128  # GPUs train heads of 128
WIDTH = HEADS * HEAD
PLAIN = DelayedScaling(amax_history_len=3)
RECIPES = {
    "dpa": DelayedScaling(fp8_dpa=True, amax_history_len=3),
    "mha": DelayedScaling(fp8_dpa=True, fp8_mha=True, amax_history_len=3),
}
#: What of an attention block gets which scale of which: (receiver, direction, column, giver, its column).
OUT = ("proj", "fwd", 0, "core_attention", 3)
GRAD = ("core_attention", "bwd", 3, "proj", 1)
PACKED = [("core_attention", "fwd", 2, "qkv", 2), ("qkv", "bwd", 0, "core_attention", 0)]
HANDED = {"dpa": [OUT, GRAD], "mha": [OUT, GRAD, *PACKED]}


def attention(device: str, **options: Any) -> te.MultiheadAttention:
    torch.manual_seed(0)
    options = {"attn_mask_type": "causal", "fuse_qkv_params": True, "attention_dropout": 0.0, "bias": False} | options
    return te.MultiheadAttention(
        WIDTH, HEADS, layer_number=1, params_dtype=torch.bfloat16, device=device, qkv_format="bshd", **options
    )


def tokens(device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def train(block: Any, recipe: Any, device: str, steps: int = 3, size: float = 1.0, **options: Any) -> None:
    for i in range(steps):
        with te.autocast(recipe=recipe):
            y = block(tokens(device, i) * size, **options)
        y.backward(y.detach() * 1e-3 * size)
        block.zero_grad()


def kept(block: Any, name: str, direction: str, column: int) -> tuple[Any, Any]:
    state = block.get_submodule(name).fp8_state
    return getattr(state, f"scale_{direction}")[column], getattr(state, f"amax_history_{direction}")[:, column]


def check_handed(block: Any, handed: list[Any]) -> None:
    """Each receiver has the scale and the history of who hands over, which have seen maxima."""
    for receiver, direction, column, giver, its in handed:
        got, wanted = kept(block, receiver, direction, column), kept(block, giver, direction, its)
        assert wanted[1].any() and wanted[0] != 1
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1]), (receiver, direction)


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_receiver_keeps_the_history_of_what_it_is_handed(recipe: str, device: str) -> None:
    block = attention(device)
    train(block, RECIPES[recipe], device)
    check_handed(block, HANDED[recipe])


@on_devices
def test_cross_attention(device: str) -> None:
    """Two projections hand over to one scale: its maxima are those of both."""
    block = attention(device, attention_type="cross", attn_mask_type="no_mask")
    train(block, RECIPES["mha"], device, encoder_output=tokens(device, 9) * 3)
    check_handed(block, [OUT, GRAD])
    q, kv = (kept(block, name, "fwd", 2)[1] for name in ("query_layer", "key_value"))
    assert torch.equal(kept(block, "core_attention", "fwd", 2)[1], torch.maximum(q, kv))
    assert q.any() and (kv > q).any()


@on_devices
@pytest.mark.parametrize("region", ["around", pytest.param("inside", marks=pytest.mark.more)])
@pytest.mark.parametrize("recipe", ["mha", pytest.param("dpa", marks=pytest.mark.more)])
def test_compiled(recipe: str, region: str, device: str) -> None:
    """Steps of compiled code alone."""
    block = attention(device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPES[recipe]):
            return block(x)

    te.prepare_state(block, RECIPES[recipe])
    torch._dynamo.reset()
    compiled = torch.compile(forward if region == "inside" else block, fullgraph=True, backend="aot_eager")
    for i in range(3):
        with te.autocast(recipe=RECIPES[recipe]) if region == "around" else nullcontext():
            y = compiled(tokens(device, i))
        y.backward(y.detach() * 1e-3)
    check_handed(block, HANDED[recipe])


@pytest.mark.parametrize(
    ("around", "device"), [(a, d) for d in devices() for a in ("checkpoint", "graph") if (a, d) != ("graph", "cpu")]
)
def test_what_runs_again_or_is_replayed(around: str, device: str) -> None:
    block: Any = attention(device)
    recipe = RECIPES["mha"]
    if around == "graph":
        run = te.make_graphed_callables(block, (tokens(device).requires_grad_(),), fp8_enabled=True, fp8_recipe=recipe)
    else:
        run = lambda x: te.checkpoint(block, x, use_reentrant=False)  # noqa: E731
    for i in range(3):
        with te.autocast(recipe=recipe):
            y = run(tokens(device, i).requires_grad_())
        y.backward(y.detach() * 1e-3)
    check_handed(block, HANDED["mha"])


@on_devices
def test_by_the_user(device: str) -> None:
    """Between any two layers, the gradient too; a receiver that is gone is forgotten."""
    first, second = (te.Linear(64, 64, params_dtype=torch.bfloat16, device=device) for _ in range(2))
    pair = torch.nn.ModuleDict({"first": first, "second": second})
    x = tokens(device).view(-1, 64)
    for _ in range(2):
        with te.autocast(recipe=PLAIN):
            y = second(first(x, fp8_output=True).view(-1, 2, 64), fp8_grad=True)
        y.sum().backward()
    check_handed(pair, [("second", "fwd", 0, "first", 2)])
    # To autograd the gradient is plain where the tensor was viewed in between.
    want = y.detach()
    with torch.no_grad(), te.autocast(recipe=PLAIN):
        got = second((first(x) * 1e-2).view(-1, 2, 64))
        want = torch.nn.functional.linear((first(x) * 1e-2).view(-1, 2, 64), second.weight, second.bias)
    assert snr_db(got, want) > DB["fp8 gemm"]
    del second, pair, y
    with te.autocast(recipe=PLAIN):
        first(x, fp8_output=True)


# ------------------------------------------------------------------------------------- a change of the path


def hooked(block: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    """A hook that gives the projection plain values."""
    handle = block.proj.register_forward_pre_hook(
        lambda _, args: (args[0].dequantize() if hasattr(args[0], "_quantizer") else args[0], *args[1:])
    )
    with region:
        y = block(x)
    handle.remove()
    return y


def masked_when_compiled(block: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    torch._dynamo.reset()
    mask = torch.zeros(2, 1, 1, 16, dtype=torch.bool, device=x.device)
    with region:
        return torch.compile(block, backend="aot_eager")(x, mask, attn_mask_type="padding_causal")


def as_it_is(block: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    with region:
        return block(x)


def cached(block: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    from collections import OrderedDict

    cache = te.InferenceParams(2, 16, HEADS, HEAD, torch.bfloat16)
    cache.pre_step(OrderedDict([(0, 16), (1, 16)]))
    with region:
        return block(x, inference_params=cache, attn_mask_type="padding_causal")


def exported(block: Any, x: torch.Tensor, region: Any) -> torch.Tensor:
    class Program(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(recipe=RECIPES["dpa"]):
                return self.block(x)

    return torch.export.export(Program(), (x,)).module()(x)


#: Another way through the block: how it is called, in which recipe (None: that of training), options of the block.
WAYS: dict[str, tuple[Callable[..., torch.Tensor], Any, dict[str, Any]]] = {
    "plain recipe": (as_it_is, PLAIN, {}),
    "hook": (hooked, None, {}),
    "cache": (cached, None, {}),
    "compiled with a mask": (masked_when_compiled, None, {}),
    "exported": (exported, None, {"qk_norm_type": "L2Normalization"}),
}


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.more if w[:2] in ("co", "ex") else []) for w in WAYS]
)
def test_another_path_finds_true_scales(way: str, recipe: str, device: str) -> None:
    """Small activations of a model that was trained on such ones: with a scale of 1 they would be zeros."""
    run, other, options = WAYS[way]
    if way == "cache" and device == "cuda":
        other = PLAIN  # Hopper has no FP8 attention behind a cache: its diagonal ends bottom-right
    block = attention(device, **options)
    train(block, RECIPES[recipe], device, size=2e-3)
    x = tokens(device, 5) * 2e-3
    block.eval()
    with torch.no_grad():
        want, got = block(x), run(block, x, te.autocast(recipe=other or RECIPES[recipe]))
    assert snr_db(got, want) > DB["fp8 attention block"]


@on_devices
def test_an_older_checkpoint(device: str) -> None:
    """In which the receiver of what went in FP8 never saw a maximum: it begins as who handed over to it."""
    block = attention(device)
    train(block, RECIPES["dpa"], device)
    saved = {name: t.clone() for name, t in block.state_dict().items()}
    for receiver, direction, column, *_ in HANDED["dpa"]:
        saved[f"{receiver}.fp8_state.scale_{direction}"][column] = 1
        saved[f"{receiver}.fp8_state.amax_history_{direction}"][:, column] = 0
    loaded = attention(device)
    loaded.load_state_dict(saved)
    check_handed(loaded, HANDED["dpa"])
    saved["proj.fp8_state.scale_fwd"][0] = 2.0  # one that saw some keeps its own
    loaded.load_state_dict(saved)
    assert loaded.proj.fp8_state.scale_fwd[0] == 2


def test_scalings_that_differ_hand_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in current scaling by the environment knows no maximum for a projection with delayed scaling."""
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "Float8CurrentScaling")
    block = attention("cpu")
    train(block, RECIPES["dpa"], "cpu")
    assert block.proj.fp8_state.scale_fwd[0] > 1
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE_DPA", "1")
    block = attention("cpu")
    train(block, Float8CurrentScaling(), "cpu")
    scales = block.core_attention.fp8_state.scale_bwd
    assert scales[3] != 1 and block.proj.fp8_state is None
