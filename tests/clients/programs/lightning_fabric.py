"""Lightning Fabric with its TransformerEnginePrecision: a model that it converts, and one that it leaves alone."""

import te_torch.compat  # noqa: F401
import lightning as L
import torch
import transformer_engine.pytorch as te
from lightning.fabric.plugins import TransformerEnginePrecision
from support import arguments, check_fp8, falls, keep, kept, plain_model, same, task

given = arguments()
accelerator = "cpu" if given.device == "cpu" else "cuda"
options = {"fp8_format": "HYBRID", "amax_history_len": 8, "amax_compute_algo": "max"}
precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=options)
fabric = L.Fabric(accelerator=accelerator, devices=1, plugins=precision)
x, target = task(given.device)

model = fabric.setup_module(plain_model())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
assert isinstance(model.module[0], te.Linear) and isinstance(model.module[2], te.LayerNorm)
if given.what == "train":
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.mse_loss(model(x), target)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    falls(losses)
    check_fp8(model, layers=2)
    fabric.save(given.folder / "fabric.ckpt", {"model": model, "optimizer": optimizer, "steps": 12})
    with torch.no_grad():
        keep(given.folder, y=model(x))
else:
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    fabric.load(given.folder / "fabric.ckpt", state)
    assert state["steps"] == 12
    with torch.no_grad():
        same(model(x), kept(given.folder)["y"])
    fabric.backward(torch.nn.functional.mse_loss(model(x), target))
    optimizer.step()
    check_fp8(model, layers=2)

# A model that has the layers already is recognised by what its classes say, and stays as it is.
own = torch.nn.Sequential(te.LayerNormLinear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
with torch.no_grad():
    own[1].weight.copy_(torch.linspace(0.5, 1.5, 32))
fitted = fabric.setup_module(own).module
assert type(fitted[1]) is torch.nn.LayerNorm and type(fitted[2]) is torch.nn.Linear
assert torch.equal(fitted[1].weight.float().cpu(), torch.linspace(0.5, 1.5, 32).bfloat16().float())

# Layers made in its own context are ours from the start.
precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=True)
replacing = L.Fabric(accelerator=accelerator, devices=1, plugins=precision)
with replacing.init_module():
    made = torch.nn.Linear(32, 32)
assert type(made) is te.Linear and made.weight.dtype is torch.bfloat16 and made.weight.device.type == given.device
print("ok")
