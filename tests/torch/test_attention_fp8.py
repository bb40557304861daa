"""FP8 attention in modules: its state from step to step and in checkpoints, its recipe, what it hands over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.errors import ArgumentError
from te_core.ops import raw as ops
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, resolve
from te_torch.attention import env, fp8
from te_torch.attention.choose import NoBackendError
from te_torch.attention.dot_product import DotProductAttention
from te_torch.autocast import number_of, precision_of
from te_torch.tensors import Float8Tensor
from te_torch.transformer.multihead import MultiheadAttention
from tests.backends import on_devices
from tests.tolerances import DB, snr_db

HEADS, WIDTH = 4, 128  # the head width that FP8 training takes on Hopper
LIMITS = (448.0, 57344.0)
EMULATION = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UnfusedDPA_Emulate_FP8": "1"}


def delayed(**options: Any) -> DelayedScaling:
    return DelayedScaling(**{"fp8_dpa": True, "amax_history_len": 3} | options)


def values(device: str, seed: int = 0, s: int = 32, b: int = 2, requires_grad: bool = True) -> list[torch.Tensor]:
    """q, k, v with gradients wanted, and dy."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(s, b, HEADS, WIDTH, generator=make).to(device, torch.bfloat16) for _ in range(3))
    dy = torch.randn(s, b, HEADS * WIDTH, generator=make).to(device, torch.bfloat16)
    return [*(t.requires_grad_(requires_grad) for t in (q, k, v)), dy]


def step(module: Any, recipe: Any, inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    q, k, v, dy = inputs
    with te.autocast(recipe=recipe):
        y = module(q, k, v, **options)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)]


