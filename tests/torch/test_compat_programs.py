"""What programs ask of a package beside its names: specs, paths, versions, metadata, where a class is of, pickles."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import te_torch as te
from te_torch import constants as c
from tests.backends import devices, more_without_gpu
from tests.covering import covering
from tests.programs import python

DATA = Path(__file__).resolve().parents[1] / "data"
AS_MAIN = "import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"


def runs(code: str, *arguments: str, path: str = "", fresh: bool = False) -> str:
    done = python(code, *arguments, path=path, fresh=fresh)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SPECS = """
import importlib, inspect, pkgutil, typing
from importlib.util import find_spec
from pathlib import Path
assert find_spec("transformer_engine") is None
import te_torch.compat
from te_torch import not_built
from te_torch.compat.contents import CONTENTS
for place in CONTENTS:
    name = f"transformer_engine.{place}".rstrip(".")
    spec, module = find_spec(name), importlib.import_module(name)
    assert spec is module.__spec__ and spec.name == module.__name__ == name and spec.loader is module.__loader__, name
    assert Path(module.__file__).is_file() and module.__file__ == spec.origin, name
    inside = f"{place}." if place else ""
    below = [other for other in (*CONTENTS, *not_built.MODULES) if other != place and other.startswith(inside)]
    assert bool(below) == hasattr(module, "__path__") == (spec.submodule_search_locations is not None), name
    assert all(Path(folder).is_dir() for folder in getattr(module, "__path__", [])), name
    assert module.__package__ == (name if below else name.rpartition(".")[0])
for absent in ("nothing", "pytorch.nothing", "pytorch.newton_schulz", "pytorch.module.linear.nothing"):
    try:
        assert find_spec(f"transformer_engine.{absent}") is None, absent
    except ModuleNotFoundError as error:  # what Python says of a submodule of a module
        assert absent == "pytorch.module.linear.nothing", absent

import transformer_engine as package
import transformer_engine.pytorch as te
assert Path(package.__path__[0]) == Path(package.__file__).parent
assert importlib.reload(te) is te and te.Linear is te_torch.Linear
assert not list(pkgutil.iter_modules(te.custom_recipes.__path__))
assert inspect.getsource(te.Linear).startswith("class Linear") and "def forward" in inspect.getsource(te.Linear)
assert inspect.getsource(te.RMSNorm).startswith("class RMSNorm")
hints = typing.get_type_hints(package.common.recipe.DelayedScaling)
assert hints["amax_history_len"] is int and hints["fp8_format"] is package.common.recipe.Format
print("ok")
"""


METADATA = """
from importlib import metadata
names = ("transformer-engine", "transformer_engine", "Transformer.Engine")

def absent():
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        raise AssertionError(name)
    assert "transformer_engine" not in metadata.packages_distributions()
    assert "transformer-engine" not in [d.metadata["Name"] for d in metadata.distributions()]

absent()
import te_torch.compat
for name in names:
    assert metadata.version(name) == "2.20.0" and metadata.metadata(name)["Name"] == "transformer-engine"
