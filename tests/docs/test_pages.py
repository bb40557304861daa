"""What the documents say holds: links lead somewhere, examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from te_core import errors
from tests.backends import more_without_gpu, requires_cuda
from tests.parallel.ranks import LOOPBACK
from tools import error_table
from tools.docs import dead_links, needs_gpu, pages, run_examples

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
RANKS = GUIDES / "06-several-gpus.md"
WITH_GPU = [page for page in pages() if needs_gpu(page.read_text())]


@more_without_gpu  # `make check` follows the links, too
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path) -> None:
    text = page.read_text()
    assert not dead_links(page, text)
    assert run_examples(text) is None


@requires_cuda
@pytest.mark.parametrize("page", WITH_GPU, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_that_need_a_gpu(page: Path) -> None:
    """Among the others of their page, whose names they read."""
    assert run_examples(page.read_text(), gpu=True) is None


def test_pages_with_examples_that_need_a_gpu() -> None:
    """A reason that says so in other words would not be found, and the example never run."""
    assert {page.name for page in WITH_GPU} == {"attention.md", "training.md"}
    others = [line for page in pages() for line in page.read_text().splitlines() if line.startswith("<!-- not run")]
    assert not [line for line in others if "GPU" in line and line != "<!-- not run: it needs a GPU -->"]


def scripts_of_ranks() -> list[str]:
    return re.findall(r"<!-- not run: torchrun runs it -->\n```python\n(.*?)```", RANKS.read_text(), re.DOTALL)


def losses(script: str, ranks: int, folder: Path) -> list[float]:
    """What a script of ranks prints, run as its page says."""
    (folder / "script.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"GLOO_SOCKET_IFNAME": LOOPBACK[0]} if LOOPBACK else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*command, "script.py"], cwd=folder, env=env, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d{3})", done.stdout)]  # ranks share the lines
    assert len(found) == 10, done.stdout + done.stderr[-3000:]
    return found


def test_scripts_of_ranks_are_short() -> None:
    assert len(scripts_of_ranks()) == 5 and max(len(script.splitlines()) for script in scripts_of_ranks()) <= 40


def test_scripts_of_ranks_end_at_once() -> None:
    """One in five aborted as its interpreter closed: what gloo's threads still held was freed too late."""
    for script in scripts_of_ranks():
        assert script.splitlines()[-1].startswith("os._exit(0)")
        assert script.count("flush=True") == script.count("print(")


@pytest.mark.more
def test_scripts_of_ranks(tmp_path: Path) -> None:
    """They learn; a sequence that is spread, by rows or by context, has the losses of one that is whole.

    Ranks of a context group quantize their own tokens, each with a scale of its own: later losses drift apart.
    """
    found = [losses(script, 2, tmp_path) for script in scripts_of_ranks()]
    assert all(each[-1] < 0.8 * each[0] for each in found)
    _, _, tensor, sequence, context = found
    assert sequence == pytest.approx(tensor, abs=2e-3)
    assert context[:5] == pytest.approx(losses(scripts_of_ranks()[-1], 1, tmp_path)[:5], abs=2e-3)


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.stem)
def test_guides_are_short(page: Path) -> None:
    """Without code, and without what is generated."""
    written = re.sub(
        r"<!-- output.*?end of output -->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert sum(any(map(str.isalnum, word)) for word in written.split()) <= 1200


def test_the_page_of_errors_has_every_class() -> None:
    def below(kind: type) -> set[str]:
        classes = [one for one in kind.__subclasses__() if one.__module__.startswith("te_")]
        return {name for one in classes for name in (one.__name__, *below(one))}

    import te_torch.export.mode
    import te_torch.optimizers

    ours = below(errors._FourPartError)
    text = (GUIDES / "16-errors.md").read_text()
    assert te_torch and ours <= error_table.classes().keys() and len(ours) > 10
    assert all(re.search(rf"^\| `te_\S+\.{name}` \|", text, re.MULTILINE) for name in ours)
    assert {"ArgumentError", "UnsupportedError", "LibraryError"} <= {
        k for k, v in error_table.causes().items() if len(v) > 10
    }
