"""Padding masks of any layout: a row's tokens are attended to as a sequence of their own, wherever padding lies."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo

import te_torch as te
from te_core.attention import alibi_slopes
from te_core.recipe import DelayedScaling
from te_torch.attention import compact, utils
from te_torch.attention.choose import FUSED, UNFUSED
from tests.attention_steps import BATCH, GROUPS, HEADS, SEQ, WIDTH, inputs, make, near, padding, same, step, sums
from tests.backends import devices, on_devices, requires_cuda
from tests.covering import covering
from tests.null_device import null_device
from tests.reference import attention as reference
from tests.tolerances import snr_db
from tests.world import differences, randomise, values
from tests.world import step as layer_step

#: Rows of six places, "x" for a token, "." for padding.
LAYOUTS = {
    "left": ("..xxxx", "xxxxxx", ".....x"),
    "holes": ("x.xx.x", "xxxxxx", ".x.x.x"),
    "both sides": (".xxxx.", "..xx..", "x....."),
    "nothing in a row": ("..xxxx", "......", "x.x.x."),
    "right": ("xxxx..", "xxxxxx", "x....."),
}


def mask_of(layout: str, device: str = "cpu") -> torch.Tensor:
    rows = [[c == "." for c in row] for row in LAYOUTS[layout]]
    return torch.tensor(rows, device=device).view(BATCH, 1, 1, SEQ)


# ------------------------------------------------------------------------------------------------ against float64


def wanted_step(
    tensors: list[torch.Tensor], weights: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], **problem: Any
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v (and of a bias), each row's tokens taken out of it and put back."""
    q, k, v = (t.detach().double().cpu().numpy().swapaxes(1, 2) for t in tensors[:3])
    bias = problem.pop("bias", None)
    dy = weights.double().cpu().numpy().reshape(BATCH, -1, HEADS, WIDTH).swapaxes(1, 2)
    found = [np.zeros_like(dy), *(np.zeros_like(t) for t in (q, k, v))]
    full = None if bias is None else np.broadcast_to(bias, (BATCH, HEADS, q.shape[2], k.shape[2]))
    dfull = None if full is None else np.zeros(full.shape)
    for b in range(BATCH):
        rows, keys = (np.flatnonzero(~m[b].flatten().cpu().numpy()) for m in pair)
        one = slice(b, b + 1)
        if not len(rows) or not len(keys):
            continue
        p = reference.Problem(bias=None if full is None else full[one][:, :, rows][..., keys], **problem)
        mine = (q[one][:, :, rows], k[one][:, :, keys], v[one][:, :, keys])
        found[0][one][:, :, rows] = reference.forward(*mine, p).out
        grads = reference.backward(dy[one][:, :, rows], *mine, p)
        for whole, at, part in zip(found[1:], (rows, keys, keys), (grads.dq, grads.dk, grads.dv), strict=True):
            whole[one][:, :, at] = part
        if dfull is not None:
            dfull[one] += _spread(grads.dbias, rows, keys, full.shape)
    made = [torch.from_numpy(t.swapaxes(1, 2).copy()) for t in found]
    made[0] = made[0].flatten(2)
    if dfull is not None:
        axes = tuple(i for i in range(4) if bias.shape[i] < full.shape[i])
        made.append(torch.from_numpy(dfull.sum(axis=axes, keepdims=True)))
    return made


def _spread(part: Any, rows: Any, keys: Any, shape: tuple[int, ...]) -> Any:
    whole = np.zeros((1, *shape[1:]))
    whole[:, :, rows[:, None], keys[None]] = part
    return whole


TYPES = ("padding", "padding_causal", "padding_causal_bottom_right")