found = metadata.distribution("transformer-engine")
assert found.version == "2.20.0" and found.requires is None and not found.entry_points and not found.files
assert metadata.packages_distributions()["transformer_engine"] == ["transformer-engine"]
assert [d.metadata["Name"] for d in metadata.distributions()].count("transformer-engine") == 1
assert metadata.version("numpy") != "2.20.0" and metadata.entry_points() is not None
assert not list(metadata.distributions(name="transformer")), "the alias answers for its own name alone"
te_torch.compat.uninstall()
absent()
print("ok")
"""


UNINSTALL = """
import inspect, sys, pickle
from importlib.util import find_spec
import te_torch, te_core.recipe
classes = [te_torch.Linear, te_torch.Float8Tensor, te_torch.DType, te_core.recipe.DelayedScaling, te_core.recipe.Format]
before = [(cls.__module__, cls.__reduce_ex__, vars(cls).get("__reduce_ex__")) for cls in classes]
plain = pickle.dumps(te_core.recipe.DelayedScaling())
import te_torch.compat
te_torch.compat.install()
assert sum(finder is te_torch.compat._finder for finder in sys.meta_path) == 1, "twice is once"
te_torch.compat.uninstall()
te_torch.compat.uninstall()
assert [(cls.__module__, cls.__reduce_ex__, vars(cls).get("__reduce_ex__")) for cls in classes] == before
assert inspect.getsource(te_torch.Linear).startswith("class Linear")
assert find_spec("transformer_engine") is None and not [n for n in sys.modules if n.startswith("transformer_engine")]
assert pickle.dumps(te_core.recipe.DelayedScaling()) == plain
te_torch.compat.install()
import transformer_engine.pytorch as te
assert te.Linear is te_torch.Linear and te.Linear.__module__ == "transformer_engine.pytorch.module.linear"
print("ok")
"""


CLASSES = """
import importlib
import te_torch, te_core.recipe
home = {cls: cls.__module__ for cls in vars(te_torch).values() if isinstance(cls, type)}
assert all(name.startswith("te_torch") for name in home.values()), "without the alias nothing changes"
import te_torch.compat
from te_torch.compat.contents import CONTENTS
seen = set()
for place, names in CONTENTS.items():
    for name, cls in names.items():
        if not isinstance(cls, type) or name in ("dist_group_type", "_FormatHelper"):
            continue
        part = next((p for p in ("common.recipe", "debug.pytorch") if place.startswith(p)), "pytorch")
        part = "common.recipe" if cls.__module__.endswith("common.recipe") else part
        assert cls.__module__.startswith(f"transformer_engine.{part}"), (name, cls.__module__)
        assert getattr(importlib.import_module(cls.__module__), cls.__name__) is cls, name
        seen.add(cls)
assert len(seen) > 50
import transformer_engine.pytorch as te
import transformer_engine.common.recipe as recipe
said = {
    te.Linear: "pytorch.module.linear", te.LayerNorm: "pytorch.module.layernorm", te.RMSNorm: "pytorch.module.rmsnorm",
    te.LayerNormLinear: "pytorch.module.layernorm_linear", te.TransformerLayer: "pytorch.transformer",
    te.DotProductAttention: "pytorch.attention.dot_product_attention.dot_product_attention",
    te.Float8Tensor: "pytorch.tensor.float8_tensor", recipe.Format: "common.recipe",
    te.Float8TensorStorage: "pytorch.tensor.storage.float8_tensor_storage", te.DType: "pytorch.constants",
}
for cls, module in said.items():
    assert cls.__module__ == f"transformer_engine.{module}", cls
layer = te_torch.TransformerLayer(64, 128, 4, fuse_qkv_params=True, device="cpu")  # reached through te_torch: one class
assert all("transformer_engine.pytorch" in m.__module__ for m in layer.modules() if type(m).__name__ in te.__all__)

class Mine(te.Linear): pass
assert Mine.__module__ == "__main__"
print("ok")
"""


# One object of every kind, through pickle's protocols, torch.save, copies.
PICKLES = """
import copy, io, pickle, pickletools, sys
import torch
if sys.argv[1] == "alias":
    import te_torch.compat
import te_torch as te
from te_core import recipe as r

class Mine(te.Linear):
    pass

