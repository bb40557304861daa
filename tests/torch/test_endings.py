"""A program that ends says nothing: destructors run after the interpreter has taken modules apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends import requires_cuda

ROOT = Path(__file__).parents[2]
#: Libraries' bindings are modules. The interpreter empties those that something still holds, the last ones first: what
#: an earlier module has is destroyed when the bindings have lost their functions.
BINDINGS = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
bindings = sys.modules["bindings"] = types.ModuleType("bindings")
for name in ("matrix_layout_destroy", "matmul_desc_destroy", "free", "order_streams"):
    setattr(bindings, name, eval("lambda *a: None", {}))  # it holds nothing of this program
"""
HELD = {
    "descriptors": """
from te_core.backends.cuda.gemm_run import Prepared
kept = Prepared.__new__(Prepared)
kept.cache, kept.desc = types.SimpleNamespace(lt=bindings), 1
kept.a_layout = kept.b_layout = kept.out_layout = 1
""",
    "memory of the pool": """
from te_core.backends.cuda.memory import _Block
kept = _Block(bindings, 0, 256, 0)
""",
    "a caller's memory": """
from te_core import libraries, runtime
from te_core.tensor import Device
allocator = runtime.ByteAllocator(Device("cuda", 0), bindings.free, bindings.free)
owner = runtime._ByteOwner(256, 0, allocator._give_back)
owner.others = (1,)
libraries.driver = eval('lambda b: lambda: b', {})(bindings)
kept = owner, runtime
""",
    "another's memory": """
import numpy
from te_core import from_dlpack
kept = from_dlpack(numpy.ones(4)), sys.modules["te_core.dlpack"], sys.modules["ctypes"]
""",
    "a layer": """
import torch, te_torch
from te_core.tape import taped
torch.autograd.set_multithreading_enabled(False)  # or torch's thread may let go of a node after Python has ended
kept = te_torch.TransformerLayer(64, 64, 4, device="cuda", params_dtype=torch.bfloat16), taped
for _ in range(4):
    with te_torch.autocast():
        kept[0](torch.ones(32, 2, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
assert taped.COUNTS.replayed
""",
}


@pytest.mark.parametrize(
    "held", [pytest.param(held, marks=requires_cuda if held == "a layer" else ()) for held in HELD]
)
def test_a_program_that_ends_says_nothing(held: str) -> None:
    """Whatever is alive at its end."""
    program = f"{BINDINGS}{HELD[held]}\nearly.kept, sys.kept = kept, (early, bindings)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stdout + done.stderr