@on_devices
@covering(turns=2, layout=LAYOUTS, mask_type=TYPES, kind=["self", "cross"], form=["sbhd", "bshd"])
def test_any_layout(layout: str, mask_type: str, kind: str, form: str, backend: str, device: str) -> None:
    tensors = inputs(device)
    mask = mask_of(layout, device)
    pair = (mask, mask if kind == "self" else mask_of("holes", device).flip(0))
    weights = torch.linspace(-1, 1, BATCH * SEQ * HEADS * WIDTH, device=device).view(BATCH, SEQ, -1)
    given = [t.detach() if form == "bshd" else t.detach().transpose(0, 1).contiguous() for t in tensors]
    given = [t.requires_grad_() for t in given]
    out = make(attn_mask_type=mask_type, qkv_format=form)(*given, mask if kind == "self" else pair)
    if form == "sbhd":
        out = out.transpose(0, 1)
    grads = torch.autograd.grad((out.float() * weights).sum(), given)
    got = [out, *(g if form == "bshd" else g.transpose(0, 1) for g in grads)]
    right = 0 if "causal" in mask_type else -1
    want = wanted_step(
        tensors, weights, pair, scale=WIDTH**-0.5, right=right, bottom_right=mask_type.endswith("bottom_right")
    )
    assert near(got, [t.to(device) for t in want])
    hidden = pair[0].view(BATCH, SEQ)
    assert not out[hidden].any() and not got[1][hidden].any(), "padding gives nothing, and gets nothing"


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # of the module, of the call, of the reference
    "window": ({"window_size": (2, 0)}, {}, {"left": 2}),
    "learnable": ({"softmax_type": "learnable"}, {}, {"softmax": "learnable", "sink": np.zeros(HEADS)}),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}, {"slopes": np.array(alibi_slopes(HEADS))}),
    "checkpoint": ({}, {"checkpoint_core_attention": True}, {}),
    "bias 1hss": ({}, {"core_attention_bias": (1, HEADS, SEQ, SEQ)}, {}),
    "bias b1ss": ({}, {"core_attention_bias": (BATCH, 1, SEQ, SEQ)}, {}),
    "bias 111s": ({}, {"core_attention_bias": (1, 1, 1, SEQ)}, {}),
}


@on_devices
@pytest.mark.parametrize("layout", ["left", "holes"])
@pytest.mark.parametrize("option", OPTIONS)
def test_with_what_else_there_is(option: str, layout: str, device: str) -> None:
    """Distances count tokens; a bias goes by places in the row, and its gradient comes back there."""
    of_module, of_call, problem = OPTIONS[option]
    module = make(attn_mask_type="padding_causal", **of_module).to(device)
    tensors, mask, call = inputs(device), mask_of(layout, device), dict(of_call)
    problem = {"scale": WIDTH**-0.5, "right": 0, **problem}
    if isinstance(call.get("core_attention_bias"), tuple):
        bias = values(*call["core_attention_bias"], device=device, dtype=tensors[0].dtype, seed=3).requires_grad_()
        call |= {"core_attention_bias": bias, "core_attention_bias_type": "post_scale_bias"}
        problem["bias"] = bias.detach().double().cpu().numpy()
        tensors.append(bias)
    weights = torch.linspace(-1, 1, BATCH * SEQ * HEADS * WIDTH, device=device).view(BATCH, SEQ, -1)
    out = module(*tensors[:3], mask, **call)
    got = [out, *torch.autograd.grad((out.float() * weights).sum(), tensors)]
    want = wanted_step(tensors, weights, (mask, mask), **problem)
    assert near(got, [t.to(device) for t in want])


@on_devices
def test_the_largest_logit_is_that_of_the_tokens(backend: str, device: str) -> None:
    tensors, mask = [t.detach() for t in inputs(device)], mask_of("left", device)
    with torch.no_grad():
        tensors[1][mask.view(BATCH, SEQ)] *= 1e3  # keys of padding
    module = make(attn_mask_type="padding", return_max_logit=True).eval()  # cuDNN trains no single pair
    out, largest = module(*tensors, mask)
    rows = [module(*(t[b : b + 1, ~mask[b].flatten()] for t in tensors), attn_mask_type="no_mask") for b in range(3)]
    assert near([largest], [torch.stack([most for _, most in rows]).amax(0)])
    assert near([out[0, 2:]], [rows[0][0][0]])


