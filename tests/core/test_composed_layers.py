"""Whole layers: bit for bit what their parts give one after another, as one recording, in no more memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from inspect import unwrap
from typing import Any

import numpy as np
import pytest

from te_core.dtypes import DType
from te_core.layers import graph
from te_core.layers.communicator import InProcessRanks
from te_core.layers.linear import Sink
from te_core.runtime import Runtime
from te_core.tape.taped import Taped
from te_core.tensor import META, Tensor
from tests.core.composed_cases import Apart, Layer, Maker, Wants, in_order, weights_of
from tests.core.fake_cuda import Make
from tests.core.tape_proof import leaves, proved
from tests.core.test_layer_memory import Counting
from tests.recordings import tapes

ATTENTION = Layer(alone=True)
DROPPED = (("right", 0), ("dropout", 0.2))
CASES: dict[str, Layer] = {
    "attention": ATTENTION,
    "attention, no norm": Layer(alone=True, normed=False, bias=False, form="bshd"),
    "attention, norm returned": Layer(alone=True, late=True, kind="RMSNorm", interleaved=False, groups=4),
    "attention, delayed": Layer("delayed", alone=True, sink="fp32+"),
    "attention, mxfp8, groups apart": Layer("mxfp8", alone=True, interleaved=False, core=DROPPED),
    "attention, copied apart": Layer(alone=True, form="bshd", recompute=True),
    "attention, packed": Layer(alone=True, form="thd", core=(("padded", True), ("max_q", 16), ("max_kv", 16))),
    "attention, terms": Layer(alone=True, core=(("bias", "post_scale_bias"), ("softmax", "learnable"))),
    "layer": Layer(core=DROPPED),
    "layer, no dropout": Layer(p=0.0, kind="RMSNorm", activation="swiglu", bias=False, groups=4),
    "layer, delayed": Layer("delayed", activation="swiglu", sink="bf16+", again=True),
    "layer, delayed, ready": Layer("delayed", p=0.0, ready=True),
    "layer, current": Layer("current", activation="srelu", sink="fp32"),
    "layer, current, plain backward": Layer("current plain backward", kind="RMSNorm"),
    "layer, block": Layer("block", activation="geglu"),
    "layer, mxfp8": Layer("mxfp8", ready=True, again=True),
    "layer, nvfp4": Layer("nvfp4", kind="RMSNorm", activation="relu"),
    "layer, weights held quantized": Layer("delayed", held="both", sink="fp32+"),
    "decoder, weights held in rows": Layer("mxfp8", held="rows", cross=True),
    "layer, late": Layer("current", late=True),
    "layer, output norm": Layer(output=True),
    "layer, output norm, no dropout": Layer("delayed", output=True, p=0.0),
    "layer, beside": Layer("delayed", beside=True),
    "layer, nothing kept": Layer("block", release=False),
    "layer, x left out": Layer("delayed", wants=Wants(x=False, norms=False)),
    "layer, attention frozen": Layer(wants=Wants(x=False, norms=False, qkv=False, biases=False, added=False)),
    "layer, all behind frozen": Layer("current", wants=Wants(*[False] * 4, True, *[False] * 3)),
    "layer, added biases alone": Layer(wants=Wants(False, False, False, False, False, False, False)),
    "decoder, added biases alone": Layer(cross=True, wants=Wants(False, False, False, False, False, False, False)),
    "layer, frozen but for the last norm": Layer(output=True, wants=Wants(*[False] * 8)),
    "layer, weights frozen": Layer("mxfp8", wants=Wants(qkv=False, proj=False, mlp=False)),
    "turned": Layer(turned=True, d=16, form="bshd"),
    "turned, delayed, apart": Layer("delayed", turned=True, interleaved=False),
    "fp8 attention": Layer("delayed", fp8="dpa", groups=4),
    "fp8 attention, current": Layer("current", fp8="dpa", interleaved=False),
    "fp8 between": Layer("delayed", fp8="mha", interleaved=False),
    "fp8 between, copied apart": Layer("delayed", fp8="mha", form="bshd"),
    "fp8 between, turned": Layer("delayed", fp8="mha", turned=True),
    "decoder": Layer(cross=True, core=DROPPED),
    "decoder, delayed": Layer("delayed", cross=True, interleaved=False, sink="fp32+"),
    "decoder, late, turned": Layer("current", cross=True, late=True, turned=True),
    "decoder, fp8 between": Layer("delayed", cross=True, fp8="mha", form="bshd", interleaved=False),
    "decoder, encoded left out": Layer(cross=True, p=0.0, wants=Wants(encoded=False, qkv=False, biases=False)),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
FORWARD, BACKWARD = "composed forward", "composed backward"


Bits = dict[str, bytes]


def bits(value: Any) -> Bits:
    """The bytes of the tensors in a value, by path. All are numbers."""
    found = {path: t.numpy() for path, t in leaves(value) if isinstance(t, Tensor)}
    assert not [
        path for path, t in found.items() if t.dtype != np.uint8 and not np.isfinite(t.astype(np.float32)).all()
    ]
    return {path: t.tobytes() for path, t in found.items()}


def maxima(states: Any) -> Bits:
    """What the states of the parts have seen."""
    return {k: v for k, v in bits(states).items() if "amax" in k}


def functions(case: Layer) -> tuple[Taped, Taped]:
    """The layer's, as an adapter calls them."""
    spec = case.spec().graph()
    return Taped(FORWARD, unwrap(graph.forward), spec), Taped(BACKWARD, unwrap(graph.backward), spec)