def objects():
    torch.manual_seed(0)
    fp8 = r.DelayedScaling(amax_history_len=4)
    model = torch.nn.Sequential(
        te.LayerNormLinear(32, 32), te.Linear(32, 32), te.LayerNormMLP(32, 64), te.RMSNorm(32), te.LayerNorm(32),
        Mine(32, 32),
    ).to("cpu")
    layer = te.TransformerLayer(32, 64, 2, device="cpu", fuse_qkv_params=True, hidden_dropout=0, attention_dropout=0)
    for part, x in ((model, torch.randn(16, 32)), (layer, torch.randn(16, 1, 32))):
        with te.autocast(recipe=fp8):
            part(x).sum().backward()
    with te.quantized_model_init(recipe=fp8):
        held = te.Linear(32, 32, device="cpu")
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")
    internal = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    internal.internal = True
    return {
        "model": model, "layer": layer, "held": held, "quantizer": quantizer,
        "tensors": [quantizer(torch.randn(16, 32)), te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(32, 32)),
                    internal(torch.randn(32, 32))],
        "state": held.state_dict(),
        "recipes": recipes(),
        "rest": [r.Format.HYBRID, te.DType.kFloat8E4M3, r.MMParams(), te.QuantizerRole("linear", "input"),
                 te.DelayedScalingRequest(), te.InferenceParams(2, 16, 2, 16, torch.float32)],
    }

def outputs(made):
    x = torch.linspace(-1, 1, 512).view(16, 32)
    with torch.no_grad(), te.autocast(recipe=r.DelayedScaling(amax_history_len=4)):
        seen = [made["model"](x), made["layer"](x.view(16, 1, 32)), made["held"](x)]
    assert made["recipes"] == recipes() and made["rest"][:4] == RESTS, made["rest"]
    return torch.cat([t.flatten() for t in (*seen, *(t.dequantize() for t in made["tensors"]))])

def recipes():
    return [r.DelayedScaling(amax_history_len=4), r.Float8CurrentScaling(), r.MXFP8BlockScaling(),
            r.NVFP4BlockScaling(), r.Float8BlockScaling()]

RESTS = [r.Format.HYBRID, te.DType.kFloat8E4M3, r.MMParams(), te.QuantizerRole("linear", "input")]

def names(data):
    found = " ".join(str(arg) for _, arg, _ in pickletools.genops(data) if isinstance(arg, str))
    assert "transformer_engine" not in found, found[:1000]

what, file = sys.argv[2:4]
if what == "write":
    made = objects()
    expected = outputs(made)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(made, protocol)
        names(data)
        assert torch.equal(outputs(pickle.loads(data)), expected), protocol
    assert torch.equal(outputs(copy.deepcopy(made)), expected)
    assert copy.copy(made["recipes"][0]) == made["recipes"][0] and copy.copy(RESTS[0]) is RESTS[0]
    assert type(copy.copy(made["quantizer"])) is te.Float8CurrentScalingQuantizer
    assert type(copy.deepcopy(made["model"][5])) is Mine
    torch.save(made | {"expected": expected}, file)
    torch.save(made["state"], file + ".state")
    torch.save(made["tensors"], file + ".tensors")
else:
    made = torch.load(file, weights_only=False)
    assert torch.equal(outputs(made), made["expected"])
    assert type(made["model"][5]) is Mine
    state = torch.load(file + ".state", weights_only=True)
    assert torch.equal(state["weight"].dequantize(), made["held"].weight.dequantize())
    for mine, theirs in zip(torch.load(file + ".tensors", weights_only=True), made["tensors"]):
        assert type(mine) is type(theirs) and torch.equal(mine.dequantize(), theirs.dequantize())
        assert type(mine._quantizer) is type(theirs._quantizer)
print("ok")
"""


@covering(writer=["alias", "plain"], reader=["plain", "alias"])
def test_pickles_name_our_modules(writer: str, reader: str, tmp_path: Path) -> None:
    """Whatever a class says: files move between processes with the alias and without."""
    (tmp_path / "main.py").write_text(PICKLES)
    for who, what in ((writer, "write"), (reader, "read")):
        assert "ok" in runs(AS_MAIN, str(tmp_path / "main.py"), who, what, str(tmp_path / "all.pt"))


SPAWN = """
import sys
import torch
import torch.multiprocessing as mp

def child(model, recipe, x, results):
    assert "transformer_engine" not in sys.modules, "the child has no alias"
    import te_torch
    with torch.no_grad(), te_torch.autocast(recipe=recipe):
        results.put(model(x).numpy())

