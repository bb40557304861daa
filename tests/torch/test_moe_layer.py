"""`MoELayer`: plain torch in float64 with its gradients, the auxiliary loss, loads, recipes, checkpoints, routings."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.errors import ArgumentError
from te_core.tape import taped
from tests import recipes
from tests.backends import capability, on_devices, requires_cuda
from tests.covering import covering
from tests.recordings import tapes
from tests.tolerances import DB, snr_db
from tests.torch.test_router import plain, plain_scores
from tests.world import values

HIDDEN, FFN, EXPERTS, TOP = 48, 32, 8, 2
_OWN = {"activation": "gelu", "bias": True}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax over all": {"use_pre_softmax": True, "topk": 3, "scaling_factor": 2.5},
    "one expert": {"topk": 1, "use_pre_softmax": True, "aux_loss_coeff": 0.5},
    "sigmoid": {"score_function": "sigmoid", "expert_bias": True, "aux_loss_coeff": 0.7},
    "groups": {"score_function": "sigmoid", "topk": 4, "num_groups": 4, "group_topk": 2, "scaling_factor": 0.5},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus", "expert_bias": True, "shared_ffn_hidden_size": 24, **_OWN},
    "shared": {"shared_ffn_hidden_size": 40, "aux_loss_coeff": 0.3},
    "shared and gated": {"shared_ffn_hidden_size": 40, "shared_gate": True, **_OWN},
}


def layer(device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> te.MoELayer:
    """A layer whose parameters and bias are far from their beginnings."""
    made = te.MoELayer(HIDDEN, FFN, EXPERTS, **{"topk": TOP} | options, params_dtype=dtype, device=device)
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(0.25 * values(*p.shape, seed=i))
        if made.router.expert_bias is not None:
            made.router.expert_bias.copy_(0.3 * values(EXPERTS, seed=99))
    return made


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "gelu":
        return F.gelu(x, approximate="tanh")
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def reference(of: te.MoELayer, x: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, Any, Any]:
    """(output, auxiliary loss, parameters by name) in float64, an expert after the other."""
    p = {name: t.detach().double().requires_grad_() for name, t in of.named_parameters()}
    parts = {f"{name}{e}": w for name in ("fc1.weight", "fc2.weight") for e, w in enumerate(p[name])}
    kind = options.get("activation", "swiglu")

    def linear(rows: torch.Tensor, name: str, number: Any = "") -> torch.Tensor:
        return F.linear(rows, (parts | p)[f"{name}.weight{number}"], p.get(f"{name}.bias{number}"))

    tokens = x.flatten(0, -2)
    logits = tokens @ p["router.weight"].T
    topk, score, coeff = options.get("topk", TOP), options.get("score_function", "softmax"), of.aux_loss_coeff
    how = [options.get(name) for name in ("use_pre_softmax", "num_groups", "group_topk", "scaling_factor")]
    gates, routing = plain_gates(logits, topk, how, score, of.router.expert_bias)
    y = torch.zeros_like(tokens)
    for e in range(EXPERTS):
        at = routing[:, e].nonzero().flatten()
        rows = linear(activated(linear(tokens[at], "fc1", e), kind), "fc2", e)
        y = y.index_add(0, at, gates[at, e, None] * rows)
    if of.shared_experts is not None:
        rows = linear(activated(linear(tokens, "shared_experts.fc1"), kind), "shared_experts.fc2")
        y = y + (rows if of.shared_gate is None else rows * torch.sigmoid(linear(tokens, "shared_gate")))
    scores = plain_scores(logits, score)
    scores = logits.softmax(-1) if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
    loss = coeff * EXPERTS / topk / len(tokens) ** 2 * (routing.sum(0) * scores.sum(0)).sum()
    return y.view_as(x), loss, p


def plain_gates(logits: torch.Tensor, topk: int, how: list[Any], score: str, bias: Any) -> Any:
    """As tests/torch/test_router.py has them, of logits that have gradients."""
    pre, groups, best, scale = how
    return plain(logits, topk, bool(pre), groups, best, scale, score, None if bias is None else bias.double())


def near(found: Any, wanted: Any, dtype: torch.dtype, name: str) -> None:
    """Of bf16 a gradient has been rounded behind each of three products."""
    least = DB["fp32"] - 10 if dtype == torch.float32 else DB["bf16 attention block"]
    assert snr_db(found, wanted) >= least, f"{name}: {snr_db(found, wanted):.1f} dB"


@on_devices
@covering(case=CASES, dtype=(torch.float32, torch.bfloat16), shape=((37,), (3, 13)), turns=2)
def test_computes_what_plain_torch_does(case: str, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    options = CASES[case]
    of = layer(device, dtype, **options)
    of.aux_loss_scale = 3.0
    x = values(*shape, HIDDEN, device=device, dtype=dtype, seed=5).requires_grad_()
    dy = values(*shape, HIDDEN, device=device, dtype=dtype, seed=6)
    of(x).backward(dy)
    y = of(x.detach())
    x64 = x.detach().double().requires_grad_()
    y64, loss, p64 = reference(of, x64, options)
    torch.autograd.backward([y64, loss], [dy.double(), torch.tensor(3.0, dtype=torch.float64, device=device)])
    near(y, y64, dtype, "y")
    near(x.grad, x64.grad, dtype, "x")
    for name, p in of.named_parameters():
        near(p.grad, p64[name].grad, dtype, name)


@on_devices
def test_the_loss_is_returned_or_attached(device: str) -> None:
    """The same gradients both ways; none in evaluation, where the output is the same."""
    attached, returned = layer(device, aux_loss_coeff=0.4), layer(device, aux_loss_coeff=0.4, return_aux_loss=True)
    x = values(29, HIDDEN, device=device)
    attached.aux_loss_scale = torch.tensor(5.0, device=device)
    y = attached(x)
    y.sum().backward()
    same, loss = returned(x)
    assert torch.equal(y, same) and loss.shape == () and 0.4 < loss.item() < 0.8
    (same.sum() + 5 * loss).backward()
    for (name, a), b in zip(attached.named_parameters(), returned.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    returned.eval()
    same, none = returned(x)
    assert torch.equal(y, same) and not none.requires_grad and none.item() == 0
    plainly = layer(device)
    plainly(x).sum().backward()
    attached.eval().zero_grad()
    attached(x).sum().backward()
    assert torch.equal(attached.router.weight.grad, plainly.router.weight.grad)


@on_devices
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, device: str) -> None:
    """None at all, and one, of which most experts get none: every parameter has a gradient, zero where nothing came."""
    of = layer(device, aux_loss_coeff=0.1, shared_ffn_hidden_size=16)
    x = values(tokens, 1, HIDDEN, device=device).requires_grad_()
    y = of(x)
    assert y.shape == x.shape and bool(y.isfinite().all())
    y.sum().backward()
    grads = {name: p.grad for name, p in of.named_parameters()}
    assert x.grad.shape == x.shape
    reached = [int(grads[f"{name}.weight"].flatten(1).any(1).sum()) for name in ("fc1", "fc2")]
    assert reached == [TOP * tokens] * 2
    assert all(g is None or bool(g.isfinite().all()) for g in grads.values())


@pytest.mark.parametrize("recipe, device", recipes.on_devices())
def test_recipes(recipe: str | None, device: str) -> None:
    """In every recipe the products of experts are those of GroupedLinear on the same rows, bit for bit."""
    of = layer(device, torch.bfloat16, expert_bias=True, score_function="sigmoid", shared_ffn_hidden_size=32)
    x = values(96, HIDDEN, device=device, dtype=torch.bfloat16).requires_grad_()
    parts = copy.deepcopy(of)
    torch.manual_seed(0)
    with recipes.region(recipe):
        y = of(x)
    torch.manual_seed(0)
    probs, routing = te.router.fused_topk_with_score_function(
        parts.router(x), TOP, False, None, None, None, "sigmoid", parts.router.expert_bias
    )
    with recipes.region(recipe):
        rows, row_map = te.moe_permute(x, routing, num_out_tokens=len(x) * TOP)
        sizes = routing.sum(0).tolist()
        a, b = parts.fc1(rows, sizes).float().chunk(2, -1)
        rows = parts.fc2((F.silu(a) * b).bfloat16(), sizes)
        merged = te.moe_unpermute(rows, row_map, merging_probs=probs)
        a, b = parts.shared_experts.fc1(x).float().chunk(2, -1)
        merged = merged + parts.shared_experts.fc2((F.silu(a) * b).bfloat16())
    assert snr_db(y, merged) > 30  # torch's silu is another one in its last bit
    y.sum().backward()
    assert x.grad.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in of.parameters())


@on_devices
def test_new_routings_are_replayed(device: str) -> None:
    """Steps after the first are replayed, whatever the router chooses, and the host asks for no size."""
    of, before = layer(device, torch.bfloat16, aux_loss_coeff=0.1), te.GroupedLinear.host_copies
    with tapes("first") as ran:
        for i in range(3):
            x = values(64, HIDDEN, device=device, dtype=torch.bfloat16, seed=i).requires_grad_()
            of(x).sum().backward()
            if i == 0:
                recorded = taped.COUNTS.recorded
        assert taped.COUNTS.recorded == recorded and not ran.interpreted
    assert te.GroupedLinear.host_copies == before


@requires_cuda
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_a_captured_layer_takes_new_routings(recipe: str | None) -> None:
    """As the eager layer, with tokens that go to other experts than those of the capture."""
    if capability() != (9, 0):
        pytest.skip("hardware: groups in one launch are Hopper's")
    of = layer("cuda", torch.bfloat16, aux_loss_coeff=0.1)
    other, rule = copy.deepcopy(of), recipes.rule(recipe)
    sample = values(64, HIDDEN, device="cuda", dtype=torch.bfloat16, seed=9).requires_grad_()
    with recipes.region(recipe):
        call = te.make_graphed_callables(other, (sample,), enabled=rule is not None, recipe=rule)
    for i in range(3):
        found = []
        for run, module in ((of, of), (call, other)):
            x = (4 * values(64, HIDDEN, device="cuda", dtype=torch.bfloat16, seed=i)).requires_grad_()
            with recipes.region(recipe):
                y = run(x)
            y.square().mean().backward()
            found.append([y.detach().clone(), x.grad, *[p.grad.clone() for p in module.parameters()]])
            module.zero_grad(set_to_none=False)
        for got, wanted in zip(*found, strict=True):
            assert torch.equal(got, wanted)


@on_devices
@pytest.mark.parametrize("case", ["sigmoid", "shared and gated"])
def test_compiled(case: str, device: str) -> None:
    """One program without graph breaks for all routings, with the values and gradients of eager code."""
    torch._dynamo.reset()
    of, counter = layer(device, **CASES[case]), CompileCounterWithBackend("aot_eager")
    other = copy.deepcopy(of)
    call = torch.compile(other, fullgraph=True, backend=counter)
    for i in range(2):
        x = values(4, 9, HIDDEN, device=device, seed=i)
        assert torch.equal(of(x), call(x))
    of(x).sum().backward()
    call(x).sum().backward()
    assert counter.frame_count == 1
    for a, b in zip(of.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@on_devices
def test_the_bias_follows_loads_of_checkpointed_calls(device: str) -> None:
    """Experts with fewer tokens than the mean get more, once for each call; a run again in backward counts nothing."""
    of = layer(device, score_function="sigmoid", expert_bias=True, expert_bias_rate=0.25)
    bias = of.router.expert_bias.clone()
    x = values(40, HIDDEN, device=device).requires_grad_()
    te.checkpoint(of, x).sum().backward()
    assert int(of._load.sum()) == 40 * TOP and of.router.weight.grad.any()
    more = of._load.double()
    of.eval()
    of(x)  # evaluation counts nothing
    assert torch.equal(of._load.double(), more)
    of.update_expert_bias()
    assert torch.equal(of.router.expert_bias, bias + 0.25 * (more.mean() - more).sign().float())
    assert not of._load.any()
    of.to(torch.bfloat16)
    assert of.router.expert_bias.dtype == torch.float32 and of.router.weight.dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match="without a bias"):
        layer(device).update_expert_bias()


@on_devices
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_a_checkpoint_goes_on(recipe: str | None, device: str) -> None:
    """A state dict through a file: the next step has the same bits."""
    options = {"score_function": "sigmoid", "expert_bias": True, "shared_ffn_hidden_size": 16, "shared_gate": True}
    of = layer(device, **options)
    x = values(64, HIDDEN, device=device)
    with recipes.region(recipe):
        of(x).sum().backward()
    file = io.BytesIO()
    torch.save(of.state_dict(), file)
    other = te.MoELayer(HIDDEN, FFN, EXPERTS, TOP, **options, device="meta")
    for part in other.modules():
        if part is not other and hasattr(part, "reset_parameters"):
            part.reset_parameters()
    other.to(device)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    with recipes.region(recipe):
        assert torch.equal(of(x), other(x))
    assert other._load.sum() == 64 * TOP


@on_devices
def test_weights_held_quantized(device: str) -> None:
    """The experts' weights are, and the router's is not."""
    with te.quantized_model_init(recipe=recipes.rule("current")):
        of = te.MoELayer(HIDDEN, FFN, EXPERTS, TOP, shared_ffn_hidden_size=32, device=device)
    assert of.fc1.primary_weights_in_fp8 and of.fc2.primary_weights_in_fp8
    assert type(of.router.weight) is torch.nn.Parameter
    x = values(64, HIDDEN, device=device).requires_grad_()
    with recipes.region("current"):
        of(x).sum().backward()
    assert x.grad.isfinite().all()


@on_devices
def test_under_torch_autocast(device: str) -> None:
    """The router stays in float32, the experts run in the autocast dtype."""
    of = layer(device)
    x = values(24, HIDDEN, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = of(x)
        logits = of.router(x.bfloat16())
    assert y.dtype == torch.bfloat16
    near(logits, x.bfloat16().double() @ of.router.weight.double().T, torch.float32, "logits")
    near(y, reference(of, x.bfloat16().double(), {})[0], torch.bfloat16, "y")


def test_reports_name_each_expert() -> None:
    """Also where the weights of all are one parameter."""
    reports = []
    for single in (True, False):
        of = te.MoELayer(HIDDEN, FFN, 3, TOP, single_grouped_weight=single, device="cpu", name="moe")
        with recipes.region("current"):
            of(values(16, HIDDEN))
        rows = te.precision_report(of).rows
        reports.append([(row.layer, row.facts) for row in rows])
    assert reports[0] == reports[1] and {name for name, _ in reports[0]} == {
        f"{part}.weight{i}" for part in ("fc1", "fc2") for i in range(3)
    }
