"""Where modules stand in their models: one name in every process, whatever holds the model there."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Module, ModuleList, Sequential

import te_torch as te
from te_core import errors
from te_core.recipe import DelayedScaling
from te_torch.module_paths import places
from tests.backends import more_without_gpu
from tests.refusals import says_more

RECIPE = DelayedScaling(amax_history_len=4)


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = linear(), torch.nn.ReLU(), linear()


class GPT(Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.blocks = torch.nn.Embedding(4, 16), ModuleList(Block() for _ in range(blocks))


class Holder(Module):
    def __init__(self, **parts: Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def linear(**options: Any) -> Any:
    return te.Linear(16, 16, device="cpu", **options)


def names(model: Module) -> list[str]:
    """The paths of all GEMM modules in a model, in its order."""
    te.prepare_state(model, RECIPE)
    modules = [m for m in model.modules() if getattr(m, "fp8_state", None) is not None]
    found = places([m.fp8_state for m in modules])
    assert all(place.owner is m for place, m in zip(found, modules, strict=True))
    return [place.path for place in found]


BLOCKS = ["ModuleList.0.fc1", "ModuleList.0.fc2", "ModuleList.1.fc1", "ModuleList.1.fc2"]


def test_a_model() -> None:
    """Names where there is a choice; the model is what chooses first."""
    assert names(GPT()) == BLOCKS
    assert names(Holder(encoder=GPT(), head=linear()))[-2:] == ["Holder.encoder.1.fc2", "Holder.head"]
    assert names(GPT(1)) == ["Block.fc1", "Block.fc2"]


def test_wrappers_and_holders_change_nothing() -> None:
    """Of the whole model, of a part, chains of them, and what holds the model beside something else."""
    model = GPT()
    held = [
        Holder(module=torch.compile(model, backend="eager")),
        Holder(model=model, metrics=torch.nn.Linear(2, 2)),
        torch.compile(model.blocks[0], backend="eager"),
        Sequential(Sequential(model.blocks[1].fc1)),
    ]
    assert names(model) == BLOCKS
    del held


def test_rings_end() -> None:
    model = GPT()
    ring, back = Holder(model=model), Holder()
    ring.back, back.ring, model.itself = back, ring, model
    te.prepare_state(model, RECIPE)
    (place,) = places([model.blocks[0].fc1.fp8_state])
    assert place.path.endswith("blocks.0.fc1")


def test_a_module_with_several_holders() -> None:
    """The longest way up counts, so no slice of a list; at two places of one model, the first name."""
    model = Holder(model=GPT(), head=linear())
    wanted = names(model)
    assert wanted[0] == "Holder.model.0.fc1"
    slices = [model.model.blocks[1:], model.model.blocks[:1], ModuleList([model.model.blocks[1].fc1, model.head])]
    assert names(model) == wanted
    many = ModuleList(linear() for _ in range(4))
    slices += [many[1:], many[2:]]
    assert names(many) == [f"ModuleList.{i}" for i in range(4)]
    tied = linear()
    twice = Holder(b=Holder(x=tied, y=linear()), a=Holder(x=tied, y=linear()))
    assert names(twice) == ["Holder.a.x", "Holder.b.y", "Holder.a.y"]
    del slices


def test_a_module_in_no_model_has_its_own_name() -> None:
    assert names(linear(name="mine")) == ["Linear mine"]
    assert names(Sequential(torch.nn.ReLU(), linear(name="mine"))) == ["Linear mine"]
    layer = te.TransformerLayer(16, 32, 2, name="first", device="cpu")
    assert "TransformerLayer first.layernorm_mlp" in names(layer)
    assert all(name.startswith("TransformerLayer first.") for name in names(layer))

    class Mine(te.Linear):
        pass

    assert names(Mine(16, 16, device="cpu", name="third")) == ["Mine third"]


@more_without_gpu
def test_modules_in_no_model_are_numbered_among_their_like() -> None:
    """Those that live, of one class and shape, in no model: not what else the process has built."""
    before = [linear() for _ in range(3)]
    del before
    other = [te.Linear(16, 32, device="cpu"), te.LayerNormLinear(16, 16, device="cpu"), GPT(), linear(name="named")]
    first, second = linear(), linear()
    third = copy.deepcopy(first)
    held = [torch.compile(second, backend="eager")]
    assert [names(m) for m in (second, first, third)] == [["Linear #2"], ["Linear"], ["Linear #3"]]
    cycle: Any = [first]
    cycle.append(cycle)
    del first, cycle  # not collected yet
    assert names(second) == ["Linear"] and names(third) == ["Linear #2"]
    layers = [te.TransformerLayer(16, 32, 2, device="cpu") for _ in range(2)]
    assert all(name.startswith("TransformerLayer #2.") for name in names(layers[1]))
    assert all(name.startswith("TransformerLayer.") for name in names(layers[0]))
    del other, held


def test_copies_have_places_of_their_own() -> None:
    model = GPT()
    names(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert names(other) == BLOCKS
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    assert names(model) == BLOCKS


def test_what_else_is_alive_disturbs_nothing() -> None:
    """A module that was not initialised, or whose constructor failed; a proxy that fails when asked; a state whose
    module is gone."""

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("asked")

    with pytest.raises(ValueError) as failed:
        te.Linear(16, -1, device="cpu")
    around = [Module.__new__(Module), te.Linear.__new__(te.Linear), Proxy(), failed]
    model, alone = GPT(), linear()
    assert names(model) == BLOCKS and names(alone) == ["Linear"]
    state = model.blocks[0].fc1.fp8_state
    model.blocks[0].fc1.fp8_state = None
    (place,) = places([state])
    assert place == (None, "")
    del around


def test_errors_can_be_made_from_one_text_and_keep_their_place() -> None:
    kinds, found = [errors._FourPartError], []
    while kinds:
        kinds += (kind := kinds.pop()).__subclasses__()
        found.append(kind)
    assert len(found) > 12 and [kind for kind in found if not says_more(kind)] == []
    model = Sequential(te.Linear(8, 8, device="cpu"))
    with pytest.raises(ValueError) as raised:
        model(torch.randn(4, 7))
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.where == raised.value.where == "0" and str(again) == str(raised.value)
