"""peft: LoRA on Linear, LayerNormLinear and LayerNormMLP in FP8, with weights in bf16 or held in FP8."""

import te_torch.compat  # noqa: F401
import sys
from contextlib import nullcontext

import torch
import transformer_engine.pytorch as te
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.te import TeLinear
from support import arguments, check_fp8, falls, keep, kept, same, task
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

given = arguments()
held = sys.argv[4] == "fp8"
recipe = Float8CurrentScaling()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "device": given.device}
        self.first = te.LayerNormLinear(32, 64, **options)
        self.second = te.Linear(64, 32, **options)
        self.mlp = te.LayerNormMLP(32, 64, **options)

    def forward(self, x):
        return self.mlp(self.second(self.first(x)))


def base():
    torch.manual_seed(1)
    with te.quantized_model_init(recipe=recipe) if held else nullcontext():
        return Net()


x, target = (t.bfloat16() for t in task(given.device))
if given.what == "train":
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["first", "second", "mlp"]))
    wrapped = [m for m in model.modules() if isinstance(m, TeLinear)]
    assert [type(m.base_layer) for m in wrapped] == [te.LayerNormLinear, te.Linear, te.LayerNormMLP]
    assert isinstance(wrapped[1].base_layer.weight, te.Float8Tensor) == held
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    losses = []
    for _ in range(16):
        with te.autocast(recipe=recipe):
            loss = torch.nn.functional.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    falls(losses)
    check_fp8(model, layers=4, backward=("dgrad",))
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n].float(), before.float()) for n, before in frozen.items()), "the base is frozen"
    model.save_pretrained(given.folder / "adapter")
else:
    model = PeftModel.from_pretrained(base(), given.folder / "adapter")
with torch.no_grad(), te.autocast(recipe=recipe):
    y = model.eval()(x)
    with model.disable_adapter():
        without = model(x)
assert not torch.equal(y, without)
if given.what == "train":
    keep(given.folder, y=y, without=without)
else:
    same(y, kept(given.folder)["y"])
    same(without, kept(given.folder)["without"])
    check_fp8(model, layers=4, backward=())
    with te.autocast(recipe=recipe if held else DelayedScaling()):
        model.train()(x).float().square().mean().backward()
    check_fp8(model, layers=4, backward=("dgrad",) if held else ())
print("ok")
