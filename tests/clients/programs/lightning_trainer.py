"""Lightning's Trainer: fit, a checkpoint, and on from it in a new process.

Layers are made under the precision's context, or converted after they were made (then the checkpoint comes before them,
and their FP8 state is left out).
"""

import te_torch.compat  # noqa: F401
import lightning as L
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.plugins import TransformerEnginePrecision
from support import arguments, check_fp8, falls, keep, kept, plain_model, same, task

given = arguments()
CHECKPOINT = given.folder / "trainer.ckpt"


class Fitted(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            self.model = plain_model()

    def training_step(self, batch, _):
        x, target = batch
        loss = torch.nn.functional.mse_loss(self.model(x), target)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Converted(Fitted):
    strict_loading = False

    def __init__(self):
        super().__init__()
        self.model = plain_model()


def fit(module, steps, ckpt_path=None, **options):
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*task("cpu")), batch_size=32)
    runs = L.Trainer(
        accelerator="cpu" if given.device == "cpu" else "cuda",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=given.folder,
        **options,
    )
    runs.fit(module, batches, ckpt_path=ckpt_path)
    layers = [m for m in module.modules() if isinstance(m, te.Linear)]
    assert len(layers) == 2 and all(layer.weight.dtype is torch.bfloat16 for layer in layers)
    return runs


def replacing():
    return TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=True)


def predicted(module, runs):
    with torch.no_grad(), runs.precision_plugin.forward_context():
        return module.to(given.device).model(runs.precision_plugin.convert_input(task(given.device)[0]))


module = Fitted()
if given.what == "train":
    runs = fit(module, 12, plugins=replacing())
    falls(module.losses)
    check_fp8(module, layers=2)
    runs.save_checkpoint(CHECKPOINT)
    keep(given.folder, y=predicted(module, runs), loss=module.losses[-1])
    by_name = Converted()
    fit(by_name, 12, precision="transformer-engine")
    falls(by_name.losses)
    check_fp8(by_name, layers=2)
else:
    runs = fit(module, 12, plugins=replacing(), ckpt_path=CHECKPOINT)  # loads, and has nothing left to do
    assert not module.losses
    same(predicted(module, runs), kept(given.folder)["y"])
    for again, options in ((Fitted(), {"plugins": replacing()}), (Converted(), {"precision": "transformer-engine"})):
        fit(again, 16, ckpt_path=CHECKPOINT, **options)
        assert len(again.losses) == 4 and again.losses[0] <= 1.1 * kept(given.folder)["loss"], again.losses
        check_fp8(again, layers=2)
print("ok")