if __name__ == "__main__":
    import te_torch.compat
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    model, recipe, x = te.Linear(32, 32, device="cpu"), DelayedScaling(), torch.randn(16, 32)
    with te.autocast(recipe=recipe):
        model(x).sum().backward()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=child, args=(model, recipe, x, results))
    process.start()
    y = results.get()
    process.join()
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(model(x), torch.from_numpy(y))
    before = model.fp8_state.scale_fwd.clone()
    with te.autocast(recipe=recipe):
        model(100 * x).sum().backward()
    assert not torch.equal(model.fp8_state.scale_fwd, before), "an update writes where the scales are now"
    print("ok")
"""


def test_modules_go_to_spawned_processes(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SPAWN)
    assert "ok" in runs(AS_MAIN, str(tmp_path / "main.py"))


NAMES = """
import importlib, sys
from te_torch import not_built
import te_torch, te_torch.compat

def documented(text):
    place = ""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            if not line.startswith(" "):
                place, _, line = line.partition(":")
            yield from ((place, name) for name in line.split())

def found(path):  # a module, or a class of one
    try:
        return importlib.import_module(path), True
    except ModuleNotFoundError as error:
        module, _, name = path.rpartition(".")
        if type(error) is not ModuleNotFoundError:
            raise
        return getattr(importlib.import_module(module), name), False

there, missing = 0, []
for place, name in documented(open(sys.argv[1]).read()):
    path = f"transformer_engine.{place}".rstrip(".")
    gone = next((p for p in not_built.MODULES if place == p or place.startswith(p + ".")), None)
    if gone:
        try:
            importlib.import_module(path)
        except ModuleNotFoundError as error:
            assert error.do == not_built.MODULES[gone][1] and error.name.startswith("transformer_engine."), error
            continue
        raise AssertionError(path)
    module, imported = found(path)
    if hasattr(module, name):
        there += 1
        refuses = not_built.REFUSING.get(place, ((), None))
        if name in refuses[0]:
            try:
                getattr(module, name)(3, out_features=4)
            except RuntimeError as error:
                assert error.operation == f"{path}.{name}" and error.do == refuses[1], error
            else:
                raise AssertionError(f"{path}.{name}")
        assert name not in not_built.NAMES.get(place, {}), f"{place}.{name} is built: it leaves the table"
        continue
    do = not_built.NAMES.get(place, {}).get(name) or not_built.MODULES.get(f"{place}.{name}".lstrip("."), ["", None])[1]
    if do is None:
        missing.append(f"{place}.{name}")
        continue
    ours = {"pytorch": te_torch, "pytorch.utils": te_torch.utils}.get(place)
    tried = [(path, module)] + ([(ours.__name__, ours)] if ours else [])
    for own, where in tried if imported else ():
        assert not hasattr(where, name)
        try:
            getattr(where, name)
        except AttributeError as error:
            assert error.operation == f"{own}.{name}" and error.do == do, error
        try:
            exec(f"from {own} import {name}")
        except ModuleNotFoundError as error:  # by which programs guard the import of a package, as by ImportError
            assert error.operation == f"{own}.{name}" and error.do == do, error
        else:
            raise AssertionError(name)
assert not missing, missing
assert there > 200, there

known = {p + "." + n for p, n in documented(open(sys.argv[1]).read())}
tables = {**not_built.NAMES, **{place: names for place, (names, _) in not_built.REFUSING.items()}}
listed = {f"{place}.{name}" for place, names in tables.items() for name in names}
assert listed <= known, listed - known
# Under its own name te_torch has what is documented at the top; submodules that only the alias has say so.
assert not [name for name in not_built.BEHIND_ALIAS if hasattr(te_torch, name)]
for name in (n for p, n in documented(open(sys.argv[1]).read()) if p == "pytorch" and not n.startswith("_")):
    if hasattr(te_torch, name):
        continue
    try:
        getattr(te_torch, name)
    except AttributeError as error:
        assert error.do, error
        assert (name in not_built.BEHIND_ALIAS) == ("transformer_engine.pytorch." + name in error.do), error
