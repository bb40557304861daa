"""The small GPT in JAX learns as the one in torch does, from the same weights and batches: the losses of both agree."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402

from examples import gpt_jax, gpt_jax_devices  # noqa: E402
from te_cli.settings import RECIPES, TEXT, GPTConfig, Settings  # noqa: E402
from te_cli.training import Text, Trainer, schedule  # noqa: E402
from tests import programs  # noqa: E402
from tests.tolerances import DB, snr_db  # noqa: E402

STEPS = 12
OTHERS = ("none", "current", "block")


def by_torch(settings: Settings) -> tuple[list[float], Any, list[Any]]:
    """(losses, the weights before, the batches)."""
    trainer = Trainer(settings, Text(TEXT, torch.device("cpu")), torch.device("cpu"))
    entries = {n: jnp.asarray(p.detach().numpy()) for n, p in trainer.model.named_parameters()}
    layers: list[dict[str, Any]] = [{} for _ in range(settings.layers)]
    for name, array in entries.items():
        if name.startswith("blocks."):
            number, *path = name.split(".")[1:]
            layers[int(number)]["_".join(path[-2:])] = array
    params = {"embedding": entries["embedding.weight"], "norm": entries["norm.weight"], "layers": layers}
    batches = []
    draw = trainer.text.batch

    def noted(*arguments: Any) -> torch.Tensor:
        batches.append(draw(*arguments))
        return batches[-1]

    trainer.text.batch = noted  # type: ignore[method-assign]
    trainer.train()
    return trainer.losses, params, [jnp.asarray(b.numpy(), jnp.int32) for b in batches]


two = pytest.mark.skipif(len(jax.devices()) < 2, reason="hardware: one device")


@pytest.mark.parametrize(
    "devices", ["one", *(pytest.param(d, marks=[two, pytest.mark.more]) for d in ("data", "tensor"))]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(r, marks=pytest.mark.more) for r in OTHERS)])
def test_losses_agree(recipe: str, seed: int, devices: str, request: pytest.FixtureRequest) -> None:
    full = request.config.getoption("--full")
    steps = 300 if full else STEPS
    s = Settings(recipe=recipe, steps=steps, layers=2, hidden=64, heads=2, batch=8, sequence=32, seed=seed)
    wanted, params, batches = by_torch(s)
    config = gpt_jax.GPTConfig(s.layers, s.hidden, s.heads)
    if devices == "one":
        step, scaling = gpt_jax.training_step(config, RECIPES[recipe]), gpt_jax.states(config, RECIPES[recipe])
    else:
        step, params, scaling = gpt_jax_devices.training(config, RECIPES[recipe], params, 2, devices == "tensor")
    moments, found = gpt_jax.moments_of(params), []
    for number, tokens in enumerate(batches):
        speed = s.rate * schedule(number, s.steps)
        params, moments, scaling, loss = step(params, moments, scaling, tokens, number, speed)
        found.append(float(loss))
    assert found[-1] < found[0] - 1
    np.testing.assert_allclose(found[:STEPS], wanted[:STEPS], rtol=0.01)
    count = max(1, steps // 10)
    np.testing.assert_allclose(np.mean(found[-count:]), np.mean(wanted[-count:]), rtol=0.02)


@two
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_two_devices_have_the_gradients_of_one(tensor_parallel: bool) -> None:
    """Of all parameters, none of which is as it begins: in training a wrong one changes early losses little."""
    config, draw = GPTConfig(1, 64, 4), np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: p + jnp.asarray(draw.standard_normal(p.shape) * 0.1, p.dtype), gpt_jax.parameters(config, 0)
    )
    tokens = jnp.asarray(draw.integers(256, size=(4, 33)), jnp.int32)
    mesh = jax.make_mesh((2,), (gpt_jax_devices.AXIS,), (jax.sharding.AxisType.Auto,))
    spread, _ = gpt_jax_devices.loss_on(mesh, config, None, tensor_parallel)
    alone = functools.partial(gpt_jax.loss, config=config, recipe=None)
    (found, wanted) = (
        jax.jit(jax.value_and_grad(f))(params, s, tokens)
        for f, s in ((spread, gpt_jax_devices.states(config, None, tensor_parallel)), (alone, [None]))
    )
    paths = jax.tree_util.tree_flatten_with_path(found)[0]
    for (path, one), other in zip(paths, jax.tree.leaves(wanted), strict=True):
        assert snr_db(one, other) > DB["bf16 attention block"], jax.tree_util.keystr(path)


@pytest.mark.more
def test_the_program(tmp_path: Path) -> None:
    command = [sys.executable, str(programs.ROOT / "examples" / "train_gpt_jax.py"), "--steps", "12", "--layers", "1"]
    more = ["--hidden", "32", "--batch", "4", "--sequence", "16", "--out", str(tmp_path)]
    ran = subprocess.run([*command, *more], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0 and "FP8 delayed  training loss" in ran.stdout, ran.stderr
    assert len((tmp_path / "loss.csv").read_text().splitlines()) == 13 and (tmp_path / "loss.png").exists()
    for more_options, said in (
        (["--devices", "2", "--batch", "3"], "--devices 2 do not divide --batch 3"),
        (["--devices", "4", "--tensor-parallel", "--heads", "2"], "--devices 4 do not divide --heads 2"),
    ):
        ran = subprocess.run([*command, *more_options], capture_output=True, text=True, timeout=240, check=False)
        assert ran.returncode == 2 and (said in ran.stderr or "JAX sees" in ran.stderr), ran.stderr
    ran = subprocess.run([*command, "--text", "/nowhere"], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 2 and "--text names a file to learn" in ran.stderr and "Traceback" not in ran.stderr