def test_dropout_drops_what_it_would_of_tokens_in_front(backend: str) -> None:
    module, tensors = make(attn_mask_type="padding_causal", attention_dropout=0.4), [t.detach() for t in inputs()]
    torch.manual_seed(3)
    moved = module(*tensors, mask_of("left"))
    front = [torch.stack([t[0].roll(-2, 0), t[1], t[2].roll(-5, 0)]) for t in tensors]
    torch.manual_seed(3)
    wanted = module(*front, padding([4, 6, 1]))
    assert torch.equal(moved[0, 2:], wanted[0, :4]) and torch.equal(moved[2, 5:], wanted[2, :1])


# ------------------------------------------------------------------------------------------ a look, or none at all


def of_numpy(t: torch.Tensor, new: torch.Tensor) -> None:
    t.numpy()[...] = new.numpy()


def of_data(t: torch.Tensor, new: torch.Tensor) -> None:
    t.data.copy_(new)


WRITERS = [("cpu", of_numpy), *((device, of_data) for device in devices())]  # that torch's counter does not see


@pytest.mark.parametrize(("device", "write"), WRITERS)
def test_a_mask_is_read_in_every_call(device: str, write: Any) -> None:
    """Collectives and other libraries write as these do. What a mask said before, to this layer or another, is over."""
    mask, tensors = mask_of("right", device), inputs(device)
    view = mask.view(BATCH, SEQ)[:, None, None, :]
    first, second = make(attn_mask_type="padding"), make(attn_mask_type="padding_causal")
    layouts = ("right", "left", "holes", "right", "both sides")
    for now in (*(mask_of(layout, device) for layout in layouts), padding([2, 5, 3], device=device)):
        before = mask._version
        write(mask, now)
        assert mask._version == before
        for module, given in ((first, mask), (second, view)):
            other = make(attn_mask_type=module.attn_mask_type)
            assert same(step(module, tensors, given), step(other, tensors, now.clone()))