assert all(not name.startswith("_") for name in te_torch.__all__)
for module in (te_torch, te_torch.constants):
    try:
        module.no_such_name
    except AttributeError as error:
        assert "no_such_name" in str(error) and type(error) is AttributeError
print("ok")
"""


def test_every_documented_name_is_there_or_in_the_table() -> None:
    assert "ok" in runs(NAMES, str(DATA / "documented_names.txt"))


def test_the_page_shows_the_table() -> None:
    from te_torch import not_built

    page = (DATA.parents[1] / "docs" / "guides" / "04-coming-from-transformer-engine.md").read_text()
    assert "\n".join(not_built.table()) in page, "make docs"


WITHOUT_TORCH = """
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Block())
for name in ("te_torch", "te_torch.compat"):
    try:
        __import__(name)
    except ImportError as error:
        assert "pip install" in error.do and "torch" in error.do and "torch" in error.got, error
        assert type(error).__name__ == "MissingPackageError" and "LibraryError" in str(type(error).__mro__)
    else:
        raise AssertionError(name)
import te_core
print("ok")
"""


def test_without_torch_the_import_names_the_extra() -> None:
    assert "ok" in runs(WITHOUT_TORCH, fresh=True)


STAND_INS = """
import importlib, pickle, sys
from importlib.util import find_spec
import te_torch.compat
assert "transformer_engine_torch" not in sys.modules
import torch, transformer_engine as te
from transformer_engine.pytorch.ops import Sequential, FusibleOperation
from transformer_engine.pytorch.router import RoutingMapFormat, fused_moe_aux_loss
import transformer_engine_torch as tex

class Fused(torch.nn.Module):
    def make(self) -> te.pytorch.ops.Sequential: ...

from transformer_engine.pytorch.quantization import RecipeState
try:
    RecipeState.create(te.common.recipe.DelayedScaling(), mode="forward")
except AttributeError as error:
    assert "fp8_state" in error.do
assert te.pytorch.fp8.RecipeState is RecipeState and not hasattr(RecipeState, "create")
assert tex.DType is te.pytorch.DType and not hasattr(tex, "rmsnorm_fwd") and find_spec("transformer_engine_torch")
assert not isinstance(te.pytorch.Linear(8, 8, device="cpu"), FusibleOperation)
assert RoutingMapFormat(1).name == "BITMAP_U8" and pickle.loads(pickle.dumps(RoutingMapFormat(0))) == 0
assert te.pytorch.ops.is_op_fuser_grouped_tensor_path_supported(None, torch.bfloat16) is torch.cuda.is_available()
try:
    tex.rmsnorm_fwd
except AttributeError as error:
    assert "te_core.ops" in error.do
for absent in ("pytorch.ops.nothing", "pytorch.router.nothing", "pytorch.newton_schulz"):
    try:
        importlib.import_module(f"transformer_engine.{absent}")
    except ModuleNotFoundError:
        continue
    raise AssertionError(absent)
te_torch.compat.uninstall()
assert "transformer_engine_torch" not in sys.modules and find_spec("transformer_engine_torch") is None
print("ok")
"""


OTHERS = """
import te_torch.compat
import transformer_engine_torch, nvdlfw_inspect
print(transformer_engine_torch.real, nvdlfw_inspect.real)
"""


@more_without_gpu
def test_packages_of_others_are_found_where_they_are(tmp_path: Path) -> None:
    for name in ("transformer_engine_torch", "nvdlfw_inspect"):
        done = python(f"import te_torch.compat\nimport {name}")
        # The extra `debug` brings one of them, and the alias has something of the other.
        there = find_spec(name) is not None or name == "transformer_engine_torch"
        assert there or (f"NotBuiltImportError: {name}" in done.stderr and "To do:" in done.stderr)
        (tmp_path / f"{name}.py").write_text("real = 'theirs'")
    assert runs(OTHERS, path=str(tmp_path)).split() == ["theirs", "theirs"]


LATE = """
import sys, types, warnings
sys.modules["peft"] = types.ModuleType("peft")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import te_torch.compat
assert [str(w.message) for w in seen if "peft" in str(w.message)], seen
print("ok")
"""


RECIPES = """
import warnings
import te_torch.compat
from transformer_engine.common import recipe

