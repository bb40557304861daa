"""Functions of the scores: those of torch against formulas on any device, those of cuDNN graphs on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_core import dtypes
from te_core.backends.cuda import cudnn
from te_core.errors import ArgumentError
from te_torch.attention import choose
from te_torch.attention import score_mod as functions
from te_torch.attention.dot_product import DotProductAttention
from tests.attention_rounding import assert_rounded_only, exact
from tests.backends import on_devices, requires_cuda
from tests.torch.test_attention_choice import PLAIN, THD, spec
from tests.world import values

B, S, HEADS, GROUPS, D = 2, 24, 4, 2, 16


def attention(**options: Any) -> DotProductAttention:
    kw = {"num_gqa_groups": GROUPS, "qkv_format": "bshd", "attn_mask_type": "no_mask", **options}
    return DotProductAttention(HEADS, D, **kw)


def qkv(device: str, form: str = "bshd", s: int = S, dtype: torch.dtype = torch.float32, width: int = D) -> Any:
    lead = (B, s) if form == "bshd" else (s, B)
    return [
        values(*lead, h, width, device=device, dtype=dtype, seed=i).requires_grad_()
        for i, h in enumerate((HEADS, GROUPS, GROUPS))
    ]


def stepped(module: Any, tensors: Any, *others: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """The output, and the gradients of q, k, v and others."""
    out = module(*tensors, **options)
    dy = values(*out.shape, device=str(out.device), dtype=out.dtype, seed=7)
    return [out.detach(), *torch.autograd.grad(out, (*tensors, *others), dy)]


TABLE = values(HEADS, 2 * 64, seed=5)
CHANGES: dict[str, Any] = {
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf),
    "distance": lambda s, b, h, i, j: s - 0.1 * (i - j).abs() * (h + 1) / (b + 1),
    "soft-cap": lambda s, b, h, i, j: 0.8 * torch.tanh(s / 0.8),
    "table": lambda s, b, h, i, j: s + TABLE.to(s.device)[h, i - j + 64],
    "row - column": lambda s, b, h, i, j: s + i - j,
    "far": lambda s, b, h, i, j: s + 300 + 0.1 * (i - j),
}


@on_devices
@pytest.mark.parametrize("form", ["bshd", "sbhd"])
@pytest.mark.parametrize("name", CHANGES)
def test_equals_the_formula(name: str, form: str, device: str) -> None:
    """A function has float32 scores, and its result goes into the softmax as it is: bf16 knows no fractions above 256.

    So what is wrong in the results is what bf16 makes of P, dS and the results themselves, however large scores are.
    """
    tensors, change = qkv(device, form, 64, torch.bfloat16, 64), CHANGES[name]
    module = DotProductAttention(HEADS, 64, GROUPS, qkv_format=form, attn_mask_type="no_mask")
    assert_rounded_only(stepped(module, tensors, torch_score_mod=change), exact(tensors, change, form, fused=False))


@on_devices
def test_rows_that_see_nothing(device: str) -> None:
    """-inf hides as a mask does: such a row is zeros, with gradients of zero and no NaN."""
    tensors = qkv(device)
    hide = lambda s, b, h, i, j: torch.where((i != 3) & (j != 5), s, -torch.inf)  # noqa: E731
    out, dq, dk, dv = stepped(attention(), tensors, torch_score_mod=hide)
    assert not out[:, 3].any() and not dq[:, 3].any() and not dk[:, 5].any() and not dv[:, 5].any()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv)) and out[:, 4].any()


@on_devices
def test_beside_masks_padding_and_packed_sequences(device: str) -> None:
    """Indices are places in the sequence: behind padding in front of it, and in packed sequences."""
    far = lambda s, b, h, i, j: s - 0.3 * (i - j).abs() + 0.1 * h  # noqa: E731
    tensors = qkv(device)
    lengths = [S, S - 7]
    left = torch.zeros(B, 1, 1, S, dtype=torch.bool, device=device)
    left[1, ..., :7] = True
    got = attention(attn_mask_type="padding")(*tensors, attention_mask=left, torch_score_mod=far)
    cu = torch.tensor([0, S, 2 * S - 7], dtype=torch.int32, device=device)
    packed = [torch.cat([t[0], t[1, 7:]]) for t in tensors]
    thd = attention(qkv_format="thd", attn_mask_type="padding")
    ours = thd(*packed, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=S, max_seqlen_kv=S, torch_score_mod=far)
    for row, n in enumerate(lengths):
        alone = attention()(*(t[row : row + 1, S - n :] for t in tensors), torch_score_mod=far)[0]
        torch.testing.assert_close(got[row, S - n :], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[cu[row] : cu[row + 1]], alone, rtol=1e-5, atol=1e-5)
    absolute = lambda s, b, h, i, j: s + 0.05 * j * (i % 3)  # noqa: E731  # told where tokens stood, not where they went
    bias = (0.05 * torch.arange(S) * (torch.arange(S)[:, None] % 3)).to(device).view(1, 1, S, S)
    got = attention(attn_mask_type="padding")(*tensors, attention_mask=left, torch_score_mod=absolute)
    want = attention(attn_mask_type="padding")(
        *tensors, attention_mask=left, core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@on_devices
def test_what_a_function_holds_is_differentiable(device: str) -> None:
    """A table that is a parameter gets the gradient that the same bias would get; recomputation changes no bit."""
    tensors = qkv(device)
    table = values(HEADS, S, S, device=device, seed=3).requires_grad_()
    add = lambda s, b, h, i, j: s + table[h, i, j]  # noqa: E731
    got = stepped(attention(), tensors, table, torch_score_mod=add)
    want = stepped(
        attention(), tensors, table, core_attention_bias_type="post_scale_bias", core_attention_bias=table[None]
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    again = stepped(attention(), tensors, table, torch_score_mod=add, checkpoint_core_attention=True)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_scores_held_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float16 scores are held divided by layer_number, a function sees them as they are."""
    tensors = qkv("cpu", dtype=torch.float16)
    want = attention(layer_number=3)(*tensors, torch_score_mod=CHANGES["soft-cap"])
    monkeypatch.setenv("NVTE_APPLY_QK_LAYER_SCALING", "1")
    got = attention(layer_number=3)(*tensors, torch_score_mod=CHANGES["soft-cap"])
    torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3)