def alike(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> None:
    """Equal bits; on a GPU, whose backward adds in any order, all but a few roundings."""
    for a, b in zip(first, second, strict=True):
        assert snr_db(a, b) > DB["fp8 attention exact"] if a.is_cuda else torch.equal(a, b)


def close(low: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """The output, dq, dk and dv, but for what FP8 takes from them."""
    for name, got, want in zip(("", " dq", " dq", " dv"), low, wanted, strict=True):
        assert snr_db(got, want) > DB[f"fp8 attention{name}"]


@on_devices
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("sizes", [{"s": 0}, {"b": 0}])
def test_nothing_to_attend_to(sizes: dict[str, int], emulated: bool, device: str, monkeypatch: Any) -> None:
    """No tokens or no sequences give as many outputs and gradients, and leave the scales sound."""
    if emulated:
        for name, value in EMULATION.items():
            monkeypatch.setenv(name, value)
    inputs, module = values(device, **sizes), DotProductAttention(HEADS, WIDTH)
    for form in ("sbhd", "bshd"):
        out, *grads = step(module, delayed(), inputs, qkv_format=form)
        assert out.shape == inputs[3].shape and [g.shape for g in grads] == [t.shape for t in inputs[:3]]
    packed = torch.zeros(*inputs[0].shape[:2], 3, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    with te.autocast(recipe=delayed()):
        assert module(qkv_layer=packed).shape == inputs[3].shape
    given = values(device)
    alike(*(step(m, delayed(), given) for m in (module, DotProductAttention(HEADS, WIDTH))))


@on_devices
def test_close_to_attention_in_high_precision(device: str) -> None:
    module, inputs = DotProductAttention(HEADS, WIDTH), values(device, s=128)
    y = module(*inputs[:3])
    plain = [y.detach(), *torch.autograd.grad(y, inputs[:3], inputs[3])]
    for _ in range(2):
        low = step(module, delayed(), inputs)
    close(low, plain)


@on_devices
def test_state_from_step_to_step(device: str) -> None:
    """Maxima enter the histories, and scales follow from the largest of those that are left."""
    module = DotProductAttention(HEADS, WIDTH)
    seen = {"fwd": [], "bwd": []}
    for seed, size in enumerate((1.0, 4.0, 0.5, 0.25, 0.25)):
        inputs = [(t.detach() * size).requires_grad_() for t in values(device, seed)]
        step(module, delayed(), inputs)
        seen["fwd"].append(max(t.detach().abs().max().float().item() for t in inputs[:3]))
        seen["bwd"].append(inputs[3].detach().abs().max().float().item())
        for way, slot, limit in (("fwd", 2, LIMITS[0]), ("bwd", 3, LIMITS[1])):
            state: Any = module.fp8_state
            # A history of three rows: the one being written, and what two updates left.
            largest = max(seen[way][-3:])
            scale = getattr(state, f"scale_{way}")[slot].item()
            assert scale == pytest.approx(limit / largest, rel=1e-6)
            assert getattr(state, f"amax_history_{way}")[-1, slot].item() == seen[way][-1]
    assert state.scale_fwd.shape == (9,) and state.scale_bwd.shape == (6,)
    changed = [i for i in range(9) if state.scale_fwd[i] != 1], [i for i in range(6) if state.scale_bwd[i] != 1]
    assert changed == ([2, 3, 8], [0, 3, 5])


@on_devices
def test_inference_updates_nothing(device: str) -> None:
    module, inputs = DotProductAttention(HEADS, WIDTH), values(device)
    step(module, delayed(), inputs)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with torch.no_grad(), te.autocast(recipe=delayed()):
        module(*inputs[:3])
    for name, t in module.state_dict().items():
        if "scale" in name:
            assert torch.equal(t, before[name])


@on_devices
def test_checkpoints_carry_the_state(device: str) -> None:
    """Also into a module that has not run; the next step of both is the same, bit for bit."""
    module, inputs = DotProductAttention(HEADS, WIDTH), values(device)
    for _ in range(2):
        step(module, delayed(), inputs)
    saved = {n: t.clone() for n, t in module.state_dict().items()}
    assert {n.removeprefix("fp8_state.") for n in saved} == {
        "scale_fwd",
        "scale_bwd",
        "amax_history_fwd",
        "amax_history_bwd",
    }
    other = DotProductAttention(HEADS, WIDTH)
    other.load_state_dict(saved)
    alike(step(module, delayed(), inputs), step(other, delayed(), inputs))
    alike(module.state_dict().values(), other.state_dict().values())


def test_entries_made_ahead_are_those_of_training() -> None:
    """Of attention only where the recipe has it in FP8; its history is its own rule's."""
    for recipe, rows in (
        (DelayedScaling(amax_history_len=5), None),
        (delayed(), 3),
        (Float8CurrentScaling(fp8_dpa=True), 1),
    ):
        module = DotProductAttention(HEADS, WIDTH)
        assert te.prepare_state(module, recipe) == ([] if rows is None else [""])
        assert module.fp8_state is None if rows is None else module.fp8_state.amax_history_fwd.shape == (rows, 9)


@on_devices
@pytest.mark.parametrize("how", ["around", "core"])
def test_recomputation_is_the_forward_again(device: str, how: str) -> None:
    """Under a checkpoint, and with attention's own: same gradients, same state."""
    modules, inputs = [DotProductAttention(HEADS, WIDTH) for _ in range(2)], values(device)
    results = []
    for again, module in enumerate(modules):
        for _ in range(2):
            q, k, v, dy = inputs
            with te.autocast(recipe=delayed()):
                if again and how == "around":
                    y = checkpoint(module, q, k, v, use_reentrant=False)
                else:
                    y = module(q, k, v, checkpoint_core_attention=bool(again))
            found = [y.detach(), *torch.autograd.grad(y, (q, k, v), dy)]
        results.append(found)
    alike(*results)
    alike(*(module.state_dict().values() for module in modules))


# ------------------------------------------------------------------------------------------ between projections


class Counter:
    """How often each format was quantized to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        one, many = ops.quantize, ops.quantize_many

        def quantize(rt: Any, x: Any, *args: Any, **options: Any) -> Any:
            self.shapes.append(tuple(x.shape))
            return one(rt, x, *args, **options)

        def quantize_many(rt: Any, tensors: Any, casts: Any) -> Any:
            self.shapes.append(("many", *[tuple(t.shape) for t in tensors]))
            return many(rt, tensors, casts)

        monkeypatch.setattr(ops, "quantize", quantize)
        monkeypatch.setattr(ops, "quantize_many", quantize_many)


@pytest.mark.usefixtures("interpreted")
@on_devices
def test_one_launch_for_queries_keys_and_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = DotProductAttention(HEADS, WIDTH), values(device)
    counter = Counter(monkeypatch)
    step(module, delayed(), inputs)
    tokens = (64, HEADS * WIDTH)
    assert counter.shapes == [("many", tokens, tokens, tokens), tokens]  # and dy


@pytest.mark.usefixtures("interpreted")
@on_devices
def test_a_quantized_output_is_read_by_the_projection(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection quantizes its weight alone; what it computes is what the plain output would have given."""
    torch.manual_seed(0)
    module = DotProductAttention(HEADS, WIDTH)
    project = te.Linear(HEADS * WIDTH, 48, params_dtype=torch.bfloat16, device=device)
    q, k, v, _ = values(device)
    counter = Counter(monkeypatch)
    for _ in range(2):
        del counter.shapes[:]
        with te.autocast(recipe=delayed()):
            context = module(q, k, v, fp8_output=True)
            before = len(counter.shapes)
            y = project(context)
        assert isinstance(context, Float8Tensor) and context.shape == (32, 2, HEADS * WIDTH)
        assert counter.shapes[before:] == [(48, HEADS * WIDTH)]
        assert y.shape == (32, 2, 48)
        grads = torch.autograd.grad(y.float().square().sum(), (q, k, v, project.weight))
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    reference = context.dequantize().float() @ project.weight.float().t() + project.bias.float()
    assert snr_db(y, reference) > DB["fp8 gemm"]


@pytest.mark.usefixtures("interpreted")
@on_devices
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("mha", [False, True], ids=["dpa", "mha"])
def test_a_block_hands_over_what_is_quantized(
    device: str, mha: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8_mha: q, k, v leave their projection quantized, and their gradient enters it so."""
    torch.manual_seed(0)
    width = HEADS * WIDTH
    block = MultiheadAttention(
        width,
        HEADS,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        attn_mask_type="causal",
        fuse_qkv_params=True,
        layer_number=1,
        params_dtype=torch.bfloat16,
        device=device,
    )
    x = torch.randn(64, 2, width, device=device).bfloat16().requires_grad_()
    dy = torch.randn(64, 2, width, device=device).bfloat16()
    inputs = [x, *block.parameters()]
    y = block(x)
    plain = [y.detach(), *torch.autograd.grad(y, inputs, dy)]
    counter = Counter(monkeypatch)
    for _ in range(3):
        del counter.shapes[:]
        with te.autocast(recipe=delayed(fp8_mha=mha)):
            y = block(x)
        forward = list(counter.shapes)
        low = [y.detach(), *torch.autograd.grad(y, inputs, dy)]
    row = width + 2 * groups * WIDTH
    joint = (128, row)
    # x, qkv's weight, q, k and v, proj's weight; then dy, the gradient of proj's input, that of qkv's output
    assert forward == [(128, width), (row, width), joint, (width, width)]
    assert counter.shapes[len(forward) :] == [(128, width), (128, width)] + ([] if mha else [joint])
    for got, want in zip(low, plain, strict=True):
        if want.ndim > 1:
            assert snr_db(got, want) > DB["fp8 attention block"]


# ------------------------------------------------------------------------------------------------- the recipe


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def rule(recipe: Any) -> Any:
    found = precision_of(fp8.attention_number(number_of(recipe)))
    return found and found.attention


def test_what_attention_runs_in(variables: Any) -> None:
    assert rule(DelayedScaling()) is None and rule(MXFP8BlockScaling()) is None
    found = rule(delayed(fp8_format=Format.E4M3, margin=1))
    assert found.qkv.scaling == "delayed" and (found.history.length, found.history.margin) == (3, 1)
    assert not found.handed and rule(delayed(fp8_mha=True)).handed
    current = rule(Float8CurrentScaling(fp8_dpa=True))
    assert (current.qkv.scaling, current.history.length, current.history.amax_algo) == ("current", 1, "most_recent")
    assert current.high_output and fp8.scaling_of(number_of(MXFP8BlockScaling(fp8_dpa=True))) == "mxfp8"


@pytest.mark.parametrize(
    ("name", "region"),
    [
        ("NVTE_DPA_FP8_RECIPE", DelayedScaling(fp8_dpa=True)),
        ("NVTE_DPA_FP8DS_AMAX_ALGO", Float8CurrentScaling(fp8_dpa=True)),
        ("NVTE_DPA_FP8_FORMAT", DelayedScaling(fp8_dpa=True)),
    ],
)
def test_a_word_that_says_how_is_refused_if_it_is_none(variables: Any, name: str, region: Any) -> None:
    variables("NVTE_DPA_FP8_RECIPE", "DelayedScaling" if name.endswith("FORMAT") else "")
    variables(name, "anything")
    with pytest.raises(ArgumentError, match=f"^{name}: got 'anything'. Allowed: "):
        rule(region)


def test_variables_change_the_recipe(variables: Any) -> None:
    variables("NVTE_DPA_FP8_RECIPE", "F16")
    assert rule(delayed()) is None
    variables("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    variables("NVTE_DPA_FP8DS_AMAX_HISTLEN", "5")
    variables("NVTE_DPA_FP8DS_AMAX_ALGO", "max")
    variables("NVTE_DPA_FP8DS_REDUCE_AMAX", "0")
    found = rule(Float8CurrentScaling(fp8_dpa=True))
    history = found.history
    assert (found.qkv.scaling, history.length, history.amax_algo, history.reduce_amax) == ("delayed", 5, "max", False)
    assert rule(delayed()).history.length == 3  # a history of the region's own stays
    assert rule(Float8CurrentScaling()) is None  # its flags stay, too
    variables("NVTE_DPA_FP8_RECIPE_DPA", "1")
    variables("NVTE_DPA_FP8_FORMAT", "E4M3")
    found = rule(Float8CurrentScaling())
    assert found.grad.dtype.name == "float8_e4m3" and not found.handed
    variables("NVTE_DPA_FP8_RECIPE_MHA", "1")
    assert rule(Float8CurrentScaling()).handed
    variables("NVTE_DPA_FP8_RECIPE", "Float8CurrentScaling")
    variables("NVTE_DPA_FP8CS_O_in_F16", "0")
    found = rule(delayed())
    assert found.qkv.scaling == "current" and not found.high_output and found.history.length == 5
    variables("NVTE_FP8_DPA_BWD", "0")
    assert not rule(delayed()).backward
    variables("NVTE_DPA_FP8_RECIPE", "FP4")
    with pytest.raises(ArgumentError, match="NVTE_DPA_FP8_RECIPE"):
        rule(delayed())


def test_recipes_that_differ_in_attention_alone_are_two() -> None:
    assert resolve(DelayedScaling()) is not resolve(DelayedScaling(fp8_dpa=True))
    assert resolve(DelayedScaling(fp8_dpa=True)) is not resolve(DelayedScaling(fp8_dpa=True, fp8_mha=True))


@on_devices
@pytest.mark.parametrize("by", ["variable", "argument"])
def test_backward_in_high_precision(device: str, by: str, variables: Any) -> None:
    module, inputs = DotProductAttention(HEADS, WIDTH), values(device)
    if by == "variable":
        variables("NVTE_FP8_DPA_BWD", "0")
    step(module, delayed(), inputs, bf16_backward=by == "argument")
    state: Any = module.fp8_state
    assert (state.scale_bwd == 1).all() and state.scale_fwd[8] != 1


def test_current_scaling_has_a_history_for_scores_only(variables: Any) -> None:
    module, inputs = DotProductAttention(HEADS, WIDTH), values("cpu")
    y = module(*inputs[:3])
    for _ in range(2):
        low = step(module, Float8CurrentScaling(fp8_dpa=True), inputs)
    state: Any = module.fp8_state
    assert state.amax_history_fwd.shape == (1, 9) and snr_db(low[0], y) > DB["fp8 attention"]
    changed = [i for i in range(9) if state.scale_fwd[i] != 1], [i for i in range(6) if state.scale_bwd[i] != 1]
    assert changed == ([8], [5])


@on_devices
def test_the_unfused_backend_emulates_if_asked(device: str, variables: Any) -> None:
    """Its casts are those of FP8 attention, in the same slots."""
    fused, unfused, inputs = DotProductAttention(HEADS, WIDTH), DotProductAttention(HEADS, WIDTH), values(device)
    for _ in range(2):
        wanted = step(fused, delayed(), inputs)
    variables("NVTE_FUSED_ATTN", "0")
    with pytest.raises(NoBackendError, match="Emulate_FP8"):
        step(unfused, delayed(), inputs)
    variables("NVTE_UnfusedDPA_Emulate_FP8", "1")
    for _ in range(2):
        found = step(unfused, delayed(), inputs)
    close(found, wanted)
    for slots, way in (((2, 3, 8), "fwd"), ((0, 3, 5), "bwd")):
        a, b = (getattr(m.fp8_state, f"scale_{way}") for m in (fused, unfused))
        assert [i for i in range(len(b)) if b[i] != 1] == list(slots)
        torch.testing.assert_close(a, b, rtol=0.15, atol=0)


def test_no_fp8_without_being_asked() -> None:
    module, inputs = DotProductAttention(HEADS, WIDTH), values("cpu")
    y = module(*inputs[:3])
    with te.autocast(recipe=DelayedScaling()):
        assert torch.equal(module(*inputs[:3]), y)
    with te.autocast(enabled=False, recipe=delayed()):
        assert torch.equal(module(*inputs[:3]), y)
    with te.autocast(enabled=False, calibrating=True, recipe=delayed()):
        assert torch.equal(module(*inputs[:3]), y)
    assert module.fp8_state is None


def test_packed_queries_with_a_cache_in_rows() -> None:
    """Queries in thd read a cache of rows, and give the same numbers as queries in bshd."""
    found = []
    for form in ("bshd", "thd"):
        torch.manual_seed(0)
        module = MultiheadAttention(
            64,
            4,
            num_gqa_groups=2,
            attention_dropout=0.0,
            attn_mask_type="padding_causal",
            qkv_format=form,
            layer_number=1,
            device="cpu",
        ).eval()
        cache = te.InferenceParams(
            2, 16, num_heads_kv=2, head_dim_k=16, dtype=torch.float32, qkv_format=form, max_ctx_len=5, device="cpu"
        )
        steps = []
        for tokens in (5, 1):
            cache.pre_step(OrderedDict({7: tokens, 9: tokens}))
            x = torch.randn(2, tokens, 64)
            with torch.no_grad(), te.autocast(recipe=delayed()):
                y = module(x if form == "bshd" else x.flatten(0, 1), inference_params=cache)
            steps.append(y.reshape(x.shape))
        assert {plan.key.fp8 for plan in module.core_attention._choices.values()} == {"delayed"}
        found.append(steps)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
