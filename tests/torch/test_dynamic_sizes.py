"""Compiled modules at sizes that change: one program for all, whose numbers are those of eager code.

(torch before 2.13 hands a function of constants no symbols; the suite on a GPU runs on such a one.)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling
from tests import recipes

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNorm": lambda: te.LayerNorm(32, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "Linear": lambda: te.Linear(32, 48, device="cpu"),
    "GroupedLinear": lambda: te.GroupedLinear(2, 32, 48, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 48, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    #: Its backward begins with the weight gradient that is smaller than what is then let go of.
    "LayerNormMLP again": lambda: te.LayerNormMLP(32, 64, checkpoint=True, device="cpu"),
    "MultiheadAttention": lambda: te.MultiheadAttention(32, 2, attention_dropout=0.0, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
}
#: (tokens, sequences). A compiler takes sizes that are equal in its first call for one: all of the first are different.
SIZES = ((96, 3), (128, 5), (64, 2), (32, 40), (160, 4))
UNFUSED = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}
full, more = pytest.mark.full, pytest.mark.more


class Programs:
    """A compiler's backend that knows which of its programs have run."""

    def __init__(self) -> None:
        self.made = itertools.count()
        self.ran: set[int] = set()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        number, run = next(self.made), torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def noted(*args: Any) -> Any:
            self.ran.add(number)
            return run(*args)

        return noted


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(call: Any, tensors: list[torch.Tensor], *others: Any, **options: Any) -> list[torch.Tensor | None]:
    """The output, and the gradients of tensors and parameters."""
    parameters = list(call.parameters())
    for t in (*tensors, *parameters):
        t.grad = None
    torch.manual_seed(7)  # dropout draws alike
    y = call(*tensors, *others, **options)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return [y.detach(), *[t.grad for t in tensors], *[p.grad for p in parameters]]


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


def check(module: torch.nn.Module, calls: Any, recipe: Any = None, dynamic: bool | None = True) -> int:
    """How many programs have run for calls of (tensors, others, options) that gave what eager code gives."""
    programs = Programs()
    compiled: Any = torch.compile(copy.deepcopy(module), backend=programs, dynamic=dynamic, fullgraph=True)
    for tensors, others, options in calls:
        found = []
        for call in (module, compiled):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                found.append(step(call, tensors, *others, **options))
        assert all(map(same, *found)), tensors[0].shape
    assert next(programs.made) <= 2 * len(programs.ran)  # torch begins anew once, where it meets a number that is fixed
    return len(programs.ran)


OFTEN = [
    ("LayerNorm", None, True),
    ("LayerNormMLP", "mxfp8", True),
    ("LayerNormMLP again", None, True),
    ("GroupedLinear", "current", True),
    ("MultiheadAttention", None, None),
    ("TransformerLayer", "delayed", True),
]
KINDS = (None, "delayed", "current", "mxfp8", "block", "nvfp4 nearest")
#: What `make test-more` runs of these: a norm multiplies nothing, so that all recipes but none are one to it.
KINDS_OF = {kind: KINDS[:2] if kind.endswith("Norm") else [k for k in KINDS if k != "block"] for kind in MODULES}


@pytest.mark.parametrize(
    ("kind", "recipe", "dynamic"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else [more if case[2] and case[1] in KINDS_OF[case[0]] else full])
        for case in itertools.product(MODULES, KINDS, (True, None))
    ],
)
def test_modules(kind: str, recipe: str | None, dynamic: bool | None) -> None:
    """One program for all lengths and batches; where a compiler finds out itself what varies, one after the first."""
    torch.manual_seed(0)
    calls: list[Any] = []
    for tokens, batch in SIZES:
        x, others = torch.randn(tokens, batch, 32, requires_grad=True), []
        if kind == "GroupedLinear":
            x, others = x.detach().flatten(0, 1).requires_grad_(), [[tokens, tokens * (batch - 1)]]
        calls.append(([x], others, {}))
    count = check(MODULES[kind](), calls, recipe and recipes.RECIPES[recipe], dynamic)
    assert count == 1 if dynamic else count <= 2


# ------------------------------------------------------------------------------------------------------ attention

HEADS, WIDTH = 6, 16


def padding(tokens: int, batch: int) -> torch.Tensor:
    """A mask whose sequences differ in length."""
    lengths = 1 + torch.arange(batch) % tokens
    return (torch.arange(tokens) >= tokens - lengths[:, None] // 2)[:, None, None, :]


def above(tokens: int, batch: int) -> torch.Tensor:
    return torch.ones(batch, 1, tokens, tokens, dtype=torch.bool).triu(1)


Options = Callable[[int, int, int], dict[str, Any]]
#: Constructor's arguments; keys' heads; whether keys are of another length; options of a call of (tokens, batch, keys).
CASES: dict[str, tuple[dict[str, Any], int, bool, Options]] = {
    "causal": ({}, HEADS, False, lambda s, b, k: {}),
    "groups": ({"num_gqa_groups": 2, "window_size": (5, 0)}, 2, False, lambda s, b, k: {}),
    "bshd": ({"qkv_format": "bshd", "attn_mask_type": "no_mask"}, HEADS, False, lambda s, b, k: {}),
    "cross": ({"attn_mask_type": "no_mask"}, HEADS, True, lambda s, b, k: {}),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, HEADS, True, lambda s, b, k: {}),
    "padding": ({"attn_mask_type": "padding"}, HEADS, False, lambda s, b, k: {"attention_mask": padding(s, b)}),
    "two masks": (
        {"attn_mask_type": "padding"},
        HEADS,
        True,
        lambda s, b, k: {"attention_mask": (padding(s, b), padding(k, b))},
    ),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, HEADS, False, lambda s, b, k: {"attention_mask": above(s, b)}),
    "lengths": (
        {"attn_mask_type": "padding_causal"},
        HEADS,
        False,
        lambda s, b, k: dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.arange(b + 1, dtype=torch.int32) * s),
    ),
    "bias": (
        {},
        HEADS,
        False,
        lambda s, b, k: {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.ones(1, HEADS, s, s).cumsum(3) / s,
        },
    ),
    "alibi, dropout": ({"attention_dropout": 0.2}, HEADS, False, lambda s, b, k: {"core_attention_bias_type": "alibi"}),
}
BRIEF = ("causal", "cross", "padding", "lengths", "arbitrary")


