"""What attention refuses, and in which words; mask types and slopes by their names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.attention import AttentionSpec, Lengths, alibi_slopes, canonical_mask, diagonal_is_bottom_right, with_mask
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops.attention import attention_backward, attention_forward
from te_core.ops.attention_terms import Terms
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core import attention_cases as cases
from tests.core.attention_cases import HEADS, Case, Made

PLAIN = Case()


def wrong(case: Case = PLAIN, **changes: Any) -> Any:
    """A call of forward with some arguments replaced: by values, or by functions of (rt, made)."""

    def call(rt: Runtime) -> Any:
        made = cases.make(rt, case)
        given = {n: f(rt, made) if callable(f) else f for n, f in changes.items()}
        q, k, v = (given.pop(n, t) for n, t in zip("qkv", made.tensors, strict=True))
        of_terms = [n for n in given if n in Terms._fields and not isinstance(given[n], str)]  # spec.bias is a word
        terms = made.terms._replace(**{n: given.pop(n) for n in of_terms})
        spec = replace(made.spec, **given)
        return attention_forward(rt, q, k, v, spec=spec, terms=terms)

    return call


def as_type(name: str, dtype: Any) -> Any:
    return lambda rt, made: rt.tensor(getattr(made, name).astype(dtype))


def turned(rt: Runtime, made: Made) -> Tensor:
    q = made.tensors[0]
    b, s, h, d = q.shape
    return Tensor(q.ptr, (b, s, d, h), q.dtype, q.device, q, (s * h * d, h * d, 1, d))


PADDED = Case(mask="padding", lengths="cross")
MASKED = Case(mask="arbitrary", lengths="cross")
BIASED = Case(bias="1hss", lengths="cross")
SLOPED = Case(bias="alibi_h")
SINK = Case(softmax="learnable")


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return lambda rt, made: rt.tensor(np.zeros(shape, dtype))


def lengths(rt: Runtime, made: Made, *, count: int = 4, dtype: Any = np.int32) -> Lengths:
    return Lengths(*(rt.tensor(np.arange(count).astype(dtype)) for _ in range(2)))


BF16 = cases.NUMPY["bf16"]
WRONG = {
    "q_format": (wrong(q_format="hdbs"), "q_format"),
    "kv_format": (wrong(kv_format="paged"), "kv_format"),
    "softmax": (wrong(softmax="base2"), "softmax"),
    "pre_scale_bias": (wrong(bias="pre_scale_bias"), "bias"),
    "dropout 1.5": (wrong(dropout=1.5, rng=zeros(2, dtype=np.int64)), "dropout <= 1"),
    "negative dropout": (wrong(dropout=-0.1), "dropout <= 1"),
    "negative softcap": (wrong(softcap=-1.0), "softcap"),
    "left": (wrong(left=-2), "window"),
    "right": (wrong(right=-2), "window"),
    "rank of q": (wrong(q=zeros(3, 33, 4, dtype=BF16)), "4 dimensions"),
    "rank in thd": (wrong(Case(layout="thd"), k=zeros(3, 33, 4, 32, dtype=BF16)), "3 dimensions"),
    "last stride": (wrong(q=turned), "last stride"),
    "type of q": (wrong(q=as_type("q", np.float64), k=as_type("k", np.float64), v=as_type("v", np.float64)), "dtype"),
    "type of k": (wrong(k=as_type("k", np.float16)), "one dtype"),
    "type of v": (wrong(v=as_type("v", np.float32)), "one dtype"),
    "no lengths": (wrong(padded=True), "lengths"),
    "lengths not asked for": (wrong(PADDED, padded=False), "lengths"),
    "thd without lengths": (wrong(Case(layout="thd"), lengths=None, padded=False), "lengths"),
    "type of lengths": (wrong(PADDED, lengths=lambda rt, m: lengths(rt, m, dtype=np.int64)), "cu_q"),
    "count of lengths": (wrong(PADDED, lengths=lambda rt, m: lengths(rt, m, count=3)), "one length for each row"),
    "lengths of kv": (
        wrong(PADDED, lengths=lambda rt, m: m.terms.lengths._replace(cu_kv=lengths(rt, m, count=6).cu_kv)),
        "cu_kv",
    ),
    "max_q": (wrong(Case(layout="thd"), max_q=0), "max_q"),
    "max_kv": (wrong(Case(layout="thd"), max_kv=0), "max_kv"),
    "head width of k": (wrong(k=zeros(3, 33, 4, 40, dtype=BF16)), "head width"),
    "rows of v": (wrong(v=zeros(3, 34, 4, 32, dtype=BF16)), "v of k's shape"),
    "groups": (wrong(k=zeros(3, 33, 3, 32, dtype=BF16), v=zeros(3, 33, 3, 32, dtype=BF16)), "num_gqa_groups"),
    "no groups": (wrong(k=zeros(3, 33, 0, 32, dtype=BF16), v=zeros(3, 33, 0, 32, dtype=BF16)), "num_gqa_groups"),
    "batch": (wrong(k=zeros(2, 33, 4, 32, dtype=BF16), v=zeros(2, 33, 4, 32, dtype=BF16)), "batch"),
    "batch of other rows": (
        wrong(Case(layout="thd_bshd"), k=zeros(2, 33, 4, 32, dtype=BF16), v=zeros(2, 33, 4, 32, dtype=BF16)),
        "one batch size",
    ),
    "no width": (wrong(v=zeros(3, 33, 4, 0, dtype=BF16)), "widths from 1 on"),
    "sums of nothing": (wrong(PADDED, lengths=lambda rt, m: lengths(rt, m, count=0)), "begin with 0"),
    "rows of pages": (wrong(PADDED, pages=zeros(2, 1, dtype=np.int32)), "page table"),
    "type of pages": (wrong(PADDED, pages=zeros(3, 1, dtype=np.int64)), "page table"),
    "no mask": (wrong(masked=True), "mask"),
    "mask not asked for": (wrong(MASKED, masked=False), "mask"),
    "shape of mask": (wrong(MASKED, mask=zeros(3, 2, 21, 37, dtype=np.uint8)), "mask"),
    "type of mask": (wrong(MASKED, mask=zeros(3, 1, 21, 37)), "mask"),
    "no bias": (wrong(bias="post_scale_bias"), "bias"),
    "bias not asked for": (wrong(BIASED, bias="no_bias"), "bias"),
    "shape of bias": (wrong(BIASED, bias=zeros(1, 4, 21, 1, dtype=BF16)), "bias"),
    "rank of bias": (wrong(BIASED, bias=zeros(21, 37, dtype=BF16)), "bias"),
    "type of bias": (wrong(BIASED, bias=zeros(1, 4, 21, 37)), "bias"),
    "no slopes": (wrong(bias="alibi"), "slopes"),
    "shape of slopes": (wrong(SLOPED, slopes=zeros(3)), "slopes"),
    "type of slopes": (wrong(SLOPED, slopes=zeros(4, dtype=BF16)), "slopes"),
    "no sink": (wrong(softmax="learnable"), "sink"),
    "sink not asked for": (wrong(SINK, softmax="off-by-one"), "sink"),
    "shape of sink": (wrong(SINK, sink=zeros(2)), "sink"),
    "type of sink": (wrong(SINK, sink=zeros(4, dtype=BF16)), "sink"),
    "no rng": (wrong(dropout=0.5), "rng"),
    "rng not asked for": (wrong(rng=zeros(2, dtype=np.int64)), "rng"),
    "type of rng": (wrong(dropout=0.5, rng=zeros(2, dtype=np.int32)), "rng"),
    "size of rng": (wrong(dropout=0.5, rng=zeros(3, dtype=np.int64)), "rng"),
}


def assert_four_parts(error: Any, operation: str, text: str) -> None:
    assert error.operation == operation and all((error.got, error.allowed, error.do))
    assert str(error) == f"{operation}: got {error.got}. Allowed: {error.allowed}. To do: {error.do}."
    assert text in str(error)


def assert_refused(rt, name):
    call, text = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        call(rt)
    assert_four_parts(caught.value, "attention_forward", text)


def test_wrong_arguments(rt):
    """Refused with what came in, what is allowed and what to do."""
    for name in WRONG:
        assert_refused(rt, name)


def test_a_plan_hides_no_wrong_argument(rt):
    """Refused as well where the right call has made a plan of the same shapes before."""
    for case in (Case(), PADDED, MASKED, BIASED, SLOPED, SINK):
        made = cases.make(rt, case)
        if cases.refusal(rt, case) is None:
            attention_forward(rt, *made.tensors, spec=made.spec, terms=made.terms)
    made = cases.make(rt, Case(), p=0.5)
    attention_forward(rt, *made.tensors, spec=made.spec, terms=made.terms)
    for name in WRONG:
        if name.startswith(("type of", "no rng", "count of", "lengths of")):
            assert_refused(rt, name)


def spaced(t: Tensor) -> Tensor:
    """Of the tensor's shape and dtype, with every second element."""
    return Tensor(t.ptr, t.shape, t.dtype, t.device, t, tuple(2 * n for n in t.row_major_strides()))


