"""The peer's `_extra_state`: its own bytes are read and used, and nothing that an entry says is ever executed."""

from __future__ import annotations

import builtins
import collections
import io
import os
import pickle
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import DelayedScaling, Format
from te_torch.base.extra_state import KEYS, read_extra_state
from tests.covering import covering
from tests.golden import load, tree
from tests.refusals import not_refused
from tests.world import differences, fp8_state, make, step, values

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed_most_recent_margin2": DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent", margin=2),
    "delayed_e4m3": DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3),
}
STATES = load("extra_state")
STATEFUL = sorted(k for k, t in STATES.items() if t.numel())
MODULES = sorted(
    {tuple(k.split("/")[:2]) for k in STATEFUL if k.split("/")[0] in ("Linear", "LayerNormLinear")}
    | {
        tuple(k.split("/")[:2])
        for k in STATEFUL
        if k.startswith("LayerNormMLP") and k.split("/")[0] != "LayerNormMLP_relu"
    }
)


def entry(case: str, recipe: str) -> torch.Tensor:
    return STATES[f"{case}/{recipe}/extra_state/_extra_state"]


def golden(case: str, recipe: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """(parameters, x, dy) of a golden case: the same in each of its three steps."""
    found = tree("modules", f"{case}/{recipe}/")
    params = {k.removeprefix("param/"): v for k, v in found.items() if k.startswith("param/")}
    dy = (0.5 + 0.25 * found["x"].flatten()[: found["y"].shape[-1]]).expand_as(found["y"])
    return params, found["x"], dy


def build(case: str, params: dict[str, torch.Tensor], width: int) -> Any:
    """The module of a golden case, with other parameters."""
    if case == "Linear":
        return te.Linear(width, params["weight"].shape[0], device="cpu")
    norm = {"normalization": "LayerNorm" if "layer_norm_bias" in params else "RMSNorm", "device": "cpu"}
    if case == "LayerNormLinear":
        return te.LayerNormLinear(width, params["weight"].shape[0], **norm)
    activation = case.partition("_")[2]
    return te.LayerNormMLP(
        width, params["fc2_weight"].shape[1], activation=activation, bias="fc1_bias" in params, **norm
    )


# ---------------------------------------------------------------------------------------------- what it holds


def test_every_entry_is_read() -> None:
    for key in STATEFUL:
        read = read_extra_state(STATES[key], key)
        assert read is not None and tuple(read) == KEYS, key
        kinds = {(t.dtype, t.device.type, t.is_contiguous()) for t in read.values()}
        assert kinds == {(torch.float32, "cpu", True)}, key
        assert all((t >= 0).all() and torch.isfinite(t).all() for t in read.values()), key
        if "core_attention" not in key:  # which ran in bf16
            assert (read["scale_fwd"] != 1).any() and (read["scale_bwd"] != 1).any(), key


def test_empty_entries() -> None:
    empty = sorted(set(STATES) - set(STATEFUL))
    assert empty and not [key for key in empty if read_extra_state(STATES[key], key) is not None]


# ------------------------------------------------------------------------------------------------- loading it


@pytest.mark.parametrize(("case", "recipe"), MODULES)
def test_a_fresh_module_continues_where_the_peer_stopped(case: str, recipe: str) -> None:
    """Our module after the same three steps, and a fresh one that loaded the entry, do the fourth alike."""
    params, x, dy = golden(case, recipe)
    ran, loaded = build(case, params, x.shape[-1]), build(case, params, x.shape[-1])
    ran.load_state_dict(params)
    for _ in range(3):
        step(ran, x, RECIPES[recipe], dy=dy)
    checkpoint = {**params, "_extra_state": entry(case, recipe)}
    given = dict(checkpoint)
    result = loaded.load_state_dict(checkpoint, strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert checkpoint == given, "the caller's dictionary is left alone"
    read = read_extra_state(entry(case, recipe))
    for name, value in fp8_state(loaded).items():
        assert torch.equal(value, read[name.removeprefix("fp8_state.")])
        # Slots that we never cast keep their start; the rest see norms and TF32 products of the peer.
        mine = fp8_state(ran)[name]
        torch.testing.assert_close(value, mine, rtol=0 if case == "Linear" else 0.02, atol=0)
    if case == "Linear":
        assert not differences(step(loaded, x, RECIPES[recipe], dy=dy), step(ran, x, RECIPES[recipe], dy=dy))
        assert not differences(fp8_state(loaded), fp8_state(ran))


FORMS = {
    "tensor": lambda t: t,
    "bytes": lambda t: t.numpy().tobytes(),
    "bytearray": lambda t: bytearray(t.numpy().tobytes()),
    "BytesIO": lambda t: io.BytesIO(t.numpy().tobytes()),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_entry(form: str) -> None:
    params, x, _ = golden("Linear", "delayed")
    module = build("Linear", params, x.shape[-1])
    module.load_state_dict({**params, "_extra_state": FORMS[form](entry("Linear", "delayed"))})
    read = read_extra_state(entry("Linear", "delayed"))
    assert not differences(fp8_state(module), {f"fp8_state.{n}": t for n, t in read.items()})


@covering(
    turns=2,
    kind=["Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"],
    nothing=["None", "bytes", "BytesIO", "tensor"],
    ran=[False, True],
)
def test_an_empty_entry_is_a_start(kind: str, nothing: str, ran: bool) -> None:
    empty = {"None": None, "bytes": b"", "BytesIO": io.BytesIO(), "tensor": torch.empty(0, dtype=torch.uint8)}
    source, target = make(kind), make(kind, seed=1)
    x = values(8, 48)
    if ran:
        step(target, 100 * x, "delayed")
    target.load_state_dict({**source.state_dict(), "_extra_state": empty[nothing]}, strict=True)
    assert not differences(step(target, x, "delayed"), step(source, x, "delayed"))


def test_entries_of_parts_that_a_module_does_not_have() -> None:
    """Below our module all such keys are consumed; elsewhere torch says what it always says."""
    module = torch.nn.Sequential(make("Linear"), torch.nn.Linear(2, 2))
    state = module.state_dict()
    for part in ("", "core_attention.", "core_attention.fused_attention.", "a.b.c."):
        state[f"0.{part}_extra_state"] = torch.empty(0, dtype=torch.uint8)
    module.load_state_dict(state, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key.*1._extra_state"):
        module.load_state_dict({**state, "1._extra_state": None})


def test_the_older_place_of_an_entry() -> None:
    params, x, _ = golden("Linear", "delayed")
    module = build("Linear", params, x.shape[-1])
    module.load_state_dict({**params, "fused_attention._extra_state": entry("Linear", "delayed")})
    assert module.fp8_state.scale_fwd[0] != 1


def test_our_entries_go_first() -> None:
    params, x, _ = golden("Linear", "delayed")
    source, target = build("Linear", params, x.shape[-1]), build("Linear", params, x.shape[-1])
    step(source, 7 * x, "delayed")
    target.load_state_dict({**source.state_dict(), "_extra_state": entry("Linear", "delayed")})
    assert not differences(fp8_state(target), fp8_state(source))


def test_an_entry_of_another_module_is_no_state_of_this_one() -> None:
    params, x, _ = golden("Linear", "delayed")
    module = build("Linear", params, x.shape[-1])
    with pytest.raises(RuntimeError, match="size mismatch for fp8_state.scale_fwd"):
        module.load_state_dict({**params, "_extra_state": entry("LayerNormMLP_gelu", "delayed")})


# ------------------------------------------------------------------------------------------- older and other ones


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Classes by the peer's names, to write pickles with; reading must do without them."""
    module = types.ModuleType("transformer_engine.common.recipe")
    for name in ("DelayedScaling", "Float8CurrentScaling", "CustomRecipe"):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def tensors(length: int = 3) -> dict[str, torch.Tensor]:
    """The four tensors with numbers that show where each went."""
    shapes = {"scale_fwd": (3,), "amax_history_fwd": (length, 3), "scale_bwd": (2,), "amax_history_bwd": (length, 2)}
    return {name: values(*shape, seed=i).abs() for i, (name, shape) in enumerate(shapes.items())}


def old_payload(recipe: Any = None) -> dict[str, Any]:
    state: dict[str, Any] = {
        **tensors(),
        "scale_inv_fwd": torch.ones(3),
        "scale_inv_bwd": torch.ones(2),
        "global_fp8_buffer": {"FWD_AMAX_1": [torch.ones(3)]},
        "extra_fp8_variables": {
            "num_gemms": 1,
            "fp8_max_fwd": 448.0,
            "global_fp8_buffer_pos_fwd_recompute": 5,
            "fp8_checkpoint": True,
            "update_amax": (1, [2, "x"], None),
            "large": 1 << 40,
        },
    }
    return state if recipe is None else {"recipe": recipe, **state}


WRITERS = {
    "pickle": pickle.dumps,
    "pickle 2": lambda state: pickle.dumps(state, 2),
    "pickle 5": lambda state: pickle.dumps(state, 5),
    "zip": lambda state: saved(state),
    "legacy": lambda state: saved(state, _use_new_zipfile_serialization=False),
}


def saved(state: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file


@pytest.mark.parametrize("with_recipe", [False, True])
@pytest.mark.parametrize("writer", [w for w in WRITERS if w != "pickle 2"])
def test_older_payloads(writer: str, with_recipe: bool, peer: types.ModuleType, monkeypatch: Any) -> None:
    """Of versions 0.x (a file of torch.save) and 1.x (without recipe, with scale_inv and buffer positions)."""
    recipe = peer.DelayedScaling() if with_recipe else None
    if recipe is not None:
        recipe.margin, recipe.reduce_amax = 0, True
    written = WRITERS[writer](old_payload(recipe))
    monkeypatch.delitem(sys.modules, peer.__name__)
    read = read_extra_state(written)
    assert not differences(read, tensors())


def test_other_types_of_tensor() -> None:
    state = {
        name: t.to(dtype)
        for (name, t), dtype in zip(
            tensors().items(), (torch.float64, torch.float16, torch.bfloat16, torch.float32), strict=True
        )
    }
    strided = state["amax_history_fwd"].t().contiguous().t()
    assert not strided.is_contiguous()
    read = read_extra_state(pickle.dumps({**state, "amax_history_fwd": strided}))
    assert not differences(read, {name: t.float() for name, t in state.items()})


@pytest.mark.parametrize("name", ["Float8CurrentScaling", "CustomRecipe"])
def test_recipes_without_a_history_are_ignored(name: str, peer: types.ModuleType) -> None:
    """Also with a global of the user's, which is not looked at."""
    recipe = getattr(peer, name)()
    recipe.qfactory = subprocess.Popen
    assert read_extra_state(pickle.dumps({"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1}})) is None


class ProgramsScaling(DelayedScaling):
    """A recipe's class of a program."""


def test_a_recipe_of_a_programs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read where the program has imported the class; it is never imported, and no other class stands for a recipe."""
    recipe = ProgramsScaling(amax_history_len=3)
    written = pickle.dumps({"recipe": recipe, **tensors()})
    assert not differences(read_extra_state(written), tensors())
    with pytest.raises(ArgumentError, match=r"the global .*test_extra_state.Call\)"):
        read_extra_state(pickle.dumps({"recipe": Call, **tensors()}))
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(ArgumentError, match="ProgramsScaling.*import what defines a recipe of yours"):
        read_extra_state(written)


# ------------------------------------------------------------------------------------------------- what is refused


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class CallWithState(Call):
    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments, {"x": 1}


RAN: list[str] = []


def evil(*arguments: Any) -> None:
    RAN.append(repr(arguments))


def in_tensor(*arguments: Any) -> dict[str, Any]:
    return {**tensors(), "scale_fwd": Call(torch._utils._rebuild_tensor_v2, *arguments)}


def storage_bytes() -> bytes:
    """Three ones, as a tensor's pickle holds them."""
    return torch.ones(3)._typed_storage().__reduce__()[1][0]


def storage() -> Any:
    return Call(torch.storage._load_from_bytes, storage_bytes())


OLD = {"_use_new_zipfile_serialization": False}
CALLS = {
    "os.system": lambda path: Call(os.system, f"touch {path}"),
    "posix by a state": lambda path: CallWithState(os.system, f"touch {path}"),
    "popen": lambda path: Call(subprocess.Popen, ["touch", str(path)]),
    "eval": lambda path: Call(builtins.eval, f"open({str(path)!r}, 'w')"),
    "exec": lambda path: Call(builtins.exec, f"open({str(path)!r}, 'w')"),
    "import": lambda path: Call(builtins.__import__, "tests.torch.test_extra_state"),
    "getattr": lambda path: Call(builtins.getattr, collections.OrderedDict, "fromkeys"),
    "getattr of a number": lambda path: Call(builtins.getattr, 1, "real"),
    "own function": lambda path: Call(evil, str(path)),
    "a function that is not called": lambda path: os.system,
    "torch.load": lambda path: Call(torch.load, str(path)),
    "bytearray": lambda path: Call(bytearray, 1 << 40),
    "OrderedDict with items": lambda path: Call(collections.OrderedDict, [("a", 1)]),
    "no storage": lambda path: in_tensor((1, 2), 0, (2,), (1,), False, None),
    "huge by strides of 0": lambda path: in_tensor(storage(), 0, (1 << 20, 1 << 20), (0, 0), False, None),
    "beyond its storage": lambda path: in_tensor(storage(), 1, (3,), (1,), False, None),
    "a negative offset": lambda path: in_tensor(storage(), -1, (3,), (1,), False, None),
    "a negative stride": lambda path: in_tensor(storage(), 2, (3,), (-1,), False, None),
    "many dimensions": lambda path: in_tensor(storage(), 0, (1,) * 3, (1,) * 3, False, None),
    "a pickle in the storage": lambda path: in_tensor(
        Call(torch.storage._load_from_bytes, pickle.dumps(Call(os.system, f"touch {path}"))), 0, (3,), (1,), False, None
    ),
    "a call in the storage": lambda path: in_tensor(
        Call(torch.storage._load_from_bytes, saved(Call(os.system, f"touch {path}"), **OLD).getvalue()),
        0,
        (3,),
        (1,),
        False,
        None,
    ),
    "a zip in the storage": lambda path: in_tensor(
        Call(torch.storage._load_from_bytes, saved(torch.ones(3)).getvalue()), 0, (3,), (1,), False, None
    ),
}


@covering(name=CALLS, where=["alone", "with the state", "in a list", "zip", "legacy"])
def test_calls_are_refused(name: str, where: str, tmp_path: Path) -> None:
    """Clearly, and before anything happened."""
    path = tmp_path / "executed"
    call = CALLS[name](path)
    if where == "alone":
        written: Any = pickle.dumps(call)
    elif where == "with the state":
        written = pickle.dumps({**tensors(), **(call if isinstance(call, dict) else {"recipe": call})})
    elif where == "in a list":
        written = pickle.dumps({**tensors(), "extra_fp8_variables": [call]})
        if isinstance(call, dict):
            call = call["scale_fwd"]
            written = pickle.dumps({**tensors(), "extra_fp8_variables": [call], "scale_bwd": call})
    else:
        written = saved({**tensors(), "recipe": call}, **({} if where == "zip" else OLD))
    module, RAN[:] = make("Linear"), []
    with pytest.raises(ArgumentError, match="a._extra_state that cannot be read safely"):
        torch.nn.ModuleDict({"a": module}).load_state_dict(
            {**{f"a.{n}": t for n, t in module.state_dict().items()}, "a._extra_state": written}
        )
    assert not path.exists() and not RAN


def nested_tuples(depth: int) -> bytes:
    """t = (t, t) many times, as the key of a dictionary: to hash it takes 2^depth steps."""
    return b"\x80\x04})" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(depth)) + b"K\x01s."


def announced(numel: int) -> bytes:
    """A legacy file that announces a storage of this size and has 12 bytes of it."""
    data = storage_bytes()
    at = data.index(b"K\x03Nt")
    return data[:at] + b"\x8a\x08" + numel.to_bytes(8, "little") + data[at + 2 :]


RAW = {
    "text": b"hello",
    "no end": pickle.dumps(tensors())[:-1],
    "cut": pickle.dumps(tensors())[:200],
    "no dictionary": pickle.dumps([1, 2]),
    "a number": pickle.dumps(1),
    "empty stack": b"\x80\x04.",
    "take from nothing": b"\x80\x04\x85.",
    "no mark": b"\x80\x04t.",
    "below the mark": b"\x80\x04K\x01(\x85.",
    "unknown memo": b"\x80\x04h\x07.",
    "GLOBAL alone": b"cos\nsystem\n.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02(X\x01\x00\x00\x00atQ.",
    "state for a dictionary": b"\x80\x04}}b.",
    "state for a global": b"\x80\x04ctransformer_engine.common.recipe\nDelayedScaling\n}b.",
    "name of a global from numbers": b"\x80\x04K\x01K\x02\x93.",
    "hash of nested tuples": nested_tuples(64),
    "items for a tuple": b"\x80\x04)K\x01a.",
    "entries for a list": b"\x80\x04]K\x01K\x02s.",
    "only some of the tensors": pickle.dumps({"scale_fwd": torch.ones(3)}),
    "no tensor": pickle.dumps({**tensors(), "scale_bwd": [1.0, 1.0]}),
    "shapes that do not fit": pickle.dumps({**tensors(), "scale_bwd": torch.ones(3)}),
    "an empty history": pickle.dumps({**tensors(), "amax_history_bwd": torch.ones(0, 2)}),
    "a tensor alone": pickle.dumps(torch.ones(3)),
    "a storage announced larger": pickle.dumps(
        in_tensor(Call(torch.storage._load_from_bytes, announced(1 << 50)), 0, (3,), (1,), False, None)
    ),
    "a stride beyond its storage": pickle.dumps(
        {
            **tensors(),
            "amax_history_fwd": Call(torch._utils._rebuild_tensor_v2, storage(), 0, (1, 3), (1 << 62, 1), False, None),
        }
    ),
    "cut zip": saved(tensors()).getvalue()[:-30],
}


def test_malformed_and_hostile_pickles() -> None:
    found = {name: not_refused(ArgumentError, "cannot be read safely", read_extra_state, RAW[name]) for name in RAW}
    assert not {name: said for name, said in found.items() if said}


def test_a_compressed_zip_is_not_unpacked() -> None:
    source, target = zipfile.ZipFile(saved(tensors())), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for info in source.infolist():
            archive.writestr(info.filename, bytes(1 << 20) if "/data/" in info.filename else source.read(info))
    with pytest.raises(ArgumentError, match="a compressed file"):
        read_extra_state(target)