def seen(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(w.message) for w in caught if w.filename == __file__ or w.filename == "<string>"]

made, said = seen(lambda: recipe.DelayedScaling(override_linear_precision=(False, False, True), interval=1, margin=2))
assert made == recipe.DelayedScaling(margin=2) and len(said) == 1, said
parts = ("DelayedScaling", "interval=1", "override_linear_precision=(False, False, True)")
assert all(part in said[0] for part in parts), said
for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"):
    made, said = seen(lambda: getattr(recipe, name)(amax_history_len=16))
    assert made == getattr(recipe, name)() and len(said) == 1 and "amax_history_len=16" in said[0], said
made, said = seen(lambda: recipe.CustomRecipe(print, margin=1))
assert made.qfactory is print and len(said) == 1
assert seen(lambda: recipe.DelayedScaling(0, recipe.Format.E4M3))[1] == []
refusing = (recipe.CustomRecipe, {"later": 1}), (recipe.MMParams, {"split": True}), (recipe.QParams, {"pow2": 1})
for kind, given in refusing:
    try:
        seen(lambda: kind(**given))
    except TypeError:
        continue
    raise AssertionError("no recipes, or none without its factory")
print("ok")
"""


PROGRAMS = {
    "modules have specs, files and paths": SPECS,
    "metadata while it is installed": METADATA,
    "nothing is left after uninstalling": UNINSTALL,
    "classes say the documented module": CLASSES,
    "names that annotations need can be imported": STAND_INS,
    "a program that was imported first is named": LATE,
    "keywords of older releases and other recipes are dropped with a warning": f"__file__ = '<string>'\n{RECIPES}",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=more_without_gpu if n.startswith("metadata") else ()) for n in PROGRAMS]
)
def test_programs(name: str) -> None:
    assert "ok" in runs(PROGRAMS[name])


def test_the_order_of_gated_weights() -> None:
    gate, linear = torch.arange(12.0).view(6, 2), -torch.arange(12.0).view(6, 2) - 1
    both = torch.cat([gate, linear])
    turned = te.interleave_glu_tensor(both, 2)
    assert torch.equal(turned, torch.cat([gate[:2], linear[:2], gate[2:4], linear[2:4], gate[4:], linear[4:]]))
    assert torch.equal(te.deinterleave_glu_tensor(turned, 2), both)
    assert torch.equal(te.interleave_glu_tensor(both, 6), both)
    assert te.interleave_glu_tensor(both[:0], 4).shape == (0, 2)
    for size in (0, -1, 4):
        for turn in (te.interleave_glu_tensor, te.deinterleave_glu_tensor):
            with pytest.raises(ValueError, match="interleave_size"):
                turn(both, size)


@pytest.mark.parametrize("device", devices())
def test_constants(device: str) -> None:
    assert c.dist_group_type is torch.distributed.ProcessGroup
    assert vars(c.FP8FwdTensorIdx)["GEMM1_INPUT"] == 0 and c.FP8FwdTensorIdx.GEMM3_OUTPUT == 8
    assert c.FP8BwdTensorIdx.GRAD_OUTPUT1 == 0 and c.FP8BwdTensorIdx.GRAD_INPUT3 == 5
    assert c.GemmParallelModes == ("row", "column", None) and len(c.QKVLayouts) == 25
    assert (c.MXFP8_BLOCK_SCALING_SIZE, c.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)
    assert torch.empty(1, dtype=c.TE_DType_To_Torch[c.DType.kBFloat16], device=device).dtype is torch.bfloat16