@pytest.mark.parametrize(
    ("case", "name"),
    [(MASKED, "mask"), (BIASED, "bias"), (SLOPED, "slopes"), (SINK, "sink"), (PADDED, "lengths")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_plan_hides_no_strides(rt, case, name):
    """What was dense when the plan was made is dense at every call."""
    made = cases.make(rt, case)
    if cases.refusal(rt, case) is None:
        attention_forward(rt, *made.tensors, spec=made.spec, terms=made.terms)
    given = getattr(made.terms, name)
    wide = given._replace(cu_q=spaced(given.cu_q)) if isinstance(given, Lengths) else spaced(given)
    with pytest.raises(ArgumentError, match="dense"):
        attention_forward(rt, *made.tensors, spec=made.spec, terms=made.terms._replace(**{name: wide}))


def test_a_plan_hides_no_wrong_results(rt):
    """Gradients to be written, statistics and outputs are looked at where a plan of their kind is there, too."""
    made = cases.make(rt, Case())
    q, k, v = made.tensors
    y = attention_forward(rt, q, k, v, spec=made.spec)
    dy = rt.tensor(made.dy)

    def back(stats: Any = y.stats, out: Any = y.out, dy: Any = dy, grads: Any = None) -> Any:
        return attention_backward(rt, dy, q, k, v, out, stats, spec=made.spec, grads=grads)

    def grads(*shape: int, dtype: Any = BF16) -> Any:
        return [rt.tensor(np.zeros(shape, dtype)) for _ in range(3)]

    right = grads(*q.shape)
    back(grads=right)
    for name, wrong_ones in (
        ("dq", grads(2, 33, HEADS, 32)),
        ("dq", grads(*q.shape, dtype=np.float32)),
        ("dv", [*right[:2], spaced(right[2])]),
    ):
        with pytest.raises(ArgumentError) as caught:
            back(grads=wrong_ones)
        assert_four_parts(caught.value, "attention_backward", name)
    for name, given in (("stats", spaced(y.stats)), ("out", spaced(y.out)), ("dy", spaced(dy))):
        with pytest.raises(ArgumentError) as caught:
            back(**{name: given})
        assert_four_parts(caught.value, "attention_backward", name)


def test_tensors_of_another_device_than_the_runtimes():
    """Their addresses would be followed on the device."""
    q = Tensor(64, (2, 8, 4, 16), dtypes.bfloat16, Device("cuda", 5), None)
    with pytest.raises(ArgumentError, match="one device"):
        attention_forward(Runtime.cpu(), q, q, q, spec=AttentionSpec(1.0, "bshd", "bshd"))


@pytest.mark.parametrize(("sums", "begins"), [((0, 3, 9), None), ((0, 3, 5), (0, 4, 8)), ((0, 3, 5), (-1, 3, 5))])
def test_sequences_outside_of_the_tokens(sums, begins):
    """The CPU can look at them."""
    rt = Runtime.cpu()
    q = rt.tensor(np.zeros((5, 4, 32), BF16))
    cu, padded = (None if x is None else rt.tensor(np.array(x, np.int32)) for x in (sums, begins))
    spec = AttentionSpec(1.0, "thd", "thd", padded=True, max_q=8, max_kv=8)
    with pytest.raises(ArgumentError, match="among the 5 tokens"):
        attention_forward(rt, q, q, q, spec=spec, terms=Terms(Lengths(cu, cu, padded, padded)))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_lengths_that_do_not_fit(layout):
    """The CPU can look at them."""
    rt = Runtime.cpu()
    for case, values in ((Case(layout=layout, mask="padding"), (0, 34, 34, 34)), (PADDED, (0, 9, 5, 9))):
        made = cases.make(rt, case)
        sums = rt.tensor(np.array(values, np.int32))
        with pytest.raises(ArgumentError, match="lengths from 0 to"):
            attention_forward(rt, *made.tensors, spec=made.spec, terms=made.terms._replace(lengths=Lengths(sums, sums)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dy": zeros(3, 33, 4, 40, dtype=BF16)}, "dy"),
        ({"dy": zeros(3, 33, 4, 32)}, "dy"),
        ({"dy": turned}, "dy"),
        ({"out": zeros(3, 4, 33, 32, dtype=BF16)}, "out"),
        ({"out": zeros(3, 33, 4, 32, dtype=np.float16)}, "out"),
    ],
    ids=["longer dy", "dy in float32", "turned dy", "another format's out", "out in float16"],
)
def test_wrong_arguments_of_backward(rt, changes, text):
    made = cases.make(rt, Case())
    y = attention_forward(rt, *made.tensors, spec=made.spec)
    given = {"dy": rt.tensor(made.dy), "out": y.out} | {n: f(rt, made) for n, f in changes.items()}
    with pytest.raises(ArgumentError) as caught:
        attention_backward(rt, given["dy"], *made.tensors, given["out"], y.stats, spec=made.spec)
    assert_four_parts(caught.value, "attention_backward", text)


def test_a_paged_cache_is_for_inference(rt):
    """No backward through it, and no largest logits of it."""
    c = Case(mask="padding", lengths="cross")
    made = cases.make(rt, c)
    q = made.tensors[0]
    blocks = rt.tensor(np.zeros((9, 16, HEADS, 32), BF16))
    terms = made.terms._replace(pages=rt.tensor(np.arange(9, dtype=np.int32).reshape(3, 3)))
    with pytest.raises(UnsupportedError) as caught:
        attention_forward(rt, q, blocks, blocks, spec=replace(made.spec, max_logit=True), terms=terms)
    assert_four_parts(caught.value, "attention_forward", "paged")
    stats = rt.zeros((3, HEADS, 21), dtypes.float32)
    with pytest.raises(ArgumentError) as caught:
        attention_backward(rt, q, q, blocks, blocks, q, stats, spec=made.spec, terms=terms)
    assert_four_parts(caught.value, "attention_backward", "paged")


@requires_cuda
def test_one_device():
    """All tensors lie where the runtime is."""
    rt, cpu = cuda_runtime(), Runtime.cpu()
    made = cases.make(rt, PADDED)
    q, k, v = made.tensors
    for call in ((q, k, cpu.tensor(made.v)), (cpu.tensor(made.q), k, v)):
        with pytest.raises(ArgumentError, match="one device"):
            attention_forward(rt, *call, spec=made.spec, terms=made.terms)
    with pytest.raises(ArgumentError, match="one device"):
        attention_forward(rt, q, k, v, spec=made.spec, terms=made.terms._replace(lengths=lengths(cpu, made)))


# ------------------------------------------------------------------------------------------------------ the words


def test_masks_by_their_names():
    """Aliases, the diagonal's corner, and what a type and a window let a query see."""
    assert canonical_mask("t", "padding,causal") == canonical_mask("t", "causal,padding") == "padding_causal"
    with pytest.raises(ArgumentError) as caught:
        canonical_mask("t", "causal,arbitrary")
    assert_four_parts(caught.value, "t", "causal,arbitrary")
    corners = {
        "causal": (False,) * 3,
        "padding_causal": (False,) * 3,
        "causal_bottom_right": (True,) * 3,
        "padding_causal_bottom_right": (True,) * 3,
        "no_mask": (True, False, True),
        "padding": (True, False, True),
        "arbitrary": (True, False, True),
    }
    for mask, wanted in corners.items():
        assert tuple(diagonal_is_bottom_right(mask, given) for given in (None, False, True)) == wanted, mask
    spec = with_mask(AttentionSpec(1.0), "padding_causal", (7, 0), None)
    assert (spec.left, spec.right, spec.bottom_right, spec.padded, spec.masked) == (7, 0, False, True, False)
    spec = with_mask(AttentionSpec(1.0), "arbitrary", (7, 3), False)
    assert (spec.left, spec.right, spec.bottom_right, spec.padded, spec.masked) == (7, 3, False, False, True)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
    ids=str,
)
def test_default_slopes(heads, slopes):
    np.testing.assert_allclose(alibi_slopes(heads), slopes, rtol=1e-12)
