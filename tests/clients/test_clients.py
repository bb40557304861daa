"""Programs of others on this package: each trains, saves, loads in a fresh process, and multiplies in FP8.

Nothing here skips where a client is missing: `make test-more` installs the extra `clients`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends import devices
from tests.clients.forks import Forks
from tools.setup_env import APART, folder_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def run(forks: Forks, program: str, what: str, device: str, *arguments: str) -> None:
    """A program of the folder, in a process of its own, without network."""
    env = dict(os.environ)
    # No GPU for what shall run on the CPU, and one otherwise: for some, two mean DataParallel.
    first = env.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    env["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else first
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
    file = str(PROGRAMS / f"{program}.py")
    code, shown = forks.run([file, what, device, *arguments], [str(PROGRAMS), str(ROOT)], env)
    assert code == 0 and "ok" in shown.splitlines(), shown[-4000:]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "program",
    [
        "lightning_fabric",
        "lightning_trainer",
        "accelerate_fp8",
        "peft_lora bf16",
        "peft_lora fp8",
        "transformers_trainer llama",
        "transformers_trainer own",
    ],
)
def test_trains_saves_and_loads(forks: Forks, program: str, device: str, tmp_path: Path) -> None:
    name, *options = program.split()
    for what in ("train", "load"):
        run(forks, name, what, device, str(tmp_path), *options)


@pytest.mark.parametrize("device", devices())
def test_weights_of_a_llama(forks: Forks, device: str, tmp_path: Path) -> None:
    run(forks, "hugging_face_llama", "load", device, str(tmp_path))


#: Of the configurations those that use what other tests with Megatron-core do not.
FEW = " + ".join(
    [
        "dense", "op fuser", "experts", "router fusion", "router and permute fusion, delayed", "op fuser with experts",
        "distributed optimizer, FP8 parameters blockwise", "tensor and sequence, op fuser delayed", "ranks of experts",
        "ranks of experts, router and permute fusion",
    ]
)  # fmt: skip


@pytest.mark.parametrize("device", devices())
def test_experts_are_converted(forks: Forks, device: str, tmp_path: Path) -> None:
    run(forks, "hugging_face_experts", "load", device, str(tmp_path))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("release", APART["megatron-core"])
def test_megatron_core(forks: Forks, release: str, model: str, device: str, tmp_path: Path) -> None:
    """On one rank, then on two that begin with the same weights."""
    installed = str(folder_of("megatron-core", release))
    for ranks in ("1", "2") if device == "cpu" else ("1",):  # the tests see one GPU
        for what in ("train", "load"):
            run(forks, "megatron_gpt", what, device, str(tmp_path), installed, model, ranks)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rows", [FEW, pytest.param("all", marks=pytest.mark.full)], ids=["few", "all"])
@pytest.mark.parametrize("release", APART["megatron-core"])
def test_configurations_of_megatron_core(forks: Forks, release: str, rows: str, device: str, tmp_path: Path) -> None:
    """What a user of Megatron-core may set. Guide 04 has the table."""
    run(forks, "megatron_configurations", rows, device, str(tmp_path), str(folder_of("megatron-core", release)))


IMPORTS = {
    "peft": "import peft",
    "transformers": "from transformers import Trainer",
    "accelerate": "import accelerate.utils as u; assert u.is_transformer_engine_available()",
    "lightning": "import lightning; from lightning.pytorch.plugins import TransformerEnginePrecision",
}


@pytest.mark.parametrize("client", IMPORTS)
def test_imports_beside_the_alias(forks: Forks, client: str, tmp_path: Path) -> None:
    """Whoever has nothing to do with us is not disturbed, in either order."""
    program = tmp_path / "program.py"
    for code in (f"import te_torch.compat\n{IMPORTS[client]}", f"import {client}\nimport te_torch.compat"):
        program.write_text(code)
        failed, shown = forks.run([str(program)], [str(ROOT)], os.environ)
        assert not failed, shown[-3000:]