def attention_calls(groups: int, other_keys: bool, form: str, options: Options) -> Iterator[Any]:
    for i, (tokens, batch) in enumerate(((9, 3), (20, 5), (33, 2), (7, 8), (64, 4))):
        keys = (11, 31, 8, 40, 65)[i] if other_keys else tokens
        lead = [(n, batch) if form == "sbhd" else (batch, n) for n in (tokens, keys, keys)]
        heads = (HEADS, groups, groups)
        tensors = [torch.randn(*n, h, WIDTH, requires_grad=True) for n, h in zip(lead, heads, strict=True)]
        yield tensors, [], options(tokens, batch, keys)


@pytest.mark.parametrize(
    ("case", "env"),
    [pytest.param(c, {}, marks=[] if c in BRIEF else [more], id=c) for c in CASES]
    + [pytest.param(c, UNFUSED, marks=[more if c in BRIEF else full], id=f"{c}, unfused") for c in CASES],
)
def test_attention(case: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    options, groups, other_keys, of_call = CASES[case]
    module = te.DotProductAttention(HEADS, WIDTH, softmax_scale=0.2, **options)
    assert check(module, attention_calls(groups, other_keys, module.qkv_format, of_call)) == 1


@pytest.mark.parametrize("env", [{}, pytest.param(UNFUSED, marks=more)])
def test_packed_sequences(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose longest lengths are numbers of the call: one program for all up to a power of two."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    module = te.DotProductAttention(HEADS, WIDTH, attn_mask_type="padding_causal", qkv_format="thd")
    calls: list[Any] = []
    for size, sequences in ((6, 2), (7, 3), (64, 4), (65, 2), (128, 3)):
        tensors = [torch.randn(sequences * size, HEADS, WIDTH, requires_grad=True) for _ in range(3)]
        cu = torch.arange(sequences + 1, dtype=torch.int32) * size
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": size, "max_seqlen_kv": size}
        calls.append((tensors, [], lengths))
    assert check(module, calls) == 2


@more
def test_attention_in_fp8() -> None:
    module = te.MultiheadAttention(HEADS * WIDTH, HEADS, attention_dropout=0.0, device="cpu")
    sizes = ((8, 4), (20, 5), (33, 2))  # 32 rows need no padding
    calls: list[Any] = [([torch.randn(n, b, HEADS * WIDTH, requires_grad=True)], [], {}) for n, b in sizes]
    assert check(module, calls, DelayedScaling(fp8_dpa=True, fp8_mha=True)) == 1


def test_sizes_that_do_not_agree_are_refused() -> None:
    """In words that quote the sizes of the call, and not the numbers that stand for them in a plan."""
    module = te.DotProductAttention(HEADS, WIDTH, attn_mask_type="padding")
    q, k, v = (torch.randn(n, 3, HEADS, WIDTH) for n in (9, 9, 10))
    for given, mask, words in (
        ((q, k, v), padding(9, 3), r"k of shape \(9, 3, 6, 16\), v of \(10, 3, 6, 16\)"),
        ((q, k, k), padding(8, 3), r"a padding mask of shape .*3, 1, 1, 8"),
        ((q, v, v), padding(9, 3), r"\(3, 1, 1, 9\) for q and \(3, 1, 1, 10\) for k"),
        ((q, k, k), (padding(9, 3),), r"\(3, 1, 1, 9\) for q and \(3, 1, 1, 9\) for k"),
    ):
        with pytest.raises(Exception, match=words):
            torch.compile(module, backend="eager", dynamic=True)(*given, attention_mask=mask)


@more
@pytest.mark.parametrize("kind", ["LayerNorm", "TransformerLayer", "cross"])
def test_sizes_that_a_user_marks(kind: str) -> None:
    """A compiler refuses programs that fix such a size, or take it for another one that is equal once."""
    options, _, _, of_call = CASES["cross"]
    module = te.DotProductAttention(HEADS, WIDTH, **options) if kind == "cross" else MODULES[kind]()
    calls: list[Any] = []
    for tokens, batch in ((8, 8), (20, 5), (32, 40)):
        x = torch.randn(tokens, batch, 32, requires_grad=True)
        tensors = [torch.randn(n, batch, HEADS, WIDTH, requires_grad=True) for n in (tokens, 2 * tokens, 2 * tokens)]
        calls.append((tensors if kind == "cross" else [x], [], of_call(tokens, batch, 2 * tokens)))
        for t in calls[-1][0]:
            torch._dynamo.mark_dynamic(t, 0)
            torch._dynamo.mark_dynamic(t, 1)
    config: Any = torch.fx.experimental._config
    with config.patch(use_duck_shape=False):
        assert check(module, calls, dynamic=None) == 1
