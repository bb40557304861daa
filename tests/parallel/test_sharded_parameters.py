"""Weights held quantized and sharded by FSDP2: two gloo processes train as one that holds the whole does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.sharded_ranks import RECIPES, ROWS, WIDTH, build, train
from tests.tolerances import snr_db

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
FACE = [name for name in ("lo", "lo0") if Path(f"/sys/class/net/{name}").exists()]
WORLD = 2
CLASSES = {
    "delayed": "Float8Tensor",
    "current": "Float8Tensor",
    "block": "Float8BlockwiseQTensor",
    "mxfp8": "MXFP8Tensor",
    "nvfp4": "NVFP4Tensor",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by recipe and whether it shards again after forward."""
    folder = tmp_path_factory.mktemp("shards")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if FACE:
        env["GLOO_SOCKET_IFNAME"] = FACE[0]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.sharded_ranks", str(rank), str(WORLD), str(folder)],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0] * WORLD, "\n".join(outputs)[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reshard", [True, False])
def test_shards_train_as_the_whole(ranks: list[dict[str, Any]], recipe: str, reshard: bool) -> None:
    found = [r[f"{recipe} {reshard}"] for r in ranks]
    whole = build(RECIPES[recipe])
    wanted = train(whole, RECIPES[recipe], range(WORLD))
    for f in found:
        assert f["class"] == CLASSES[recipe] and f["sharded"] and f["shard"].shape == (WIDTH // WORLD, WIDTH)
    ys = [torch.cat([f["y"][step] for f in found]) for step in range(len(wanted))]
    exact = recipe in ("delayed", "block", "mxfp8")  # the others scale the input of a rank by the rank's own maximum
    assert torch.equal(ys[0], wanted[0]) if exact else snr_db(ys[0], wanted[0]) > 12
    assert snr_db(ys[-1], wanted[-1]) > 12 and ys[0].shape == (WORLD * ROWS, WIDTH)
    assert torch.equal(found[0]["scale"], found[1]["scale"]) or recipe not in ("current", "delayed")
    weight = torch.cat([f["shard"] for f in found])
    assert snr_db(weight, whole[0].weight.dequantize()) > (30 if recipe != "nvfp4" else 15)