def by_name(case: Layer, grads: Any) -> dict[str, Any]:
    """The gradients of the inputs that have one."""
    return {name: t for name, t in zip(case.spec().graph().inputs, grads, strict=True) if t is not None}


def composed(rt: Runtime, case: Layer, run: tuple[Taped, Taped], comm: Any = None) -> tuple[Bits, ...]:
    """(outputs, gradients by name, maxima, what went into sinks) of the layer as one."""
    begins = case(rt, comm)
    call = begins.forward
    outputs, saved = run[0](rt, *call.args, **call.options)
    assert begins.backward is not None
    back = begins.backward(outputs, saved)
    grads = run[1](rt, *back.args, **back.options)
    gone = [path for path, t in leaves((call.args, call.options, outputs)) if isinstance(t, Tensor) and t.owner is None]
    assert not gone, "let go of, and the caller's own"
    return bits(outputs), bits(by_name(case, grads)), maxima(call.options["scales"]), bits(back.options["sinks"])


def apart(rt: Runtime, case: Layer, comm: Any = None) -> tuple[Bits, ...]:
    """The same of the parts one after another."""
    make, spec = Maker(rt), case.spec().graph()
    given = case.given(make, spec)
    sinks = case.sinks(make, given[0])
    parts = Apart(rt, case, given, comm)
    outputs = parts.forward()
    found = parts.backward([make(*t.shape) for t in outputs], sinks)
    return bits(tuple(outputs)), bits(found), maxima(given[1]), bits(in_order(spec, sinks))


def same(wanted: tuple[Bits, ...], found: tuple[Bits, ...]) -> None:
    """The same names, and the same bits."""
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys() and not [name for name in one if one[name] != other[name]]


@each
def test_a_layer_is_its_parts_one_after_another(case: Layer) -> None:
    """Outputs, gradients, maxima and what went into sinks; interpreted, recorded and replayed, as one tape each way."""
    rt, run = Runtime.cpu(), functions(case)
    wanted = apart(rt, case)
    with tapes("never"):
        found = composed(rt, case, run)
    same(wanted, found)
    with tapes("first") as counts:
        for _ in range(2):
            assert composed(rt, case, run) == found
    assert (counts.recorded, counts.replayed) == (2, 4), counts


class Shapes:
    """An allocator without memory."""

    device = META

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """A shape."""
        return Tensor(0, tuple(shape), dtype, META, self)


