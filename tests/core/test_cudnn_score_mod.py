"""A user's functions in cuDNN graphs, without cuDNN: which tensors they are given, where these lie, what is kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from te_core import dtypes
from te_core.attention import AttentionSpec, ScoreMod
from te_core.backends.cuda import cudnn
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.ops.attention_scored import Kept
from te_core.runtime import Runtime
from tests.core.fake_cudnn import tensor

BF16, F32, I32 = dtypes.bfloat16, dtypes.float32, dtypes.int32
SPEC = AttentionSpec(0.125, "bshd", "bshd")


class Noted:
    """A pair of functions that notes what it is given, graph by graph."""

    def __init__(self, key: Any = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.mod = ScoreMod(self.forward, self.backward, key)

    def forward(self, graph: Any, score: Any, tensors: dict[str, Any]) -> Any:
        self.calls.append(("forward", tensors))
        return graph.add(a=score, b=tensors["bias"]) if "bias" in tensors else score

    def backward(self, graph: Any, grad: Any, tensors: dict[str, Any]) -> Any:
        self.calls.append(("backward", tensors))
        return graph.mul(a=grad, b=tensors["times"]) if "times" in tensors else grad


def qkv(rt, s=256, h=8, g=2):
    return tensor(rt, (2, s, h, 64), BF16), tensor(rt, (2, s, g, 64), BF16), tensor(rt, (2, s, g, 64), BF16)


def step(rt, mod, tensors, others, spec=SPEC):
    q, k, v = qkv(rt)
    out, stats = ops.attention_scored_forward(rt, q, k, v, spec=spec, mod=mod, tensors=tensors)
    dy = tensor(rt, out.shape, BF16)
    grads = ops.attention_scored_backward(
        rt, dy, Kept(q, k, v, out, stats), spec=spec, mod=mod, tensors=(tensors, others)
    )
    return q, k, v, out, stats, dy, grads


def test_functions_get_their_tensors_and_runs_their_addresses(fake):
    """By the names that they know; each at its own address, in forward and in backward."""
    rt, calls = fake
    own = Noted("key")
    bias, number = tensor(rt, (1, 8, 256, 256), F32), tensor(rt, (1, 1, 1, 1), F32)
    times = tensor(rt, (1, 1, 1, 1), BF16)
    q, k, v, out, stats, dy, grads = step(rt, own.mod, {"bias": bias, "n": number}, {"times": times})
    assert [(side, sorted(names)) for side, names in own.calls] == [
        ("forward", ["bias", "n"]), ("forward", ["bias", "n"]), ("backward", ["times"]),
    ]  # fmt: skip
    part = own.calls[0][1]["bias"].known
    assert part["dim"] == [1, 8, 256, 256] and part["stride"] == [8 * 65536, 65536, 256, 1]
    assert part["data_type"] == "FLOAT" and own.calls[2][1]["times"].known["data_type"] == "BFLOAT16"
    assert not part["is_pass_by_value"]
    forward, backward = (run.at for run in calls.runs)
    given = {"forward.bias": bias.ptr, "forward.n": number.ptr}
    both = {"q": q.ptr, "k": k.ptr, "v": v.ptr, "out": out.ptr, "stats": stats.ptr, **given}
    results = dict(zip(("dy", "dq", "dk", "dv"), (dy.ptr, *(t.ptr for t in grads)), strict=True))
    assert forward == both and backward == {**both, **results, "backward.times": times.ptr}
    options = calls.graphs[0].options
    assert options["attn_scale"] == 0.125 and options["generate_stats"] is True and "use_padding_mask" not in options
    assert "score_mod_bprop" in calls.graphs[1].options


def test_a_backward_without_a_function_is_cudnns(fake):
    rt, calls = fake
    step(rt, ScoreMod(lambda graph, score, tensors: score, None, "k"), {}, {})
    assert "score_mod" in calls.graphs[1].options and "score_mod_bprop" not in calls.graphs[1].options


@pytest.mark.parametrize("key", ["key", None])
def test_what_is_kept(fake, key):
    """With a key one graph in memory and none on disk; without one, one for each call."""
    rt, calls = fake

    def forward(mod, s=256, **tensors):
        ops.attention_scored_forward(rt, *qkv(rt, s), spec=SPEC, mod=mod, tensors=tensors)

    for _ in range(3):
        forward(Noted(key).mod)
    assert len(calls.graphs) == (1 if key else 3) and len(rt.device.of(cudnn.Graphs).known) == (1 if key else 0)
    made = len(calls.graphs)
    forward(Noted("other").mod)
    forward(Noted("other").mod, 128)
    forward(Noted("other").mod, bias=tensor(rt, (1, 1, 256, 256), F32))
    forward(Noted("other").mod, bias=tensor(rt, (1, 8, 256, 256), F32))
    forward(Noted("other").mod, n=tensor(rt, (1, 8, 256, 256), F32))
    assert len(calls.graphs) == made + 5 and cudnn.COUNTS.loaded == 0
    graphs = rt.device.of(cudnn.Graphs)
    fresh, again = graphs.known.copy(), len(calls.graphs)
    graphs.known.clear()
    rt.plans.__init__()
    forward(Noted("other").mod)  # as in another process
    assert cudnn.COUNTS.loaded == 0 and len(calls.graphs) == again + 1 and fresh
    assert len(graphs.passing) <= graphs.passing.maxlen


def test_functions_are_let_go_of(fake):
    """A graph that is built holds no function of a user's, nor what that has seen."""
    rt, calls = fake
    own = Noted("key")
    gone = weakref.ref(own)
    ops.attention_scored_forward(rt, *qkv(rt), spec=SPEC, mod=own.mod, tensors={})
    mod = calls.graphs[0].options.pop("score_mod")
    assert mod.__self__._user is None and mod.__self__.spec.score_mod is None
    assert rt.plans._plans and rt.device.of(cudnn.Graphs).known
    del own, mod
    gc.collect()
    assert gone() is None