@pytest.mark.parametrize(("device", "write"), WRITERS)
def test_packed_lengths_are_read_in_every_call(device: str, write: Any) -> None:
    """The longest of them, too, where nobody says it."""
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    module, other = make(**options), make(**options)
    tensors = [t.detach().repeat(8, 1, 1, 1).flatten(0, 1).requires_grad_() for t in inputs(device)]  # 144 tokens
    cu = torch.tensor([0, 40, 60, 144], dtype=torch.int32, device=device)
    for lengths in ([0, 40, 60, 144], [0, 140, 144, 144], [0, 1, 20, 80]):
        write(cu, torch.tensor(lengths, dtype=torch.int32, device=device))
        own = torch.tensor(lengths, dtype=torch.int32, device=device)
        got = step(module, tensors, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert same(got, step(other, tensors, cu_seqlens_q=own, cu_seqlens_kv=own))


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_a_gpu_reads_a_mask_in_one_launch(form: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens go and their lengths, and no operator of torch's beside the moves, be the mask dense or not."""
    monkeypatch.setattr(compact, "_may_look", lambda mask: False)
    monkeypatch.setattr(compact, "_select", lambda t, index: t.clone())  # nothing computes an index here
    with null_device(tmp_path) as null:
        module, tensors = make(attn_mask_type="padding", qkv_format=form), inputs(form=form, dtype=torch.bfloat16)
        mask, cu = mask_of("left"), sums([4, 6, 1])
        every_second = mask.repeat_interleave(2, -1)[..., ::2]
        by_lengths: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        launches = {}
        for name, options in {
            "lengths": by_lengths,
            "mask": {"attention_mask": mask},
            "pair": {"attention_mask": (mask, mask)},
            "strided": {"attention_mask": every_second},
        }.items():
            step(module, tensors, **options)
            launches[name] = null.counted(partial(module, *tensors, **options), times=3).launches
        assert [launches[name] - launches["lengths"] for name in ("mask", "pair", "strided")] == [1, 2, 1]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            module(*tensors, mask)
    called = {event.name for event in profile.events()}
    assert "aten::clone" in called
    assert not called & {"aten::cumsum", "aten::sum", "aten::arange", "aten::where", "aten::scatter_", "aten::zeros"}


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_code_has_the_same_order(layout: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operators, in which a compiler sees what it does."""
    monkeypatch.setattr(compact, "_may_look", lambda mask: False)
    mask = mask_of(layout)
    found = []
    for in_memory in (True, False):
        monkeypatch.setattr(compact, "_is_in_memory", lambda mask, now=in_memory: now)
        orders = compact.orders_of(mask, form, mask)
        assert orders is not None and orders.q is not None
        fronts = [t for t in compact.fronts(orders) if t is not None]
        found.append([*orders.q[:3], *fronts])
        assert [t.dtype for t in found[-1]] == [torch.int64, torch.int64, torch.int32, torch.int64, torch.int64]
    assert same(*found)
    tokens = (~mask).view(BATCH, SEQ)
    assert torch.equal(found[0][3], torch.argsort(~tokens, dim=1, stable=True))


@requires_cuda
def test_nothing_waits_for_a_mask() -> None:
    module, tensors, mask = make(attn_mask_type="padding"), inputs("cuda"), mask_of("left", "cuda")
    step(module, tensors, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, tensors, mask.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_devices
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_where_nobody_looks_nothing_is_lost(
    form: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that lie in front are moved to where they are: the same bits."""
    module = make(attn_mask_type="padding_causal", qkv_format=form, return_max_logit=True)
    tensors, mask = [t.detach() for t in inputs(device, form)], padding([6, 2, 4], device=device)
    known = module(*tensors, mask)
    monkeypatch.setattr(compact, "_may_look", lambda mask: False)
    assert same(list(module(*tensors, mask)), list(known))
    assert same(list(module(*tensors, (mask, mask))), list(known))


@pytest.mark.parametrize(
    ("layout", "backend"),
    [("left", FUSED), *(pytest.param(layout, UNFUSED, marks=pytest.mark.full) for layout in LAYOUTS)],
    indirect=["backend"],
)
def test_compiled(layout: str, backend: str) -> None:
    torch._dynamo.reset()
    module = make(attn_mask_type="padding_causal", attention_dropout=0.2, softmax_type="learnable")
    compiled, found = torch.compile(module, backend="aot_eager", fullgraph=backend == FUSED), []
    options: dict[str, Any] = {"core_attention_bias_type": "post_scale_bias"}
    options["core_attention_bias"] = values(1, HEADS, SEQ, SEQ, seed=5)
    for run in (module, compiled):
        torch.manual_seed(1)
        found.append(step(run, inputs(), mask_of(layout), **options))
    assert same(*found)
    torch._dynamo.reset()


@requires_cuda
def test_captured(backend: str) -> None:
    """A replay moves tokens by what the mask then says, and nobody waits."""
    module, mask = make(attn_mask_type="padding_causal"), padding([6, 2, 4], device="cuda")
    tensors = [t.detach() for t in inputs("cuda")]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            module(*tensors, mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*tensors, mask)
    for layout in ("left", "holes", "right"):
        mask.copy_(mask_of(layout, "cuda"))
        graph.replay()
        assert near([out], [module(*tensors, mask_of(layout, "cuda"))])


# ------------------------------------------------------------------------------------------- layers, FP8, helpers


def moved(x: torch.Tensor) -> torch.Tensor:
    """The rows of "left" with their tokens in front: [b, s, ..]."""
    return torch.stack([x[0].roll(-2, 0), x[1], x[2].roll(-5, 0)])


def test_what_the_fp8_state_sees_is_the_same() -> None:
    """Bit for bit: the tokens are those of a call with padding behind them, whatever lies in padding."""
    found = []
    q, k, v = (t.detach() for t in inputs())
    for where, tensors in ((mask_of("left"), (q, k, v)), (padding([4, 6, 1]), tuple(map(moved, (q, k, v))))):
        module = make(attn_mask_type="padding_causal", num_gqa_groups=GROUPS)
        given = [t.clone().requires_grad_() for t in tensors]
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
                y = module(*given, where)
            grads = torch.autograd.grad(y, given, torch.ones_like(y))
        got = [y, *grads] if where.shape == () else [y.detach(), *grads]
        got = [moved(t) for t in got] if tensors[0] is q else got
        found.append((got, {n: t.clone() for n, t in module.state_dict().items()}))
    assert same(found[0][0], found[1][0]) and not differences(found[0][1], found[1][1])


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
def test_a_projection_that_comes_quantized(groups: int) -> None:
    """It is taken out of its format to be moved: as good as that of tokens in front."""
    layer = te.MultiheadAttention(
        64, HEADS, num_gqa_groups=groups, attention_dropout=0.0, fuse_qkv_params=True, qkv_format="bshd", device="cpu"
    )
    randomise(layer)
    x, dy, front = values(BATCH, SEQ, 64, seed=1), values(BATCH, SEQ, 64, seed=2), padding([4, 6, 1])
    dy = dy * ~mask_of("left").view(BATCH, SEQ, 1)
    found: list[list[torch.Tensor]] = []
    for rule in (None, DelayedScaling(fp8_dpa=True, fp8_mha=True)):
        for left in (True, False):
            mask, given, grad = (mask_of("left"), x, dy) if left else (front, moved(x), moved(dy))
            options = {"attn_mask_type": "padding_causal", "attention_mask": mask}
            for _ in range(2):
                got = layer_step(lambda t, o=options: layer(t, **o), given, rule, dy=grad, owner=layer)
            both = (got["y"], got["dx"])
            found.append([(moved(t) if left else t)[~front.view(BATCH, SEQ)] for t in both])
    assert near(found[0], found[1])
    for plain, first, second in zip(*found[1:], strict=True):
        assert snr_db(second, plain) < 60 and snr_db(first, plain) >= snr_db(second, plain) - 4


@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_a_packed_projection_with_two_masks(packing: str, backend: str) -> None:
    q, k, v = (t.detach() for t in inputs())
    k, v = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (k, v))
    pair = (mask_of("left"), mask_of("holes"))
    module = make(num_gqa_groups=HEADS, attn_mask_type="padding")
    wanted = module(q, k, v, pair)
    if packing == "qkv":
        got = module(qkv_layer=torch.stack((q, k, v), -3), attention_mask=pair)
    else:
        got = module(query_layer=q, kv_layer=torch.stack((k, v), -3), attention_mask=pair)
    assert near([got], [wanted])
    both = (padding([6, 2, 4]), padding([3, 6, 6]))
    plain = module(q, k, v, both)
    assert near([module(qkv_layer=torch.stack((q, k, v), -3), attention_mask=both)], [plain])


@pytest.mark.parametrize("mask_type", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_full_mask(layout: str, mask_type: str) -> None:
    """As a mask of all pairs it is the same attention."""
    mask = mask_of(layout)
    _, hidden, q, kv = utils.get_full_mask(SEQ, SEQ, mask_type, mask)
    assert q.tolist() == kv.tolist() == (~mask).sum((1, 2, 3)).tolist()
    tensors = [t.detach() for t in inputs()]
    a = make(attn_mask_type=mask_type)(*tensors, mask)
    assert near([a], [make(attn_mask_type="arbitrary")(*tensors, hidden)])