@pytest.mark.parametrize("name", ["layer, nvfp4", "decoder, fp8 between", "turned, delayed, apart", "attention, terms"])
def test_shapes_alone(name: str) -> None:
    """What a compiler is told of a layer is what it gives."""
    case, found = CASES[name], []
    for rt in (Runtime.cpu(), Runtime.meta(Shapes())):
        begins = case(rt)
        call = begins.forward
        outputs, saved = call.function(rt, *call.args, spec=call.spec, **call.options)
        assert begins.backward is not None
        back = begins.backward(outputs, saved)
        grads = by_name(case, back.function(rt, *back.args, spec=back.spec, **back.options))
        found.append({path: (t.shape, t.dtype) for path, t in leaves((outputs, grads)) if isinstance(t, Tensor)})
    assert found[0] == found[1]


class Burning(Counting):
    """An allocator that spoils what is let go of, and keeps it: who reads it later reads no numbers."""

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """Memory that is worth something until its owner goes."""
        t = super().empty(shape, dtype, stream)
        weakref.finalize(t.owner, t.owner.bytes.fill, 0xFF)
        return t


@pytest.mark.parametrize("name", ["attention, packed", "layer, delayed, ready", "decoder, fp8 between", "layer, late"])
def test_nothing_is_let_go_of_that_is_read(name: str) -> None:
    """Not even with what reads it without asking for its owner."""
    case, rt = CASES[name], Runtime.cpu(Burning())
    wanted = apart(Runtime.cpu(), case)
    for setting in ("never", "first"):
        with tapes(setting):
            same(wanted, composed(rt, case, functions(case)))


@pytest.mark.parametrize("name", ["layer, current, plain backward", "layer, delayed, ready", "layer, mxfp8", "decoder"])
def test_weight_gradients_that_are_computed_later(name: str) -> None:
    """What they read is not let go of by then; they are the same, and nothing of such a call is recorded."""
    case, rt = CASES[name], Runtime.cpu(Burning())
    wanted = apart(Runtime.cpu(), case)[1]
    begins = case(rt)
    spec = begins.forward.spec
    queues: dict[str, list[Any]] = {name: [] for name in weights_of(spec.inputs)}
    with tapes("first") as counts:
        outputs, saved = graph.forward(rt, *begins.forward.args, spec=spec, **begins.forward.options)
        assert begins.backward is not None
        back = begins.backward(outputs, saved)
        sinks = in_order(spec, {name: Sink(queue=queue) for name, queue in queues.items()})
        found = functions(case)[1](rt, *back.args, **{**back.options, "sinks": sinks})
    del outputs, saved, back
    assert not counts.recorded
    made = {name: made for name, queue in queues.items() for run in queue if (made := run(rt)) is not None}
    same((wanted,), (bits({**by_name(case, found), **made}),))


# ------------------------------------------------------------------------------------------------------ over ranks

SPREAD: dict[str, Layer] = {
    "layer": Layer("current", ranks=2, activation="swiglu"),
    "layer, sequence": Layer("delayed", ranks=2, sequence=True),
    "attention, sequence": Layer(alone=True, ranks=2, sequence=True, form="bshd", late=True),
    "decoder, sequence": Layer("mxfp8", ranks=2, sequence=True, cross=True, tokens=32),
    "fp8 between, sequence": Layer("delayed", ranks=2, sequence=True, fp8="mha", interleaved=False),
}


@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD.keys())
def test_weights_over_ranks(case: Layer) -> None:
    """Each rank has its heads, and with sequence parallelism its tokens; one communicator serves all parts."""
    rt, run = Runtime.cpu(), functions(case)
    with tapes("never"):
        wanted = InProcessRanks(2).run(lambda comm: apart(rt, case, comm))
        found = InProcessRanks(2).run(lambda comm: composed(rt, case, run, comm))
    for one, other in zip(wanted, found, strict=True):
        same(one, other)
    with tapes("first") as counts:
        again = InProcessRanks(2).run(lambda comm: [composed(rt, case, run, comm) for _ in range(3)])
    assert counts.replayed and "the recording failed" not in str(counts)
    for one, several in zip(wanted, again, strict=True):
        for other in several:
            same(one, other)


# -------------------------------------------------------------------------------------------- on a GPU, without one


