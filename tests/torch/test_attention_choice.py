"""Which backend is chosen for which attention, and why not the others: rules on hand-made devices, no GPU needed; and
the tuner of the table of speeds, whose timing alone needs a GPU."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import cache as disk
from te_core import dtypes
from te_core import env as variables
from te_core.attention import AttentionSpec, Sizes
from te_core.device import DeviceInfo
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.context.schedule import Context
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_torch.attention import DotProductAttention, choose, env, explain, plan, tune, utils
from te_torch.attention import dot_product as module_file
from te_torch.attention.choose import FLASH2, FLASH3, FLASH4, FLASH_TORCH, FUSED, UNFUSED, Installed, Request
from te_torch.attention.dot_product import RUN
from te_torch.attention.env import Switches
from tests.backends import requires_cuda
from tests.programs import python

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 50 << 20, 141 << 30, (13, 0))
A100 = replace(H200, name="NVIDIA A100", capability=(8, 0), multiprocessors=108)
B200 = replace(H200, name="NVIDIA B200", capability=(10, 0), multiprocessors=148)
L40 = replace(H200, name="NVIDIA L40", capability=(8, 9), multiprocessors=142)
V100 = replace(H200, name="NVIDIA V100", capability=(7, 0), multiprocessors=80)

ALL = Installed(flash2=(2, 8, 3), flash3=(3, 0), flash4=(4, 0), torch=(2, 11), cudnn=(9, 19, 0))
SPEC = AttentionSpec(0.125, "bshd", "bshd", right=0, bottom_right=True)
SIZES = Sizes(4, 1024, 1024, 16, 4, 128, 128)
PLAIN = Request(H200, dtypes.bfloat16, SPEC, SIZES, "causal", installed=ALL)
DELAYED = DelayedScaling(fp8_dpa=True)


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Without this machine's table, and with every choice made anew."""
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path))
    for name in list(env.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    choose.forget()
    yield
    choose.forget()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuDNN that says yes to everything (what it can do is te_core.attention_rules' own test)."""
    asked: list[Any] = []

    def everything(*given: Any, **options: bool) -> tuple[bool, str]:
        asked.append((*given, options))
        return (True, "") if (H200, "refuses") not in asked else (False, "cuDNN does not want to")

    monkeypatch.setattr(choose, "cudnn_attention", everything)
    return asked


def spec(**changes: Any) -> dict[str, Any]:
    return {"spec": replace(SPEC, **changes)}


def sizes(**changes: Any) -> dict[str, Any]:
    return {"sizes": SIZES._replace(**changes)}


THD = spec(q_format="thd", kv_format="thd", padded=True, max_q=1024, max_kv=1024)
FLASHES = (FLASH2, FLASH3, FLASH4, FLASH_TORCH)
EMULATE = Switches(emulate_fp8=True)

#: What changes in the plain request, which backends that excludes, and a part of the reason that each of them gives.
EXCLUSIONS: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("cpu", {"device": None}, FLASHES, "GPUs only"),
    ("no flash", {"switches": Switches(flash=False)}, FLASHES, "NVTE_FLASH_ATTN=0"),
    ("no flash 2", {"switches": Switches(flash2=False)}, (FLASH2,), "NVTE_FLASH_ATTN_V2=0"),
    ("no flash 3", {"switches": Switches(flash3=False)}, (FLASH3,), "NVTE_FLASH_ATTN_V3=0"),
    ("no flash 4", {"switches": Switches(flash4=False)}, (FLASH4,), "NVTE_FLASH_ATTN_V4=0"),
    ("no fused", {"switches": Switches(fused=False)}, (FUSED,), "NVTE_FUSED_ATTN=0"),
    ("no unfused", {"switches": Switches(unfused=False)}, (UNFUSED,), "NVTE_UNFUSED_ATTN=0"),
    ("FP8 only", {"switches": Switches(fused_backend=2)}, (FUSED,), "NVTE_FUSED_ATTN_BACKEND=2 is for FP8"),
    ("F16 only", {"switches": Switches(fused_backend=1), "fp8": "delayed"}, (FUSED, *FLASHES, UNFUSED), ""),
    ("not there 2", {"installed": ALL._replace(flash2=None)}, (FLASH2,), "not installed"),
    ("not there 3", {"installed": ALL._replace(flash3=None)}, (FLASH3,), "not installed"),
    ("not there 4", {"installed": ALL._replace(flash4=None)}, (FLASH4,), "not installed"),
    ("no cuDNN", {"installed": ALL._replace(cudnn=None)}, (FUSED,), "not installed"),
    ("over ranks", {"context": Context("p2p", 2)}, (*FLASHES, UNFUSED), "it takes whole sequences"),
    ("Ampere", {"device": A100}, (FLASH3, FLASH4), "needs compute capability 9.0"),
    ("Blackwell", {"device": B200}, (FLASH3,), "needs compute capability 9.0 only, this is 10.0"),
    ("Volta", {"device": V100}, FLASHES, "needs compute capability"),
    ("float32", {"dtype": dtypes.float32}, FLASHES, "float16 and bfloat16, not float32"),
    ("float16", {"dtype": dtypes.float16}, (), ""),
    ("FP8", {"fp8": "delayed"}, (*FLASHES, UNFUSED), "no FP8 attention"),
    ("FP8, emulated", {"fp8": "delayed", "switches": EMULATE}, FLASHES, "no FP8 attention"),
    ("FP8, max_logit", {"fp8": "delayed", "switches": EMULATE, **spec(max_logit=True)}, (*FLASHES, FUSED, UNFUSED),
     "max_logit"),
    ("FP8, bias", {"fp8": "delayed", "switches": EMULATE, **spec(bias="post_scale_bias")}, (*FLASHES, FUSED), " bias"),
    ("splits", {"num_splits": 4}, (FLASH2, FLASH_TORCH, FUSED, UNFUSED), "num_splits=4"),
    ("max_logit", spec(max_logit=True), FLASHES, "max_logit"),
    ("torch_score_mod", {"score_mod": "torch"}, (*FLASHES, FUSED), "torch_score_mod"),
    ("torch_score_mod, FP8", {"score_mod": "torch", "fp8": "delayed", "switches": EMULATE}, (*FLASHES, FUSED, UNFUSED),
     "torch_score_mod"),
    ("torch_score_mod, cache", {"score_mod": "torch", "cached": True}, (*FLASHES, FUSED, UNFUSED), "torch_score_mod"),
    ("score_mod", {"score_mod": "graph", "mask": "causal"}, (*FLASHES, FUSED, UNFUSED), "score_mod"),
    ("off-by-one", spec(softmax="off-by-one"), FLASHES, "softmax_type='off-by-one'"),
    ("learnable", spec(softmax="learnable"), FLASHES, "softmax_type='learnable'"),
    ("arbitrary", spec(masked=True, right=-1), FLASHES, "arbitrary mask"),
    ("bias", spec(bias="post_scale_bias"), FLASHES, "bias"),
    ("alibi", spec(bias="alibi"), (FLASH3, FLASH4, FLASH_TORCH), "ALiBi"),
    ("dropout", spec(dropout=0.1), (FLASH3, FLASH4), "no dropout"),
    ("dropout of everything", spec(dropout=1.0), FLASHES, "dropout"),
    ("softcap", spec(softcap=30.0), (FLASH_TORCH,), "soft-cap"),
    ("window", spec(left=128), (), ""),
    ("packed", THD, (), ""),
    ("gaps", {**THD, "gaps": True}, (FLASH2, FLASH4, FLASH_TORCH), "pad_between_seqs"),
    ("padded rows", spec(padded=True), FLASHES, "packed (thd)"),
    ("top-left, as long", spec(bottom_right=False), (), ""),
    ("top-left, longer", {**spec(bottom_right=False), **sizes(skv=2048)}, FLASHES, "diagonal ends bottom-right"),
    ("bottom-right, longer", sizes(skv=2048), (), ""),
    ("top-left, thd", {"spec": replace(THD["spec"], bottom_right=False)}, (), ""),
    ("top-left, thd, unlike", {"spec": replace(THD["spec"], bottom_right=False), "same_lengths": False}, FLASHES,
     "diagonal ends bottom-right"),
    ("no diagonal, longer", {**spec(bottom_right=False, right=-1), **sizes(skv=2048)}, (), ""),
    ("MLA", sizes(d_qk=192), FLASHES, ""),
    ("two widths", sizes(d_qk=64), FLASHES, "one head width, not 64"),
    ("wide", sizes(d_qk=256, d_v=256), (FLASH4,), "up to 128"),
    ("too wide", sizes(d_qk=512, d_v=512), FLASHES, "not 512/512"),
    ("odd width", sizes(d_qk=100, d_v=100), FLASHES, "multiples of 8"),
    ("wide on Ada", {"device": L40, **sizes(d_qk=256, d_v=256)}, FLASHES, "compute capability"),
    ("wide on Ada, inference", {"device": L40, **sizes(d_qk=256, d_v=256), "training": False}, (FLASH3, FLASH4), ""),
    ("deterministic", spec(deterministic=True), (FLASH4, FLASH_TORCH), "not deterministic"),
    ("deterministic, wide", {**spec(deterministic=True), **sizes(d_qk=256, d_v=256)}, (FLASH3, FLASH4, FLASH_TORCH),
     ""),
    ("deterministic, inference", {**spec(deterministic=True), "training": False}, (), ""),
    ("cache", {"cached": True}, FLASHES, "KV cache"),
    ("old flash 2, window", {**spec(left=8), "installed": ALL._replace(flash2=(2, 2))}, (FLASH2,), "window needs"),
    ("old flash 2, alibi", {**spec(bias="alibi"), "installed": ALL._replace(flash2=(2, 3))},
     (FLASH2, FLASH3, FLASH4, FLASH_TORCH), "ALiBi"),
    ("old flash 2, deterministic", {**spec(deterministic=True), "installed": ALL._replace(flash2=(2, 4, 0))},
     (FLASH2, FLASH4, FLASH_TORCH), "deterministic"),
    ("old flash 2, softcap", {**spec(softcap=1.0), "installed": ALL._replace(flash2=(2, 5))}, (FLASH2, FLASH_TORCH),
     "soft-cap"),
]  # fmt: skip


def test_rules(cudnn: Any) -> None:
    wrong = {}
    for case, changes, excluded, part in EXCLUSIONS:
        found = choose.eligible(replace(PLAIN, **changes))
        refused = {name: reason for name, reason in found.items() if reason is not None}
        if set(refused) != set(excluded) or not all(part in reason for reason in refused.values()):
            wrong[case] = refused
    assert not wrong


def test_every_rule_is_tried(cudnn: Any) -> None:
    """Each rule of each backend decides in one of the rows above: no rule is there that nothing would miss."""
    silent = []
    for name, rules in choose.RULES.items():
        for i, rule in enumerate(rules):
            if rule is choose._cudnn:  # what cuDNN refuses has tests of its own
                continue
            without = [*rules[:i], *rules[i + 1 :]]
            decides = any(
                rule(request) is not None and all(other(request) is None for other in without)
                for request in (replace(PLAIN, **changes) for _, changes, *_ in EXCLUSIONS)
            )
            if not decides:
                silent.append((name, i))
    # Off the GPU there is no compute capability either; the rule is there for its plainer reason.
    assert silent == [
        (name, choose.RULES[name].index(choose._on_gpu)) for name in (FLASH2, FLASH3, FLASH4, FLASH_TORCH)
    ]


def test_cudnn_is_asked_and_believed(cudnn: Any) -> None:
    assert choose.eligible(PLAIN)[FUSED] is None
    told = {"paged": False, "bias_grad": False, "bias_rows": 0}
    assert cudnn == [(H200, (9, 19, 0), SPEC, SIZES, dtypes.bfloat16, True, "", told)]
    choose.eligible(replace(PLAIN, paged=True, bias_grad=True, bias_rows=7, fp8="delayed"))
    assert cudnn[-1][-2:] == ("delayed", {"paged": True, "bias_grad": True, "bias_rows": 7})
    cudnn.append((H200, "refuses"))
    assert choose.eligible(PLAIN)[FUSED] == "cuDNN does not want to"


# ------------------------------------------------------------------------------------------------ FP8 on the CPU

#: What FP8 attention lacks: constructor's options, forward's, the recipe, and the one reason; for the emulation, too,
#: unless it says other.
NO_FP8: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str, str | None]] = {
    "learnable": ({"softmax_type": "learnable"}, {}, DELAYED, "FP8 attention has no softmax_type='learnable'.", None),
    "max_logit": ({"return_max_logit": True}, {}, DELAYED, "FP8 attention has no max_logit.", None),
    "bias": (
        {}, {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": torch.zeros(1, 4, 6, 6)}, DELAYED,
        "FP8 attention takes no bias.", "",
    ),
    "bias with a gradient": (
        {}, {"core_attention_bias_type": "post_scale_bias",
             "core_attention_bias": torch.zeros(1, 4, 6, 6, requires_grad=True)},
        DELAYED, "FP8 attention takes no bias.", "FP8 attention has no gradient of a bias.",
    ),
    "mxfp8": (
        {}, {}, MXFP8BlockScaling(fp8_dpa=True), "FP8 attention takes delayed or current scaling, not mxfp8.", None
    ),
    "custom": (
        {}, {}, CustomRecipe(qfactory=lambda role: None, fp8_dpa=True),
        "FP8 attention takes delayed or current scaling, not custom.", None,
    ),
    "rows": ({}, {}, DELAYED, "FP8 attention takes rows that are multiples of 16 wide, not 48, 24, 24, 48.", None),
    "nothing": ({}, {}, DELAYED, "", None),
    "nothing, current": ({}, {}, Float8CurrentScaling(fp8_dpa=True), "", None),
    "alibi, sink, dropout": (
        {"softmax_type": "off-by-one", "attention_dropout": 0.1}, {"core_attention_bias_type": "alibi"}, DELAYED, "",
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_FP8)
@pytest.mark.parametrize("backend", [FUSED, UNFUSED])
def test_what_explain_says_of_fp8_is_so(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: an eligible backend computes both ways, any other one is refused with the reason that was said."""
    constructor, options, recipe, fused, unfused = NO_FP8[name]
    reason = fused if backend == FUSED or unfused is None else unfused
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN" if backend == FUSED else "NVTE_FUSED_ATTN", "0")
    width = 12 if name == "rows" else 16
    module = DotProductAttention(4, width, 2, **constructor).to("cpu")
    q, k, v = (torch.randn(6, 2, heads, width, requires_grad=True) for heads in (4, 2, 2))
    with te.autocast(recipe=recipe):
        found = module.explain(q, k, v, **options)
        assert (found.reasons[backend] or "") == reason and found.backend == (None if reason else backend)
        if reason:
            with pytest.raises(choose.NoBackendError, match=re.escape(reason)):
                module(q, k, v, **options)
            return
        out = module(q, k, v, **options)
    out.sum().backward()
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in (q, k, v))
    assert [plan.backend for plan in module._choices.values()] == [backend]


def test_rows_of_a_packed_projection_count_as_one() -> None:
    """Two heads of 12 are 24 wide, which FP8 does not take; keys and values in one row are 48."""
    module = DotProductAttention(4, 12, 2)
    q, kv = torch.randn(6, 2, 4, 12), torch.randn(6, 2, 2, 2, 12)
    with te.autocast(recipe=DELAYED):
        assert "not 48, 24, 24, 48" in (module.explain(q, *kv.unbind(2)).reasons[FUSED] or "")
        assert module.explain(q, kv_layer=kv).reasons[FUSED] is None
        assert module(q, kv_layer=kv).shape == (6, 2, 48)


def test_a_paged_cache_has_no_fp8() -> None:
    found = choose.eligible(replace(PLAIN, device=None, fp8="delayed", cached=True, paged=True, switches=EMULATE))
    assert found[FUSED] == found[UNFUSED] == "FP8 attention has no paged cache."


# --------------------------------------------------------------------------------------------------- the order


def test_what_cudnn_really_says() -> None:
    """Without a stand-in: the plain request is eligible on an H200, an arbitrary mask is not."""
    assert choose.eligible(PLAIN)[FUSED] is None
    assert "mask" in (choose.eligible(replace(PLAIN, **spec(masked=True)))[FUSED] or "")


def test_orders_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, cudnn: Any) -> None:
    monkeypatch.setattr(choose, "_shipped_table", lambda: {**json.loads(SHIPPED.read_text()), "measured": {}})
    assert choose.choose(PLAIN) == FUSED
    assert choose.choose(replace(PLAIN, device=B200)) == FUSED
    assert choose.choose(replace(PLAIN, device=A100)) == FLASH2
    assert choose.choose(replace(PLAIN, device=A100, installed=ALL._replace(flash2=None))) == FLASH_TORCH
    assert choose.choose(replace(PLAIN, switches=Switches(fused=False))) == FLASH4
    bare = Installed(cudnn=None)
    assert choose.choose(replace(PLAIN, installed=bare)) == FLASH_TORCH
    assert choose.choose(replace(PLAIN, installed=bare, **spec(masked=True))) == UNFUSED
    assert choose.choose(replace(PLAIN, device=None)) == FUSED


SHIPPED = Path(choose.te_core.__file__).parent / "attention_speed.json"


def test_the_shipped_table() -> None:
    """Its orders name every backend once; its measured rows are shape classes that exist, of backends that exist."""
    table = json.loads(SHIPPED.read_text())
    for order in table["order"].values():
        assert sorted(order) == sorted(choose.BACKENDS)
    for capability, entry in table["measured"].items():
        assert re.fullmatch(r"\d+\.\d", capability) and entry["device"] and entry["versions"]
        for name, times in entry["microseconds"].items():
            assert re.fullmatch(
                r"(train|infer)/(dense|packed)/d(64|128|192|256)/(decode|short|medium|long)/"
                r"(banded|full)",
                name,
            )
            assert set(times) <= set(choose.BACKENDS) and all(t > 0 for t in times.values())


def test_measured_speeds_go_first_and_this_machines_before_the_shipped(
    monkeypatch: pytest.MonkeyPatch, cudnn: Any
) -> None:
    row = choose.shape_class(PLAIN)
    assert row == "train/dense/d128/medium/banded"

    def table(**times: float) -> dict[str, Any]:
        return {"measured": {"9.0": {"microseconds": {row: times}}}}

    shipped = {"order": json.loads(SHIPPED.read_text())["order"], **table(**{FLASH2: 3.0, FUSED: 2.0, UNFUSED: 9.0})}
    monkeypatch.setattr(choose, "_shipped_table", lambda: shipped)
    found = choose.decide(PLAIN)
    assert found.backend == FUSED and "shipped table" in found.why
    assert disk.write(choose.local_table_path(), json.dumps(table(**{FLASH2: 1.0, FUSED: 2.0})).encode())
    choose.forget()
    found = choose.decide(PLAIN)
    assert found.backend == FLASH2 and "this machine's table" in found.why
    # Another class, or another device, is not decided by that row.
    assert choose.decide(replace(PLAIN, training=False)).backend == FUSED
    assert choose.decide(replace(PLAIN, device=B200)).backend == FUSED
    # The fastest is not eligible: the next one.
    assert choose.decide(replace(PLAIN, installed=ALL._replace(flash2=None))).backend == FUSED


DAMAGED = {
    "cut": b'{"measured": {',
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no devices": b'{"measured": [1]}',
    "no classes": b'{"measured": {"9.0": {"microseconds": 3}}}',
    "no times": b'{"measured": {"9.0": {"microseconds": {"train/dense/d128/medium/banded": [1, 2]}}}}',
    "words for times": b'{"measured": {"9.0": {"microseconds": {"x": {"FusedAttention": "fast"}}}}}',
    "NaN": b'{"measured": {"9.0": {"microseconds": {"x": {"FusedAttention": NaN}}}}}',
    "minus": b'{"measured": {"9.0": {"microseconds": {"x": {"FusedAttention": -1}}}}}',
    "another backend": b'{"measured": {"9.0": {"microseconds": {"x": {"Quantum": 1.0}}}}}',
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_table_costs_one_warning(monkeypatch: pytest.MonkeyPatch, cudnn: Any, damage: str) -> None:
    """And the shipped one decides, in every attention of the process."""
    monkeypatch.setattr(variables, "_told", set())
    expected = choose.decide(PLAIN)
    path = choose.local_table_path()
    path.write_bytes(DAMAGED[damage])
    path.chmod(0o600)
    choose.forget()
    with pytest.warns(UserWarning, match=f"{path.name} is ignored") as found:
        assert choose.decide(PLAIN) == expected
        choose.forget()
        assert choose.decide(replace(PLAIN, training=False)).backend
    assert len(found) == 1


def test_a_pipe_in_the_place_of_a_table(monkeypatch: pytest.MonkeyPatch, cudnn: Any) -> None:
    monkeypatch.setattr(variables, "_told", set())
    os.mkfifo(choose.local_table_path(), 0o600)
    choose.forget()
    with pytest.warns(UserWarning, match="it is no file"):
        assert choose.decide(PLAIN).backend


# ------------------------------------------------------------------------------------------- through the module


def inputs(**options: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(6, 2, heads, 16, **options) for heads in (4, 2, 2))


def chosen(module: DotProductAttention, *args: Any, **options: Any) -> str | None:
    return module.explain(*args, **options).backend


def test_the_environment_is_honoured_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tensors = DotProductAttention(4, 16, 2), inputs()
    assert chosen(module, *tensors) == FUSED
    first = module(*tensors)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert chosen(module, *tensors) == UNFUSED
    module(*tensors)
    assert {plan.backend for plan in module._choices.values()} == {FUSED, UNFUSED}
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "2")
    assert chosen(module, *tensors) == UNFUSED
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "1")
    assert chosen(module, *tensors) == FUSED
    monkeypatch.setenv("NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT", "1")
    monkeypatch.setenv("NVTE_FUSED_ATTN_USE_FAv2_BWD", "1")  # flash-attn 2 is not here: no effect
    assert torch.equal(module(*tensors), first)


def test_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tensors = DotProductAttention(4, 16, 2), inputs()
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ValueError, match="No dot product attention backend is available") as caught:
        module(*tensors)
    assert isinstance(caught.value, UnsupportedError)
    for part in ("FusedAttention: NVTE_FUSED_ATTN=0", "UnfusedDotProductAttention: NVTE_UNFUSED_ATTN=0", "GPUs only"):
        assert part in str(caught.value)
    assert chosen(module, *tensors) is None


@pytest.mark.parametrize("how", ["eager", "fp8", "compiled"])
def test_deterministic_mode_is_honoured_at_each_call(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made without it is none for a call with it, and the other way round."""
    for value in "01":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", value)
        assert env.now().deterministic is (value == "0")
    module, tensors = DotProductAttention(4, 16, 2), inputs()
    run: Any = torch.compile(module, backend="aot_eager") if how == "compiled" else module
    seen = []
    try:
        for deterministic in (False, True, False, True):
            torch.use_deterministic_algorithms(deterministic)
            with te.autocast(enabled=how == "fp8", recipe=DELAYED):
                run(*tensors)
            assert module._last_plan is not None
            seen.append(module._last_plan.spec.deterministic)
            assert module.explain_key(module._last_plan.key).backend == module._last_plan.backend
    finally:
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
    assert seen[:2] == [False, True], "the second call found the first one's plan"
    assert how == "compiled" or seen == [False, True, False, True]
    assert sorted(plan.spec.deterministic for plan in module._choices.values()) == [False, True]


def test_grad_mode_alone_does_not_change_the_request() -> None:
    """A checkpoint's first forward runs without grad mode, its second one with it."""
    module = DotProductAttention(4, 16, 2)
    tensors, bias = inputs(requires_grad=True), torch.zeros(1, 4, 6, 6, requires_grad=True)
    options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    with torch.no_grad():
        module(*tensors, **options)
    module(*tensors, **options)
    first, second = (plan.request for plan in module._choices.values())
    assert first == second and first.training and first.bias_grad
    assert not DotProductAttention(4, 16, 2).eval().explain(*inputs()).reasons[UNFUSED]


def test_explain_prints_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(*inputs(), attn_mask_type="no_mask", softmax_type="learnable")
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) == len(choose.BACKENDS) + 1
    for name, line in zip(choose.BACKENDS, lines, strict=False):
        assert line.startswith(name) and ("eligible" in line) == (name in (FUSED, UNFUSED))
    assert lines[-1].startswith("chosen: FusedAttention (te_core's CPU backend")
    assert str(found) in printed and found.backend == FUSED


def test_explain_takes_the_arguments_of_both() -> None:
    found = explain(*inputs(), num_gqa_groups=2, return_max_logit=True, window_size=(3, 0), max_seqlen_q=6, name="it")
    assert found.backend == FUSED
    with pytest.raises(AssertionError, match="num_gqa_groups"):
        explain(*inputs(), num_gqa_groups=3)
    with pytest.raises(TypeError, match="nothing_known"):
        explain(*inputs(), nothing_known=1)


def test_explain_computes_nothing_and_checks_arguments() -> None:
    module = DotProductAttention(4, 16, 2)
    module.explain(*inputs())
    assert not module._choices
    with pytest.raises(AssertionError):
        module.explain(*inputs(), attn_mask_type="padding")
    with pytest.raises(ArgumentError, match="inference_params"):
        module.explain(*inputs(), inference_params=object())
    assert isinstance(module(*inputs()), torch.Tensor)


def test_the_choice_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("DotProductAttention"), logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.addHandler(handler)
    tensors = inputs()
    try:
        DotProductAttention(4, 16, 2)(*tensors)
        assert not records
        monkeypatch.setenv("NVTE_DEBUG", "1")
        monkeypatch.setenv("NVTE_DEBUG_LEVEL", "1")
        DotProductAttention(4, 16, 2)(*tensors)
        assert [r.getMessage().split()[0] for r in records] == [FUSED]
        monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
        DotProductAttention(4, 16, 2)(*tensors)
    finally:
        logger.removeHandler(handler)
    said = [r.getMessage() for r in records[1:]]
    assert any(text.startswith(f"{FLASH3}: ") and "installed" in text for text in said)
    assert {r.levelno for r in records} == {logging.INFO, logging.DEBUG}


def test_the_variable_alone_shows_the_choice() -> None:
    """In a program that has set up no logging."""
    for level, shown, hidden in (("1", f"{FUSED} for Request(", f"{FLASH3}: "), ("2", f"{FLASH3}: ", "nothing")):
        ran = python(f"""
import os, torch, te_torch as te
os.environ.update(NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="{level}")
q = torch.randn(5, 2, 2, 8)
te.DotProductAttention(2, 8).cpu()(q, q, q)
""")
        assert shown in ran.stderr and hidden not in ran.stderr, ran.stderr


@pytest.mark.parametrize("value", ["yes", os.fsdecode(b"\xff"), "-1", "2" * 5000])
@pytest.mark.parametrize("name", ["NVTE_FUSED_ATTN", "NVTE_DEBUG_LEVEL", "NVTE_DPA_FP8DS_AMAX_HISTLEN"])
def test_what_cannot_be_made_out_counts_as_the_default(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setattr(variables, "_told", set())
    before = env.now(), env.fp8_now()
    monkeypatch.setenv("NVTE_DEBUG", "0")
    monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=f"^{name}=") as found:
        assert (env.now(), env.fp8_now()) == before and (env.now(), env.fp8_now()) == before
    assert len(found) == 1


# -------------------------------------------------------------------------------------- documented entry points


def test_context_parallelism_has_one_backend() -> None:
    found = utils.get_attention_backend(utils.AttentionParams(context_parallel=True))
    assert found[:2] == (False, None) and found[4] is False and found[5][::2] == [False, False]
    assert found[2] is found[5][1]


def test_get_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("hardware: says what the CPU would use")
    params = utils.AttentionParams(qkv_layout="bshd_bshd_bshd", attn_mask_type="causal")
    assert utils.get_attention_backend(params) == (
        False,
        None,
        True,
        "F16_arbitrary_seqlen",
        False,
        [False, True, True],
    )
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert utils.get_attention_backend(params) == (False, None, False, None, True, [False, False, True])
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    paged = replace(params, qkv_layout="paged_kv_bshd_bshd_bshd", attn_mask_type="padding_causal", fp8=True)
    assert paged.request().paged and utils.get_attention_backend(paged)[-1] == [False, False, False]
    assert utils.AttentionParams() == utils.AttentionParams()
    assert utils.AttentionParams(num_splits=2) != utils.AttentionParams()


def test_backend_selection_requires_update() -> None:
    """Modules choose anew once this is set: what is installed is looked up again too."""
    module, tensors = DotProductAttention(4, 16, 2), inputs()
    module(*tensors)
    before = choose.installed()
    module_file._attention_backends["backend_selection_requires_update"] = True
    module(*tensors)
    assert module_file._attention_backends["backend_selection_requires_update"] is False
    assert len(module._choices) == 2 and choose.installed() is not before


# ---------------------------------------------------------------------------------------------------------- the tuner


def test_a_case_is_of_the_class_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(tune.classes())
    assert len(set(names)) == len(names) == 112
    for name in names:
        case = tune.case_of(name, torch.device("meta"))
        request = plan.make_plan(case.module._static, case.key, tune.env.Switches()).request
        assert choose.shape_class(request) == name
        assert request.training == name.startswith("train")
        assert request.aligned or request.spec.bottom_right or not request.spec.banded


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "HEADS", 4)
    monkeypatch.setattr(tune, "GROUPS", 2)
    monkeypatch.setattr(tune, "WIDTHS", {"d64": (8, 8)})
    monkeypatch.setattr(tune, "LENGTHS", {"decode": (2, 1, 5), "short": (2, 5, 5)})


def test_every_eligible_backend_runs(small: None) -> None:
    ran: dict[str, set[str]] = {}

    def timer(runs: dict[str, Any]) -> dict[str, float]:
        for run in runs.values():
            run()
        ran[name] = set(runs)
        return {backend: 2.0 if backend == FUSED else 1.0 for backend in runs}

    said: list[str] = []
    for name in tune.classes():
        found = tune.measure([name], torch.device("cpu"), timer, said.append)
        assert list(found[name]) == [UNFUSED, FUSED], "fastest first"
    assert all(backends == {FUSED, UNFUSED} for backends in ran.values()) and len(ran) == 12
    assert said[0].startswith("[1/1] train/dense/d64/short/banded: UnfusedDotProductAttention 1 us, Fused")


def test_a_class_that_does_not_fit_is_left_out(small: None) -> None:
    def timer(runs: dict[str, Any]) -> dict[str, float]:
        raise torch.OutOfMemoryError

    said: list[str] = []
    assert tune.measure(["infer/dense/d64/short/full"], torch.device("cpu"), timer, said.append) == {}
    assert "not enough memory" in said[0]


def test_what_is_written_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path / "cache"))
    times = {UNFUSED: 1.0, FLASH_TORCH: 2.0, FUSED: 3.0}
    choose.forget()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        patch.setattr(tune, "measure", lambda names, device, say: {name: times for name in names})
        assert tune.main(["--only", "infer/dense/d64/short"]) == 0
        assert tune.main(["--only", "train/dense/d64/short"]) == 0
    path = choose.local_table_path()
    assert f"2 classes written to {path}" in capsys.readouterr().out
    entry = json.loads(path.read_text())["measured"]["9.0"]
    assert entry["device"] == "NVIDIA H200" and entry["date"] and entry["versions"]["torch"]
    assert len(entry["microseconds"]) == 4, "classes measured before stay"
    choose.forget()
    case = tune.case_of("infer/dense/d64/short/full", torch.device("meta"))
    monkeypatch.setattr(plan, "device_info", lambda device: H200)
    monkeypatch.setattr(choose, "installed", lambda: choose.Installed(cudnn=(9, 19, 0)))
    found = case.module.explain_key(case.key)
    assert found.backend == FLASH_TORCH and "this machine's table" in found.why
    order, _ = choose.ranking(plan.make_plan(case.module._static, case.key, choose.Switches()).request)
    assert order[-1] == UNFUSED, "it is measured fastest here, and its memory is the square of the length"
    monkeypatch.undo()
    choose.forget()


def test_without_a_gpu(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "nothing to measure" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tune.main(["--only", "nothing/like/this"])
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit, match="^1$"):
        runpy.run_module("te_core.tools.tune", run_name="__main__")
    assert "nothing to measure" in capsys.readouterr().out


@requires_cuda
def test_one_class_on_the_gpu() -> None:
    times = tune.measure(["infer/dense/d64/short/banded"], torch.device("cuda", 0), say=lambda line: None)
    (found,) = times.values()
    assert set(found) <= set(RUN) and all(0 < t < 1e6 for t in found.values())
