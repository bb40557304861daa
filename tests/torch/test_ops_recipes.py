"""Chains of `te.ops` in every recipe: the bits of the modules, states, checkpoints, quantized weights, modes."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from te_torch import ops
from tests import recipes
from tests.null_device import null_device
from tests.tolerances import DB, snr_db
from tests.world import differences, fp8_state, gradient_for, randomise, region, step, values

WIDTH, INNER = 48, 96


def like(module: torch.nn.Module, *chain: Any) -> tuple[Any, ops.Sequential]:
    """A module and a chain with the same numbers."""
    model = ops.Sequential(*chain)
    randomise(module), randomise(model)
    return module, model


#: Name: a module and the chain that is one.
CHAINS: dict[str, Callable[..., tuple[Any, ops.Sequential]]] = {
    "LayerNormMLP": lambda kw: like(
        te.LayerNormMLP(WIDTH, INNER, params_dtype=kw["dtype"], device=kw["device"]),
        ops.LayerNorm(WIDTH, **kw),
        ops.Linear(WIDTH, INNER, **kw),
        ops.GELU(),
        ops.Linear(INNER, WIDTH, **kw),
    ),
    "LayerNormMLP of a Llama": lambda kw: like(
        te.LayerNormMLP(
            WIDTH,
            INNER,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            params_dtype=kw["dtype"],
            device=kw["device"],
        ),
        ops.RMSNorm(WIDTH, **kw),
        ops.Linear(WIDTH, 2 * INNER, bias=False, **kw),
        ops.SwiGLU(),
        ops.Linear(INNER, WIDTH, bias=False, **kw),
    ),
}


def by_place(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by the order of parameters, whose names differ."""
    return {str(i): t for i, t in enumerate(found.values())}


@pytest.mark.parametrize(("recipe", "device"), recipes.on_devices())
@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_gives_the_bits_of_the_module_that_it_is(chain: str, recipe: str | None, device: str) -> None:
    if recipe is not None and recipe.startswith("nvfp4") and not recipes.rule(recipe).disable_stochastic_rounding:
        recipe = "nvfp4 nearest" if recipe == "nvfp4" else recipe
    dtype = torch.float32 if recipe in (None, "block hybrid") else torch.bfloat16
    module, model = CHAINS[chain]({"dtype": dtype, "device": device})
    torch.manual_seed(0)
    for i in range(2):  # delayed scales have moved by then
        x = values(2, 16, WIDTH, device=device, dtype=dtype, seed=i)
        wanted, found = (
            by_place(step(module, x, recipes.region(recipe))),
            by_place(step(model, x, recipes.region(recipe))),
        )
    if "stochastic" in str(recipe) or _draws(recipe):
        found, wanted = {"0": found["0"]}, {"0": wanted["0"]}  # forward alone does not draw
    if device == "cpu":
        assert not differences(found, wanted)
    for key, value in found.items():
        assert snr_db(value.float().cpu(), wanted[key].float().cpu()) > DB["nvfp4 mlp"], key


def _draws(recipe: str | None) -> bool:
    rule = recipes.rule(recipe)
    return rule is not None and rule.nvfp4() and not rule.disable_stochastic_rounding


#: What chains are drawn of: each takes and gives rows of WIDTH.
PARTS: list[Callable[[], list[Any]]] = [
    lambda: [ops.Linear(WIDTH, WIDTH, device="cpu")],
    lambda: [ops.BasicLinear(WIDTH, WIDTH, device="cpu")],
    lambda: [ops.Bias(WIDTH, device="cpu"), ops.GELU()],
    lambda: [ops.Linear(WIDTH, 2 * WIDTH, device="cpu"), ops.SwiGLU(glu_interleave_size=8)],
    lambda: [ops.Linear(WIDTH, 2 * WIDTH, bias=False, device="cpu"), ops.SiTUGLU()],
    lambda: [ops.LayerNorm(WIDTH, device="cpu")],
    lambda: [ops.RMSNorm(WIDTH, device="cpu")],
    lambda: [ops.ConstantScale(-2.0)],
    lambda: [ops.Quantize(True, True)],
    lambda: [ops.Quantize(False, True)],
    lambda: [ops.AddExtraInput(in_place=True)],
    lambda: [ops.AddExtraInput()],
    lambda: [ops.MakeExtraOutput(in_place=True)],
    lambda: [ops.MakeExtraOutput()],
    lambda: [ops.L2Normalization(), ops.Reshape((-1, WIDTH))],
]