def test_compiled() -> None:
    """Behind a graph break, as every call of UnfusedDotProductAttention."""
    module, tensors = attention(), qkv("cpu")
    compiled = torch.compile(module, backend="eager")
    for name in ("causal", "soft-cap"):
        want = module(*tensors, torch_score_mod=CHANGES[name])
        assert torch.equal(compiled(*tensors, torch_score_mod=CHANGES[name]), want)


# ------------------------------------------------------------------------------------------------ what is refused


def same(graph: Any, score: Any, tensors: Any) -> Any:
    return score


BARE: dict[str, Any] = {"score_mod": "graph", **spec(right=-1), "mask": "no_mask"}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"device": None}, "needs a GPU"),
        ({"mask": "causal"}, "attn_mask_type='no_mask', not 'causal'"),
        (spec(right=-1, left=3), "a window"),
        ({"dtype": dtypes.float32}, "float16 and bfloat16, not float32"),
        ({"fp8": "delayed"}, "FP8"),
        ({"fp8_output": True}, "FP8"),
        ({"cached": True}, "KV cache"),
        ({"checkpoint": True}, "checkpoint_core_attention"),
        ({"gaps": True}, "pad_between_seqs"),
        ({"num_splits": 2}, "num_splits=2"),
        (spec(right=-1, bias="post_scale_bias"), "a bias and ALiBi"),
        (spec(right=-1, bias="alibi"), "a bias and ALiBi"),
        (spec(right=-1, softmax="learnable"), "softmax_type='learnable'"),
        (spec(right=-1, softcap=1.0), "logit_softcap"),
        (spec(right=-1, dropout=0.5), "dropout"),
        (spec(right=-1, max_logit=True), "return_max_logit"),
        ({"spec": replace(THD["spec"], right=-1)}, "sbhd and bshd"),
    ],
)
def test_the_graph_of_a_score_mod(changes: dict[str, Any], part: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FusedAttention alone builds it, and what else is asked for excludes it."""
    monkeypatch.setattr(choose, "cudnn_attention", lambda *_, **__: (True, ""))
    found = choose.eligible(replace(PLAIN, **{**BARE, **changes}))
    assert all(reason for name, reason in found.items() if name != choose.FUSED), found
    assert found[choose.FUSED] is None if part is None else part in (found[choose.FUSED] or ""), found[choose.FUSED]


# ------------------------------------------------------------------------------------------------- keys of functions


class Keyed:
    def __init__(self, value: Any) -> None:
        self.value = value

    def score_mod_graph_cache_key(self) -> Any:
        return {"value": self.value}

    def __call__(self, graph: Any, score: Any, tensors: Any) -> Any:
        return score

    def method(self, graph: Any, score: Any, tensors: Any) -> Any:
        return score


class Unkeyed:
    def method(self, graph: Any, score: Any, tensors: Any) -> Any:
        return score


def closed_over(value: float) -> Any:
    return lambda graph, score, tensors: (score, value)


def made(default: float) -> Any:
    return lambda graph, score, tensors, d=default: (score, d)


def test_keys_tell_functions_apart() -> None:
    """Equal where the graph is, other where it may be another, none where nobody can say."""
    key = functions.callback_key
    assert key(same) == key(same) is not None and key(same) != key(test_keys_tell_functions_apart)
    lambdas = [lambda g, s, t: s for _ in range(2)]
    assert key(lambdas[0]) == key(lambdas[1]) != key(lambda g, s, t: g)
    assert key(closed_over(1.0)) is None and key(Unkeyed()) is None and key(Unkeyed().method) is None
    assert key(made(1.0)) == key(made(1.0)) != key(made(2.0)) and key(made([])) is None  # type: ignore[arg-type]
    assert key(Keyed(1)) == key(Keyed(1)) != key(Keyed(2)) and key(Keyed(1).method) == key(Keyed(1).method) is not None
    assert key(Keyed([1, {2}])) == key(Keyed([1, {2}])) != key(Keyed((1, {2})))
    assert key(Keyed(1)) != key(Keyed(True)) and key(Keyed(1).method) != key(Keyed(1))
    with pytest.raises(TypeError, match="a tensor"):
        key(Keyed(torch.ones(2)))
    with pytest.raises(TypeError, match="unhashable"):
        key(Keyed(bytearray(b"1")))
    cell = {"__name__": "__main__"}
    exec("def f(graph, score, tensors):\n    return score", cell)
    first = cell["f"]
    exec("def f(graph, score, tensors):\n    return graph", cell)
    assert key(first) != key(cell["f"])


# ------------------------------------------------------------------------------------------------- on a GPU


def types() -> Any:
    return cudnn.frontend().module.data_type


def distance(graph: Any, score: Any) -> Any:
    """Of a key behind its query, in float32."""
    row, column = (
        graph.gen_index(input=score, axis=axis, compute_data_type=types().FLOAT).set_data_type(types().FLOAT)
        for axis in (2, 3)
    )
    return graph.sub(a=column, b=row)


def causal(graph: Any, score: Any, tensors: Any) -> Any:
    """Far less for keys behind the query: numbers of memory go into products, not into selections."""
    return graph.add(a=score, b=graph.mul(a=graph.relu(input=distance(graph, score)), b=tensors["hidden"]))


def unchanged(graph: Any, grad: Any, tensors: Any) -> Any:
    return grad


def row_minus_column(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.sub(a=score, b=distance(graph, score))


def with_bias(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.add(a=score, b=tensors["bias"])


class SoftCap:
    """cap tanh(s / cap); its backward reads what forward computed in the same graph."""

    score_mod_graph_cache_key = "soft-cap"

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.before = graph.mul(a=score, b=tensors["uncap"])
        return graph.mul(a=graph.tanh(input=self.before), b=tensors["cap"])

    def backward(self, graph: Any, grad: Any, tensors: Any) -> Any:
        # The cap and its inverse cancel.
        before, self.before = self.before, None
        return graph.tanh_backward(loss=grad, input=before)


def number(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1, 1), value)


def graph_cases() -> dict[str, tuple[dict[str, Any], Any]]:
    cap = SoftCap()
    return {
        "causal": (
            {"score_mod": causal, "score_mod_bprop": unchanged, "score_mod_tensors": {"hidden": number(-1e30)}},
            CHANGES["causal"],
        ),
        "row - column": ({"score_mod": row_minus_column, "score_mod_bprop": unchanged}, CHANGES["row - column"]),
        "soft-cap": (
            {
                "score_mod": cap.forward,
                "score_mod_bprop": cap.backward,
                "score_mod_tensors": {"cap": number(0.8), "uncap": number(1 / 0.8)},
            },
            CHANGES["soft-cap"],
        ),
    }


@requires_cuda
@pytest.mark.parametrize("form", ["bshd", "sbhd"])
@pytest.mark.parametrize("name", ["causal", "row - column", "soft-cap"])
def test_graphs_equal_torch(name: str, form: str) -> None:
    """cuDNN with a user's functions in its graph beside the same function on torch, and beside the fused options."""
    options, change = graph_cases()[name]
    tensors = qkv("cuda", form, 256, torch.bfloat16, 64)
    module = DotProductAttention(HEADS, 64, GROUPS, qkv_format=form, attn_mask_type="no_mask")
    assert module.explain(*tensors, **options).backend == "FusedAttention"
    expected = exact(tensors, change, form, fused=True)
    assert_rounded_only(stepped(module, tensors, **options), expected)
    of_torch = stepped(module, tensors, torch_score_mod=change)
    assert_rounded_only(of_torch, exact(tensors, change, form, fused=False))
    own = {"causal": {"attn_mask_type": "causal"}, "soft-cap": {"logit_softcap": 0.8}}.get(name)
    if own is not None:
        fused = DotProductAttention(HEADS, 64, GROUPS, **{"qkv_format": form, "attn_mask_type": "no_mask", **own})
        assert_rounded_only(stepped(fused, tensors), expected)


@requires_cuda
def test_tensors_of_a_graph() -> None:
    """A bias on the device, read anew in each call, through one graph; in inference too; closures make one each."""
    module = DotProductAttention(HEADS, 64, GROUPS, qkv_format="bshd", attn_mask_type="no_mask")
    tensors = qkv("cuda", "bshd", 256, torch.bfloat16, 64)
    before = 0
    for seed in range(3):
        bias = values(1, HEADS, 256, 256, device="cuda", seed=seed)
        options = {"score_mod": with_bias, "score_mod_bprop": unchanged, "score_mod_tensors": {"bias": bias}}
        want = stepped(module, tensors, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
        if seed:
            before = cudnn.COUNTS.built
        for a, b in zip(stepped(module, tensors, **options), want, strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
        assert not seed or cudnn.COUNTS.built == before
        with torch.no_grad():
            torch.testing.assert_close(module(*tensors, **options), want[0], rtol=5e-2, atol=5e-2)
    held = cudnn.COUNTS.built
    for _ in range(2):
        closure = lambda graph, score, tensors: (bias, score)[1]  # noqa: E731
        module(*(t.detach() for t in tensors), score_mod=closure)
    assert cudnn.COUNTS.built == held + 2


@requires_cuda
def test_numbers_of_the_host_are_read_in_each_call() -> None:
    """Their values are no part of the graph's key."""
    module = DotProductAttention(HEADS, 64, GROUPS, qkv_format="bshd", attn_mask_type="no_mask")
    tensors = [t.detach() for t in qkv("cuda", "bshd", 256, torch.bfloat16, 64)]
    cap = SoftCap()
    for value in (0.8, 2.0):
        given = {"cap": number(value), "uncap": number(1 / value).double()}
        got = module(*tensors, score_mod=cap.forward, score_mod_tensors=given)
        fused = DotProductAttention(HEADS, 64, GROUPS, qkv_format="bshd", attn_mask_type="no_mask", logit_softcap=value)
        torch.testing.assert_close(got, fused(*tensors), rtol=7e-2, atol=7e-2)


@requires_cuda
def test_captures_and_other_mistakes() -> None:
    module = DotProductAttention(HEADS, 64, GROUPS, qkv_format="bshd", attn_mask_type="no_mask")
    tensors = [t.detach() for t in qkv("cuda", "bshd", 256, torch.bfloat16, 64)]
    module(*tensors, score_mod=row_minus_column)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="capture of a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(*tensors, score_mod=row_minus_column)
    with pytest.raises(ArgumentError, match="'bias' of score_mod on cpu"):
        module(*tensors, score_mod=with_bias, score_mod_tensors={"bias": torch.ones(1, 1, 256, 256)})
    with pytest.raises(ValueError, match="float16 and bfloat16, not float32"):
        module(*(t.float() for t in tensors), score_mod=same)
