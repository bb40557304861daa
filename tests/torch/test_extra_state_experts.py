"""`_extra_state` of grouped experts: one for each, as Megatron-core cuts and joins them."""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch.base.extra_state import KEYS, read_extra_state
from tests.programs import python


class Plain(pickle.Unpickler):
    """Allows what Megatron-core 0.19 allows, as far as it is not the peer's."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in {
            ("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes"),
            ("collections", "OrderedDict"),
        }, (module, name)  # fmt: skip
        return super().find_class(module, name)


class ProgramsScaling(DelayedScaling):
    """A recipe's class of a program, as Megatron-core has one: no file names it."""


class Experts(te.GroupedLinear):
    """Takes an entry for each expert, which it joins before it is loaded."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts, 32, 48, bias=False, device="cpu", params_dtype=torch.float32)
        self._register_load_state_dict_pre_hook(Experts.join, with_module=True)

    def cut(self) -> list[torch.Tensor]:
        """The entries: columns by slot, then by expert."""
        entry = pickle.loads(self.state_dict(keep_vars=True)["_extra_state"].numpy().tobytes())
        rows, parts = self.fp8_meta["recipe"].amax_history_len, []
        for expert in range(self.num_gemms):
            part = {"recipe": entry["recipe"], "extra_fp8_variables": {**entry["extra_fp8_variables"], "num_gemms": 1}}
            for way, slots in (("fwd", 3), ("bwd", 2)):
                part[f"scale_{way}"] = entry[f"scale_{way}"].view(slots, -1)[:, expert]
                part[f"amax_history_{way}"] = entry[f"amax_history_{way}"].view(rows, slots, -1)[:, :, expert]
            parts.append(torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8))
        return parts

    def join(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        taken = [state_dict.pop(f"{prefix}_extra_state{i or ''}") for i in range(self.num_gemms)]
        if not taken[0].numel():
            return
        parts = [Plain(io.BytesIO(part.numpy().tobytes())).load() for part in taken]
        self.fp8_meta["recipe"] = parts[0]["recipe"]
        recipe = self.fp8_meta["recipe"]
        assert type(recipe) is DelayedScaling
        rows, joined = recipe.amax_history_len, {**parts[0], "recipe": recipe}
        for name in KEYS:
            columns = torch.cat([part[name].reshape(-1, 1) for part in parts], dim=1)
            joined[name] = columns.view(-1) if name.startswith("scale") else columns.view(rows, -1)
        state_dict[f"{prefix}_extra_state"] = torch.frombuffer(bytearray(pickle.dumps(joined)), dtype=torch.uint8)


@pytest.mark.parametrize("alias", [False, True])
def test_entries_of_experts_go_to_other_ranks(alias: bool) -> None:
    """Saved by four experts of one rank, loaded by two and two: each goes on with its own scales and maxima."""
    import te_torch.compat as compat

    (compat.install if alias else compat.uninstall)()
    try:
        _experts_to_other_ranks()
    finally:
        compat.uninstall()


def _experts_to_other_ranks() -> None:
    recipe, sizes = ProgramsScaling(amax_history_len=3), [16, 16, 16, 16]
    torch.manual_seed(0)
    whole, x = Experts(4), torch.randn(64, 32) * torch.arange(1, 5).repeat_interleave(16)[:, None]
    with torch.no_grad():
        for i in range(4):
            whole.get_parameter(f"weight{i}").mul_(i + 1)

    def step(module: Experts, rows: slice, splits: list[int]) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            y: torch.Tensor = module(x[rows], splits)
        (y * torch.arange(1.0, 65)[rows, None]).sum().backward()
        return y.detach()

    fresh = whole.state_dict()["_extra_state"]
    assert fresh.dtype is torch.uint8 and not fresh.numel() and "_extra_state" not in whole.state_dict()
    saved = pickle.loads(pickle.dumps(whole.state_dict()))
    assert type(saved) is collections.OrderedDict and saved._metadata == whole.state_dict()._metadata
    assert list(saved) == [f"weight{i}" for i in range(4)]
    for _ in range(2):
        step(whole, slice(None), sizes)
    parts, weights = whole.cut(), whole.state_dict()
    state = {name: getattr(whole.fp8_state, name).clone() for name in KEYS}
    seen = step(whole, slice(None), sizes)
    assert b"ProgramsScaling" not in pickle.dumps(whole.fp8_state)
    own = {f"weight{i}": weights[f"weight{i}"] for i in range(4)}
    own |= {f"_extra_state{i or ''}": parts[i] for i in range(4)}
    assert whole.load_state_dict(own) == ([], [])
    assert all(torch.equal(getattr(whole.fp8_state, name), t) for name, t in state.items())
    for rank in range(2):
        half = Experts(2)
        entries = {f"weight{i}": weights[f"weight{2 * rank + i}"] for i in range(2)}
        entries |= {f"_extra_state{i or ''}": parts[2 * rank + i] for i in range(2)}
        assert half.load_state_dict(entries) == ([], [])
        for name in KEYS:
            cut = state[name].unflatten(-1, (4, -1))[..., 2 * rank : 2 * rank + 2, :].flatten(-2)
            assert torch.equal(getattr(half.fp8_state, name), cut), name
        assert torch.equal(step(half, slice(32 * rank, 32 * rank + 32), [16, 16]), seen[32 * rank : 32 * rank + 32])


PEER = """
import pickle, sys
import torch
import te_torch.compat
from transformer_engine.common.recipe import DelayedScaling, Format
sys.path.insert(0, sys.argv[1])
from tests.golden import load
entry = load("extra_state")["Linear/delayed/extra_state/_extra_state"]
found = pickle.loads(entry.numpy().tobytes())
assert type(found["recipe"]) is DelayedScaling and found["recipe"].fp8_format is Format.HYBRID, found["recipe"]
assert found["recipe"].amax_history_len == len(found["amax_history_fwd"]) == 4
print("ok")
"""


def test_a_program_unpickles_the_peers_entries_behind_the_alias() -> None:
    """As Megatron-core does before it joins those of experts."""
    done = python(PEER, str(Path(__file__).resolve().parents[2]))
    assert "ok" in done.stdout.splitlines(), done.stderr[-2000:]


def test_megatrons_own_name_of_what_reads_a_storage() -> None:
    state = {name: torch.arange(3.0 if name == "scale_fwd" else 2.0) for name in ("scale_fwd", "scale_bwd")}
    state |= {"amax_history_fwd": torch.ones(2, 3), "amax_history_bwd": torch.ones(2, 2)}
    entry = pickle.dumps({"recipe": None, **state}, protocol=3)
    theirs = entry.replace(
        b"ctorch.storage\n_load_from_bytes\n", b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"
    )
    assert theirs != entry
    found = read_extra_state(theirs)
    assert found is not None and all(torch.equal(found[name], t) for name, t in state.items())


def test_entries_of_experts_without_a_history() -> None:
    module = te.GroupedLinear(2, 32, 32, bias=False, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()):
        module(torch.randn(32, 32), [16, 16])
    entry = module.state_dict(prefix="a.")["a._extra_state"]
    assert pickle.loads(entry.numpy().tobytes())["extra_fp8_variables"]["num_gemms"] == 2
    assert read_extra_state(entry) is None
    with pytest.raises(KeyError):
        module.state_dict(prefix="a.")["_extra_state"]