#: What cuDNN's attention in FP8 takes.
WIDE: dict[str, Any] = {"heads": 2, "groups": 2, "d": 128, "tokens": 128}
ON_CUDA: dict[str, Layer] = {
    "attention": Layer("current", alone=True, d=64, tokens=128, normed=False),
    "attention, packed": Layer(
        alone=True, d=64, tokens=128, form="thd", core=(("padded", True), ("max_q", 128), ("max_kv", 128))
    ),
    "layer": Layer("delayed", d=64, tokens=128, activation="swiglu", sink="fp32+", core=DROPPED),
    "layer, kept": Layer("mxfp8", d=64, tokens=128, ready=True, release=False),
    "layer, nvfp4": Layer("nvfp4", d=64, tokens=128, kind="RMSNorm", output=True, p=0.0),
    "layer, late": Layer("block", d=64, tokens=128, late=True, interleaved=False),
    "beside": Layer(d=64, tokens=128, beside=True),
    "fp8 between": Layer("delayed", fp8="mha", **WIDE),
    "decoder, turned": Layer("current", cross=True, turned=True, d=64, tokens=128),
}


@pytest.mark.parametrize("case", ON_CUDA.values(), ids=ON_CUDA.keys())
def test_a_replay_launches_what_the_layer_does(make: Make, case: Layer) -> None:
    """On the memory that it has; nothing of either is held behind it."""
    proved(make(), case)


# ------------------------------------------------------------------------------------------------------ refusals


# ------------------------------------------------------------------------------------------------------ memory


def peaks(case: Layer, way: str) -> tuple[int, int]:
    """The most bytes alive in a forward and in its backward, above those before the forward; of the third round, for
    the first ones make scratch memory, plans and tapes."""
    account = Counting()
    rt, spec, run, found = Runtime.cpu(account), case.spec().graph(), functions(case), (0, 0)
    for _ in range(3):
        make = Maker(rt)
        given = case.given(make, spec)
        before = account.peak = account.alive
        if way == "apart":
            parts = Apart(rt, case, given)
            outputs: Any = parts.forward()
            forward, grads = account.peak - before, [make(*t.shape) for t in outputs]
            del outputs
            account.peak = account.alive
            parts.backward([*grads], case.sinks(make, given[0]))
        else:
            values, states, copies = given
            outputs, saved = run[0](rt, *values.values(), scales=states, ready=in_order(spec, copies))
            forward, grads = account.peak - before, [make(*t.shape) for t in outputs]
            del outputs
            account.peak = account.alive
            sinks = in_order(spec, case.sinks(make, values))
            run[1](rt, *grads, saved, scales=states, sinks=sinks, release=True)
            del saved, values, states, copies
        found = forward, account.peak - before
        del given, grads
        parts = None  # type: ignore[assignment]
    return found


LARGE: dict[str, Any] = {"tokens": 128, "hidden": 128, "inner": 256, "heads": 8, "groups": 8}
MEMORY = {
    "attention": replace(ATTENTION, **LARGE),
    "layer": Layer(**LARGE),
    "layer, most in attention": Layer(**{**LARGE, "inner": 16, "d": 32}),
    "layer, all kept": Layer(kind="RMSNorm", activation="swiglu", p=0.0, **LARGE),
    "layer, delayed": Layer("delayed", **LARGE),
    "layer, mxfp8": Layer("mxfp8", output=True, **LARGE),
    "layer, late": Layer("current", late=True, again=True, **LARGE),
    "turned": Layer("current", turned=True, **LARGE),
    "fp8 between": Layer("delayed", fp8="mha", **LARGE),
    "decoder": Layer("delayed", cross=True, **LARGE),
}


@pytest.mark.parametrize("way", ["interpreted", "replayed"])
@pytest.mark.parametrize("case", MEMORY.values(), ids=MEMORY.keys())
def test_the_peak_is_that_of_the_parts(case: Layer, way: str) -> None:
    """What a part saved goes as its backward has read it, and what is handed on as soon as it was."""
    with tapes("never"):
        wanted = peaks(case, "apart")
    with tapes("never" if way == "interpreted" else "first"):
        found = peaks(case, way)
    assert found[0] <= wanted[0] and found[1] <= wanted[1], (found, wanted)