def test_what_is_refused(fake):
    rt, _ = fake
    q, k, v = qkv(rt)
    own = Noted("key").mod
    with pytest.raises(ArgumentError, match="leave the rest to the functions"):
        ops.attention_scored_forward(rt, q, k, v, spec=replace(SPEC, right=0), mod=own, tensors={})
    with pytest.raises(ArgumentError, match="at most 32"):
        many = {str(i): tensor(rt, (1, 1, 1, 1), F32) for i in range(33)}
        ops.attention_scored_forward(rt, q, k, v, spec=SPEC, mod=own, tensors=many)
    with pytest.raises(ArgumentError, match=r"forward.bias"):
        wrong = {"bias": tensor(rt, (1, 1, 1, 1), dtypes.float8_e4m3)}
        ops.attention_scored_forward(rt, q, k, v, spec=SPEC, mod=own, tensors=wrong)
    with pytest.raises(ArgumentError, match="q of a dtype among"):
        f32 = [tensor(rt, t.shape, F32) for t in (q, k, v)]
        ops.attention_scored_forward(rt, *f32, spec=SPEC, mod=own, tensors={})
    with pytest.raises(UnsupportedError, match="multiples of 8"):
        odd = [tensor(rt, (2, 256, 8, 100), BF16, (256 * 832, 832, 104, 1)) for _ in range(3)]
        ops.attention_scored_forward(rt, *odd, spec=SPEC, mod=own, tensors={})
    with pytest.raises(UnsupportedError, match="some queries and keys"):
        none = [tensor(rt, (0, 256, 8, 64), BF16) for _ in range(3)]
        ops.attention_scored_forward(rt, *none, spec=SPEC, mod=own, tensors={})


def test_the_cpu_names_the_other_form():
    rt = Runtime.cpu()
    q = rt.empty((1, 4, 2, 8), BF16)
    with pytest.raises(UnsupportedError, match="torch_score_mod"):
        ops.attention_scored_forward(rt, q, q, q, spec=SPEC, mod=Noted("k").mod, tensors={})