@pytest.mark.parametrize("seed", range(24))
def test_a_chain_is_its_operations_one_by_one(seed: int) -> None:
    """Of drawn operations: what they hand over quantized, and what is fused, changes no bit (a sum's last one)."""
    draw = random.Random(seed)
    recipe = draw.choice([None, *recipes.KINDS[:4], "nvfp4 nearest", *recipes.OVERRIDES])
    recipe = recipe if recipe is None or "nvfp4 " not in recipe else "nvfp4 nearest"
    with te.quantized_model_init(enabled=recipe is not None and draw.random() < 0.3, recipe=recipes.rule(recipe)):
        chain = ops.Sequential(*[op for _ in range(draw.randrange(2, 6)) for op in draw.choice(PARTS)()])
    # A gradient in NVFP4 that comes from outside of a chain has its columnwise copy made anew: nothing tells of which
    # values, transformed or not, that copy is.
    comes_quantized = any(isinstance(op, ops.Quantize) and op.num_quantizers("backward") for op in chain)
    recipe = "mxfp8" if comes_quantized and recipe == "nvfp4 nearest" else recipe
    randomise(chain)
    apart = ops.Sequential(*[m for op in copy.deepcopy(chain) for m in (op, torch.nn.Identity())])
    for _ in range(2):
        found = []
        for model in (chain, apart):
            count = sum(isinstance(op, ops.AddExtraInput) for op in model)
            leaves = [values(32, WIDTH, seed=seed + i).requires_grad_() for i in range(1 + count)]
            with region(recipe):
                y = model(leaves[0], *[t * 1 for t in leaves[1:]])
            ys = y if isinstance(y, tuple) else (y,)
            torch.autograd.backward(ys, [gradient_for(t, 50 + i) for i, t in enumerate(ys)])
            found.append([*ys, *[t.grad for t in leaves], *[p.grad for p in model.parameters()]])
            model.zero_grad()
        for a, b in zip(*found, strict=True):
            a, b = (t.dequantize() if isinstance(t, te.QuantizedTensor) else t for t in (a, b))
            assert snr_db(a.detach(), b.detach()) > 100


@pytest.mark.parametrize("recipe", [None, *recipes.KINDS[:4]])
def test_a_chain_launches_what_the_module_launches(recipe: str | None, tmp_path: Path) -> None:
    """On a GPU that is not there: norms and activations quantize in their own kernels, biases come with products."""
    launches = []
    with null_device(tmp_path) as null:
        for model in CHAINS["LayerNormMLP"]({"dtype": torch.bfloat16, "device": "cpu"}):
            x = values(128, WIDTH, dtype=torch.bfloat16)

            def run(model: Any = model, x: Tensor = x) -> dict[str, Tensor]:
                return step(
                    model, x, te.autocast(enabled=recipe is not None, recipe=recipes.rule(recipe), emulate=True)
                )

            for _ in range(2):
                run()
            launches.append(null.counted(run, 2).launches)
    assert launches[1] == launches[0]


@pytest.mark.parametrize("recipe", recipes.KINDS)
def test_weights_may_be_held_quantized(recipe: str) -> None:
    recipe = "nvfp4 nearest" if recipe == "nvfp4" else recipe
    with te.quantized_model_init(recipe=recipes.rule(recipe)):
        module, model = CHAINS["LayerNormMLP"]({"dtype": torch.bfloat16, "device": "cpu"})
    weight = model[1].weight
    assert isinstance(weight, te.QuantizedTensor) and model[1].basic_ops[0].weight is weight
    for i in range(3):
        x = values(32, WIDTH, dtype=torch.bfloat16, seed=i)
        wanted, found = by_place(step(module, x, recipe)), by_place(step(model, x, recipe))
        assert not differences(found, wanted)
        with torch.no_grad():  # an optimizer's step
            for m in (module, model):
                for p in m.parameters():
                    p.mul_(0.75)
    assert type(model.bfloat16()[1].weight) is type(weight)
    assert not differences(by_place(step(module, x, recipe)), by_place(step(model, x, recipe)))


