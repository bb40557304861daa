"""Accelerate with mixed_precision="fp8" on this backend: prepare, train, save_state, load_state in a new process."""

import te_torch.compat  # noqa: F401
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.utils import (
    TERecipeKwargs,
    convert_model,
    has_transformer_engine_layers,
    is_transformer_engine_available,
)
from accelerate.utils.dataclasses import FP8BackendType
from support import arguments, check_fp8, falls, keep, kept, plain_model, same, task

given = arguments()
assert is_transformer_engine_available()
# Options that the documented recipe does not have, as this client passes them on.
handler = TERecipeKwargs(amax_history_len=8, amax_compute_algo="max", interval=2, override_linear_precision=(0, 0, 1))
accelerator = Accelerator(mixed_precision="fp8", cpu=given.device == "cpu", kwargs_handlers=[handler])
assert accelerator.fp8_backend == FP8BackendType.TE and accelerator.device.type == given.device
x, target = task(given.device)
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*task("cpu")), batch_size=32)
model = plain_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
inner = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
assert has_transformer_engine_layers(inner) and isinstance(inner[0], te.Linear) and isinstance(inner[2], te.LayerNorm)
if given.what == "train":
    losses = []
    for _ in range(12):
        for inputs, wanted in batches:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    falls(losses)
    check_fp8(inner, layers=2)
    accelerator.save_state(given.folder / "state")
else:
    accelerator.load_state(given.folder / "state")
with torch.no_grad():
    y = model(x)  # in training mode: this client turns FP8 off in evaluation
    high = model.eval()(x)
assert not torch.equal(y, high)
if given.what == "train":
    keep(given.folder, y=y, high=high)
else:
    same(y, kept(given.folder)["y"])
    same(high, kept(given.folder)["high"])
    loss = torch.nn.functional.mse_loss(model.train()(x), target)
    accelerator.backward(loss)
    optimizer.step()
    check_fp8(inner, layers=2)

# Its converter alone.
plain = plain_model().to(given.device)
assert not has_transformer_engine_layers(plain)
before = plain(x)
with torch.no_grad():
    convert_model(plain)
assert isinstance(plain[0], te.Linear) and isinstance(plain[2], te.LayerNorm) and has_transformer_engine_layers(plain)
torch.testing.assert_close(plain.to(given.device)(x), before, atol=2e-3, rtol=2e-3)
print("ok")