def test_scales_follow_the_maxima_exactly() -> None:
    recipe = DelayedScaling(amax_history_len=1024, margin=2)
    with te.quantized_model_init(recipe=recipe):
        op = ops.BasicLinear(32, 32, device="cpu", dtype=torch.bfloat16)
    tops = {("forward", 0): (448.0, (7.0, 3.0, 5.0)), ("forward", 1): (448.0, (2.0, 5.0, 3.0))}
    tops |= {("backward", 0): (57344.0, (1.0, 2.0, 1.0))}
    for i in range(3):
        with torch.no_grad():
            op.weight.fill_(tops["forward", 1][1][i])
        x = torch.full((32, 32), tops["forward", 0][1][i], dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=recipe, emulate=True):
            y = op(x)
        y.backward(torch.full_like(y, tops["backward", 0][1][i]))
        for (mode, index), (limit, maxima) in tops.items():
            scale = op.get_quantizer(mode, index).scale
            torch.testing.assert_close(scale, torch.tensor([limit / max(maxima[: i + 1]) / 4]))


@pytest.mark.parametrize(
    ("recipe", "primary"), [(None, False), ("delayed", False), *[(k, True) for k in recipes.KINDS]]
)
def test_a_checkpoint_goes_on_bit_for_bit(recipe: str | None, primary: bool) -> None:
    def build() -> tuple[ops.Sequential, Any]:
        with te.quantized_model_init(enabled=primary and recipe is not None, recipe=recipes.rule(recipe)):
            model = ops.Sequential(ops.Linear(32, 32, device="cpu"), ops.GELU(), ops.Linear(32, 32, device="cpu"))
        return model, torch.optim.SGD(model.parameters(), lr=0.25)

    def train(model: Any, optimizer: Any, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        x = values(32, 32, seed=seed).requires_grad_()
        optimizer.zero_grad()
        with region(recipe):
            y = model(x)
        y.backward(gradient_for(y))
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        held = {f"held {n}": t.clone() for n, t in te.plain_state_dict(model).items()}
        return {"y": y.detach(), "dx": x.grad, **grads, **held}  # type: ignore[dict-item]

    model, optimizer = build()
    for i in range(2):
        train(model, optimizer, i)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = [train(model, optimizer, i) for i in (2, 3)]
    file.seek(0)
    again, other = build()
    saved = torch.load(file, weights_only=False)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for i, found in enumerate(wanted):
        assert not differences(train(again, other, 2 + i), found)


def test_a_checkpoint_of_the_documented_package_is_read() -> None:
    entry = {
        "forward": {"scale_fwd": torch.tensor([2.0, 4.0]), "amax_history_fwd": torch.tensor([[0.0, 0.0], [7.0, 3.0]])},
        "backward": {"scale_bwd": torch.tensor([8.0]), "amax_history_bwd": torch.tensor([[0.0], [5.0]])},
    }
    entry["forward"]["recipe"] = DelayedScaling(amax_history_len=2)  # type: ignore[assignment]
    packed = torch.frombuffer(bytearray(pickle.dumps(entry)), dtype=torch.uint8)
    model = ops.Sequential(ops.Linear(16, 16, device="cpu"), ops.ReLU())
    theirs = {**model.state_dict(), "0.basic_ops.0._extra_state": packed}
    theirs |= {f"{name}._extra_state": torch.empty(0, dtype=torch.uint8) for name in ("0.basic_ops.1", "1")}
    assert model.load_state_dict(theirs).missing_keys == []
    state = model[0].basic_ops[0].fp8_state
    assert state.scale_fwd.tolist() == [2.0, 4.0, 1.0] and state.scale_bwd.tolist() == [8.0, 1.0]
    assert state.amax_history_fwd[1].tolist() == [7.0, 3.0, 0.0] and state.amax_history_bwd[1].tolist() == [5.0, 0.0]
    with te.autocast(recipe=DelayedScaling(amax_history_len=2), emulate=True):
        model(values(16, 16))
    assert model[0].basic_ops[0].get_quantizer("forward", 1).scale.data_ptr() == state.scale_fwd[1:].data_ptr()


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("first", ["train", "infer"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4"])
def test_training_and_inference_take_turns(recipe: str | None, first: str, primary: bool) -> None:
    with torch.inference_mode(first == "infer" and not primary):  # made there, too
        with te.quantized_model_init(enabled=primary and recipe is not None, recipe=recipes.rule(recipe)):
            model = ops.Sequential(ops.Linear(32, 32, device="cpu"))
    stage = "fp32" if recipe is None else "nvfp4 mlp" if recipe == "nvfp4" else "fp8 mlp"
    for i in range(4):
        trains = (i % 2 == 0) == (first == "train")
        if trains and first == "infer" and not primary:
            continue  # parameters of inference mode cannot be trained
        weight, bias, x = values(32, 32, seed=3 * i), values(32, seed=3 * i + 1), values(32, 32, seed=3 * i + 2)
        with torch.no_grad() if trains or primary or first == "train" else torch.inference_mode():
            model[0].weight.copy_(weight), model[0].bias.copy_(bias)
        wanted = x @ weight.T + bias
        if not trains:
            with torch.inference_mode(), region(recipe):
                y = model(x)
        else:
            found = step(model, x, recipe)
            y, dy = found["y"], gradient_for(found["y"])
            assert snr_db(found["dx"], dy @ weight) > DB[stage] - 3
            assert snr_db(found["0.basic_ops.0.weight"], dy.T @ x) > DB[stage] - 3
        if i or recipe != "delayed":  # whose scales begin with 1
            assert snr_db(y, wanted) > DB[stage] - 3


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_follow_the_weight_or_torch_autocast(dtype: torch.dtype, quantized: bool) -> None:
    recipe = Float8CurrentScaling() if quantized else None
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        op = ops.Linear(32, 32, bias=False, device="cpu")
    x = values(16, 32).requires_grad_()
    for outer, inner in ((0, 1), (1, 0)):
        contexts = (torch.autocast("cpu", dtype=dtype), te.autocast(enabled=quantized, recipe=recipe, emulate=True))
        with contexts[outer], contexts[inner]:
            y = op(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, op.weight.grad.dtype) == (dtype, torch.float32, torch.float32)
    kind = type(op.weight)
    op.to(dtype)
    op.zero_grad()
    with te.autocast(enabled=quantized, recipe=recipe, emulate=True):
        y = op(x)
    y.sum().backward()
    assert type(op.weight) is kind and isinstance(op.weight, te.QuantizedTensor) is quantized
    assert (op.weight.dtype, y.dtype, x.grad.dtype, op.weight.grad.dtype) == (dtype, dtype, torch.float32, dtype)


@pytest.mark.parametrize(
    ("recipe", "case"),
    [("current", case) for case in range(16)] + [(kind, case) for kind in recipes.KINDS for case in (5, 10, 15)],
)
def test_what_is_quantized_around_a_linear(recipe: str, case: int) -> None:
    """Input, output and their gradients come and go quantized, also where the documented package raises."""
    x_in, y_out, dy_in, dx_out = (bool(case & bit) for bit in (1, 2, 4, 8))
    chain = [ops.Quantize(x_in, dx_out), linear := ops.BasicLinear(32, 64, device="cpu"), ops.Quantize(y_out, dy_in)]
    randomise(linear)
    x = values(32, 32).requires_grad_()
    model = ops.Sequential(*chain)
    if recipe == "delayed":
        step(ops.Sequential(ops.Quantize(), copy.copy(linear)), x, recipe)
    with region(recipe):
        y = model(x)
    assert isinstance(y, te.QuantizedTensor) is y_out
    dy = gradient_for(y)
    y.backward(dy)
    assert linear.weight.grad is not None and x.grad is not None
    dense = y.dequantize() if y_out else y
    stage = "nvfp4 mlp" if recipe == "nvfp4" else "fp8 mlp"
    for found, wanted in ((dense, x @ linear.weight.T), (x.grad, dy @ linear.weight), (linear.weight.grad, dy.T @ x)):
        found = found.dequantize() if isinstance(found, te.QuantizedTensor) else found
        assert snr_db(found.detach(), wanted.detach()) > DB[stage] - 2


def test_an_input_without_the_copy_that_backward_reads() -> None:
    """Of NVFP4 that copy is transformed, so it cannot be made of the other one."""
    quantizer = te.NVFP4Quantizer(columnwise=False)
    x, op = quantizer(values(32, 64)), ops.BasicLinear(64, 32, device="cpu")
    with recipes.region("nvfp4 nearest"):
        y = op(x)
    y.backward(dy := gradient_for(y))
    assert snr_db(op.weight.grad, dy.T @ x.dequantize()) > DB["nvfp4 linear"]


def test_identity_and_reshape_keep_quantized_tensors() -> None:
    x = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(values(16, 32))
    y = ops.Sequential(ops.Identity(), ops.Reshape((4, 4, 32)), ops.Quantize())(x)
    assert isinstance(y, te.Float8Tensor) and torch.equal(y.dequantize(), x.dequantize().view(4, 4, 32))


@pytest.mark.parametrize("way", ["te", "torch", "reentrant"])
@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8"])
def test_a_chain_is_run_again_by_a_checkpoint(recipe: str | None, way: str) -> None:
    run = {
        "te": te.checkpoint,
        "torch": lambda m, x: checkpoint(m, x, use_reentrant=False),
        "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    }[way]
    _, model = CHAINS["LayerNormMLP"]({"dtype": torch.float32, "device": "cpu"})
    other = copy.deepcopy(model)
    for i in range(3):
        x = values(32, WIDTH, seed=i)
        wanted = step(model, x, recipe)
        assert not differences(step(lambda t: run(other, t), x, recipe, owner=other), wanted)
    assert not differences(fp8_state(other), fp8_state(model))


def test_a_model_on_the_meta_device_is_filled_by_its_first_forward() -> None:
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        model = ops.Sequential(
            ops.LayerNorm(32, device="meta"),
            ops.Linear(32, 16, device="meta"),
            ops.GroupedLinear(2, 16, 8, device="meta"),
        )
    assert all(p.is_meta for p in model.parameters())
    x = values(16, 32).to("cuda" if torch.cuda.is_available() else "cpu")  # where such a model is filled
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling(), emulate=True):
        y = model(x, torch.tensor([8, 8]))
    assert y.isfinite().all() and y.any() and isinstance(model[1].weight, te.QuantizedTensor)
    assert not any(p.is_meta for p in model.parameters())
    bound = 1 / 32**0.5  # kaiming_uniform(a=sqrt(5)), as torch.nn.Linear's
    assert 0.8 * bound < model[1].weight.dequantize().abs().max() <= 1.1 * bound


def test_a_custom_recipe_is_asked_for_each_operand() -> None:
    asked = []

    def factory(role: Any) -> Any:
        asked.append((role.module_type, role.tensor_type))
        if role.tensor_type == "weight":
            return te.IdentityQuantizer()
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")

    op = ops.BasicLinear(32, 32, device="cpu")
    found = step(op, x := values(16, 32), te.autocast(recipe=CustomRecipe(qfactory=factory), emulate=True))
    assert asked == [("linear", "input"), ("linear", "weight"), ("linear", "grad_output")]
    rounded = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(x).dequantize()
    torch.testing.assert_close(found["y"], rounded @ op.weight.T)


def test_a_users_operation_has_quantizers_of_its_own() -> None:
    class Rounded(ops.BasicOperation):
        def num_quantizers(self, mode: str) -> int:
            return 1

        def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
            return self.get_quantizer("forward", 0)(input_).dequantize()

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return self.get_quantizer("backward", 0)(grad_output).dequantize(), ()

    op, x = Rounded(), values(16, 32)
    for _ in range(2):
        found = step(op, 8 * x, "delayed")
    state = op.fp8_state
    torch.testing.assert_close(state.scale_fwd[0], 448 / (8 * x).abs().max())
    torch.testing.assert_close(state.scale_bwd[0], 57344 / gradient_for(x).abs().max())
    assert DB["fp8 gemm"] < snr_db(found["y"], 8 * x) < 40 and [*op.state_dict()] == [
        f"fp8_state.{name}" for name in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
    ]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_casts_count_what_is_no_number(recipe: str) -> None:
    model = ops.Sequential(ops.RMSNorm(32, device="cpu"), ops.Linear(32, 32, device="cpu"))
    x = values(16, 32)
    x[3, 5] = torch.nan
    with te.autocast(recipe=recipes.rule(recipe), emulate=True, check_finite=True):
        model(x)
    rows = te.nonfinite_report(model).rows
    assert [(row.layer, row.nans) for row in rows] == [("1.basic_ops.0", 32)]


def test_main_grad_takes_the_weights_gradient() -> None:
    op = ops.BasicLinear(16, 8, device="cpu", accumulate_into_main_grad=True)
    op.weight.main_grad = torch.full((8, 16), 0.5)
    x = values(4, 16)
    assert "weight" not in step(op, x, None)
    torch.testing.assert_close(op.weight.main_grad - 0.5, gradient_for(torch.empty(4, 8)).T @ x)
    op.weight.overwrite_main_grad = True
    step(op, x, None)
    torch.testing.assert_close(op.weight.main_grad, gradient_for(torch.empty(4, 8)).T @ x)


# ------------------------------------------------------------------------------------------------------ grouped linear


@pytest.mark.parametrize("recipe", [None, *recipes.KINDS])
def test_a_grouped_linear_gives_the_bits_of_the_module(recipe: str | None) -> None:
    recipe = "nvfp4 nearest" if recipe == "nvfp4" else recipe
    module = te.GroupedLinear(3, 32, 64, device="cpu")
    randomise(module)
    op = ops.GroupedLinear(3, 32, 64, device="cpu")
    op.load_state_dict(module.state_dict())
    splits = torch.tensor([32, 0, 64], dtype=torch.int32)
    for i in range(2):
        x = values(96, 32, seed=i)
        wanted, found = step(module, x, recipe, splits), step(op, x, recipe, splits)
        assert not differences(found, wanted)
    assert not differences(fp8_state(op), fp8_state(module))


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_experts_with_scaled_rows(recipe: str | None) -> None:
    """GroupedLinear, ScaledSwiGLU and GroupedLinear with scaled biases, against the formula."""
    model = ops.Sequential(
        ops.GroupedLinear(3, 32, 64, device="cpu"),
        ops.ScaledSwiGLU(32),
        ops.GroupedLinear(3, 32, 32, device="cpu", scale_bias=True),
    )
    randomise(model)
    x, p = values(96, 32).requires_grad_(), values(96, seed=1).sigmoid().requires_grad_()
    splits = torch.tensor([64, 0, 32])
    with region(recipe):
        y = model(x, splits, p, splits, p)
    y.backward(dy := gradient_for(y))
    named = {n: t.detach().double().requires_grad_() for n, t in model.named_parameters()}
    x64, p64 = x.detach().double().requires_grad_(), p.detach().double().requires_grad_()
    outs = []
    for i, (rows, scale) in enumerate(zip(x64.split([64, 0, 32]), p64.split([64, 0, 32]), strict=True)):
        a, b = (rows @ named[f"0.weight{i}"].T + named[f"0.bias{i}"]).chunk(2, -1)
        h = torch.nn.functional.silu(a) * b * scale[:, None]
        outs.append(h @ named[f"2.weight{i}"].T + named[f"2.bias{i}"] * scale[:, None])
    wanted = torch.cat(outs)
    wanted.backward(dy.double())
    stage = "fp32" if recipe is None else "fp8 mlp"
    pairs = [(y, wanted), (x.grad, x64.grad), (p.grad, p64.grad)]
    pairs += [(t.grad, named[n].grad) for n, t in model.named_parameters() if named[n].grad is not None]
    for found, exact in pairs:
        assert snr_db(found.detach(), exact.detach()) > DB[stage] - 3
    assert not any(t.grad.any() for n, t in model.named_parameters() if n.endswith(("weight1", "bias1")))


def test_a_grouped_linear_writes_into_the_callers_buffers() -> None:
    op = ops.Sequential(ops.GroupedLinear(2, 16, 8, bias=False, device="cpu"))
    out, dx = torch.empty(6, 8), torch.empty(6, 16)
    x, splits = values(6, 16).requires_grad_(), torch.tensor([4, 2])
    y = op(x, splits, op_kwargs={0: {"output": out, "grad_input": dx}})
    y.sum().backward()
    assert y.data_ptr() == out.data_ptr() and torch.equal(x.grad, dx)
    with pytest.raises(ValueError, match="out "):
        op(x, splits, op_kwargs={0: {"output": out[:4]}})


def test_a_grouped_linear_puts_weight_gradients_off() -> None:
    now, later = (ops.GroupedLinear(2, 16, 8, device="cpu", delay_wgrad_compute=late) for late in (False, True))
    later.load_state_dict(now.state_dict())
    for op in (now, later):
        op(values(6, 16), torch.tensor([4, 2])).sum().backward()
    assert later.weight0.grad is None and later.need_backward_dw()
    later.backward_dw()
    for p, q in zip(now.parameters(), later.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_torch_compile_breaks_its_graph_at_a_chain_that_is_no_graph() -> None:
    _, model = CHAINS["LayerNormMLP"]({"dtype": torch.float32, "device": "cpu"})
    model.append(ops.ConstantScale(3.0))
    compiled = torch.compile(lambda t: model(2 * t) + 1, backend="eager")
    x = values(32, WIDTH)
    torch.testing.assert_close(compiled(x), model(2 * x) + 1)
