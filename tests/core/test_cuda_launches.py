"""The CUDA backend without a GPU: every operation plans, and launches our kernels as they declare their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import dtypes, libraries, ops
from te_core.backends.cuda import backend
from te_core.backends.meta import backend as meta
from te_core.errors import ArgumentError, LibraryError
from te_core.kernels import compiler, loader
from te_core.ops.loss import LossTerms
from te_core.ops.optimizer import AdamRule, AdamTensors, SgdRule, SgdTensors
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_core.tensor import Tensor, cuda_device
from tests.core.face import Right, operations, tensor
from tests.core.fake_cuda import Machine
from tests.core_calls import more_operations

#: Operations that cuDNN computes, in other dtypes than these: test_cudnn_*.py.
ATTENTION = ("attention_forward", "attention_backward", "attention_fp8_forward", "attention_fp8_backward")
Job = tuple[str, tuple[tuple[str, Any], ...]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Machine:
    for operation in ATTENTION:
        monkeypatch.setattr(backend, f"plan_{operation}", meta.plan_gemm)
        monkeypatch.setattr(backend, operation, meta.add)
    return Machine(monkeypatch, tmp_path)


def launched(machine: Machine, call: Right) -> list[str]:
    """The kernels and products that it launches, kernels of a size that a GPU takes."""
    with machine.noting() as events:
        call.run()
    names = []
    for event in events:
        if event.kind == "launch":
            entry, _, (*grid, gx, gy, gz), shared, *_ = event.what
            assert min(grid) >= 1 and 1 <= gx * gy * gz <= 1024 and 0 <= shared <= 232448, event.what
            names.append(entry)
        elif event.kind == "gemm":
            names.append("gemm")
    return names


def jobs() -> set[Job]:
    """What was compiled: kernels with their constants."""
    return {(name, tuple(constants)) for name, _, _, *constants in cuda_device(0).of(loader.Loaded).kernels}


def every(rt: Runtime) -> dict[str, Right]:
    """All right calls, with their options and formats, and those of forms and sizes that have kernels of their own."""
    found = {**operations(rt), **more_operations(rt)}
    for name in ("update_scales", "plan_update", "update_scales one row", "gemm_grouped wgrad", "gemm_grouped fprop"):
        del found[name]  # these update nothing but states, or read offsets of a memory that holds none
    x, vector, wide = tensor(rt, 32, 32), tensor(rt, 32), tensor(rt, 2, 32768)
    current = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True)
    blocks = Cast(Format(dtypes.float8_e4m3, "block"), rowwise=True, columnwise=True)
    many, rms = rt.tensor(np.zeros((600, 4), "int32")), {"kind": "RMSNorm", "eps": 1e-5}
    agreed = current.scaled_by(tensor(rt, 2))
    calls: dict[str, Any] = {
        "quantize current": (ops.quantize, (x, current), {}),
        "quantize maxima and sums": (ops.quantize, (x, agreed), {"column_sum": vector}),
        "norm current": (ops.norm_forward, (x, vector, None), {**rms, "cast": current}),
        "norm in blocks": (ops.norm_forward, (x, vector, None), {**rms, "cast": blocks}),
        "norm wide": (ops.norm_backward, (wide, wide, tensor(rt, 32768), None, tensor(rt, 2)), {"kind": "RMSNorm"}),
        "activation current": (ops.activation_backward, (x, tensor(rt, 32, 64), "swiglu"), {"cast": current}),
        "activation in blocks": (ops.activation_backward, (x, x, "gelu"), {"cast": blocks, "column_sum": vector}),
        "map of many tokens": (ops.mask_row_map, (many,), {}),
        "permute long rows": (ops.permute, (tensor(rt, 600, 6000), ops.mask_row_map(rt, many)), {"rows": 64}),
    }
    return {**found, **{name: Right(call, (rt, *args), options) for name, (call, args, options) in calls.items()}}


def test_every_operation_launches(machine: Machine) -> None:
    for name, call in every(machine.runtime()).items():
        first = launched(machine, call)
        assert first or name.partition(" ")[0] in ATTENTION, name
        assert launched(machine, call) == first, name  # by the plan that is there now


def test_groups_in_one_launch(machine: Machine) -> None:
    """As many groups as a table has room for, here of 4 KB; a gradient that nobody wants is no address."""
    rt, bf16 = machine.runtime(), dtypes.bfloat16
    x, dy, w = tensor(rt, 32, 64, dtype=bf16), tensor(rt, 32, 48, dtype=bf16), tensor(rt, 48, 64, dtype=bf16)
    for groups, launches in ((2, 1), (200, 13)):
        offsets = rt.tensor(np.zeros(groups + 1, np.int32))
        for call in (
            Right(ops.gemm_grouped, (rt, x, [w] * groups, dy, offsets), {"trans_b": True, "bias": [None] * groups}),
            Right(ops.gemm_grouped, (rt, dy, [w] * groups, x, offsets), {}),
            Right(ops.gemm_grouped, (rt, dy, x, [w, *[None] * (groups - 1)], offsets), {"trans_a": True}),
        ):
            assert launched(machine, call) == ["grouped_gemm"] * launches


@pytest.mark.parametrize("scaling", ["delayed", "current", "block"])
def test_fp8_groups_in_one_launch(machine: Machine, scaling: str) -> None:
    """Rows are quantized in one launch, with current scaling in two, and multiplied in one for each table."""
    rt, e4m3, kind = machine.runtime(), dtypes.float8_e4m3, "block" if scaling == "block" else "tensor"
    x, dy = tensor(rt, 40, 64, dtype=dtypes.bfloat16), tensor(rt, 40, 48, dtype=dtypes.bfloat16)
    for groups, launches in ((2, 1), (40, 3)):
        offsets, w = rt.tensor(np.zeros(groups + 1, np.int32)), tensor(rt, 48, 64, dtype=dtypes.bfloat16)
        state = {"scale": tensor(rt, 1), "amax": tensor(rt, 1)} if scaling == "delayed" else {}
        casts = [Cast(Format(e4m3, kind), rowwise=True, columnwise=True, **state)] * groups
        rows = Right(ops.quantize_rows, (rt, x, offsets, casts), {})
        name = "quantize_block_rows" if scaling == "block" else "quantize_rows"
        assert launched(machine, rows) == [name] * (1 + (scaling == "current"))
        qx, qdy = (ops.quantize_rows(rt, t, offsets, casts) for t in (x, dy))
        form = Format(e4m3, kind, tiled=scaling == "block")
        qw = [ops.quantize(rt, w, Cast(form, rowwise=True, columnwise=True))] * groups
        for call in (
            Right(ops.gemm_grouped, (rt, qx, qw, dy, offsets), {"trans_b": True, "bias": [None] * groups}),
            Right(ops.gemm_grouped, (rt, qdy, qw, x, offsets), {}),
            Right(ops.gemm_grouped, (rt, qdy, qx, [w, *[None] * (groups - 1)], offsets), {"trans_a": True}),
        ):
            assert launched(machine, call) == ["grouped_gemm"] * launches


def test_launches_for_many(machine: Machine) -> None:
    """Of matrices of one width: one for all, the maxima one more each, and one that finishes all of these."""
    rt = machine.runtime()
    large = [tensor(rt, 64, 4096), tensor(rt, 16, 4096), tensor(rt, 8, 4096)]
    outs = ops.quantize_many(rt, large, [Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False)] * 3)
    maxima = tensor(rt, 3)
    for cast, launches in (
        (Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False, scale=tensor(rt, 1), amax=tensor(rt, 1)), 1),
        (Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False).scaled_by(maxima), 1),
        (Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False), 2),
    ):
        call = Right(ops.quantize_many, (rt, large, [cast] * 3), {"outs": outs})
        assert launched(machine, call) == ["quantize_grouped"] * launches
    assert launched(machine, Right(ops.amax_many, (rt, large), {"out": maxima})) == ["amax"] * 3 + ["amax_finish"]
    small = [tensor(rt, 2), tensor(rt, 3)]
    assert launched(machine, Right(ops.amax_many, (rt, small), {})) == ["amax"] * 2


def test_given_maxima_are_not_looked_for(machine: Machine) -> None:
    """What ranks have agreed on saves the launch that finds a maximum; column sums still come by one of their own."""
    calls = every(machine.runtime())
    for name, wanted in (
        ("quantize maxima", ["quantize"]),
        ("quantize maxima and sums", ["quantize", "column_sum", "quantize"]),
        ("quantize nvfp4 maxima", ["quantize_nvfp4"]),
    ):
        found = launched(machine, calls[name])
        assert [n for n in found if "sum" not in n] == [n for n in wanted if "sum" not in n], name


def test_what_a_plan_is_called(machine: Machine) -> None:
    """The kernels of a launch, by the facts of its spec."""
    rt = machine.runtime()
    x, gamma, one = tensor(rt, 32, 64), tensor(rt, 64), tensor(rt, 1)
    cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, scale=one, amax=one)
    ops.norm_forward(rt, x, gamma, None, kind="RMSNorm", eps=1e-5, cast=cast)
    (plan,) = [p for p in rt.plans.values() if getattr(p, "family", "").startswith("norm_forward")]
    assert plan.family == "norm_forward_transposed" and not plan.partials
    constants = [dict(c) for name, c in jobs() if name == "norm_forward"]
    assert [(c["CAST"], c["COLUMNWISE"], c["AMAX"], c["VALUES"], c["KIND"]) for c in constants] == [
        (1, 1, "RAISE", 0, "RMS")
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The kernels that are asked for, with their constants."""
    found: list[tuple[str, dict[str, Any]]] = []
    get = loader.get

    def noting(rt: Runtime, name: str, *, entry: str | None = None, args: str, **constants: Any) -> Any:
        found.append((entry or name, constants))
        return get(rt, name, entry=entry, args=args, **constants)

    monkeypatch.setattr(loader, "get", noting)
    return found


BOTH, ROWS, COLUMNS = (True, True), (True, False), (False, True)
#: A format or a scaling, the copies, whether columns are summed: the kernels and what is chosen of them.
CASTS = [
    ("delayed", ROWS, False, [("quantize", {"SCALING": "GIVEN_SCALE", "TALL": False})]),
    ("delayed", BOTH, False, [("quantize", {"SCALING": "GIVEN_SCALE", "TALL": True})]),
    ("current", COLUMNS, False, [("amax", {}), ("quantize", {"SCALING": "OWN_SCALE", "TALL": True})]),
    ("current", ROWS, True, [("quantize", {"SCALING": "NO_CAST"}), ("quantize", {"SCALING": "OWN_SCALE"})]),
    ("block", BOTH, False, [("quantize_block", {"TILED": False, "ROWWISE": True, "COLUMNWISE": True})]),
    ("block", COLUMNS, True, [("quantize_block", {"ROWWISE": False, "COLUMNWISE": True, "COLUMN_SUM": True})]),
    ("tiles", ROWS, False, [("quantize_block", {"TILED": True, "ROWWISE": True, "COLUMNWISE": False})]),
    ("mxfp8", ROWS, False, [("quantize_mxfp8", {"ROWWISE": True, "COLUMNWISE": False, "TILED": False})]),
    ("mxfp8", BOTH, True, [("quantize_mxfp8", {"ROWWISE": True, "COLUMNWISE": True, "COLUMN_SUM": True})]),
]


@pytest.mark.parametrize(("form", "copies", "sums", "wanted"), CASTS)
def test_kernels_of_a_cast(machine: Machine, asked: Any, form: str, copies: Any, sums: bool, wanted: Any) -> None:
    rt = machine.runtime()
    one = tensor(rt, 1) if form == "delayed" else None
    scaling = {"delayed": "tensor", "current": "tensor", "tiles": "block"}.get(form, form)
    cast = Cast(
        Format(dtypes.float8_e4m3, scaling, tiled=form == "tiles"),
        rowwise=copies[0],
        columnwise=copies[1],
        scale=one,
        amax=one,
    )
    ops.quantize(rt, tensor(rt, 128, 256), cast, column_sum=tensor(rt, 256) if sums else None)
    found = [(name, constants) for name, constants in asked if name != "column_sum"]
    assert [(name, {k: c[k] for k in of}) for (name, c), (_, of) in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize(
    ("kind", "columnwise", "delayed", "tall"),
    [
        ("gelu", None, None, False),
        ("gelu", True, True, True),
        ("gelu", False, True, False),
        ("swiglu", True, False, True),
    ],
)
def test_kernels_of_an_activation(
    machine: Machine, asked: Any, kind: str, columnwise: Any, delayed: Any, tall: bool
) -> None:
    rt, cast = machine.runtime(), None
    if columnwise is not None:
        one = tensor(rt, 1) if delayed else None
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=columnwise, scale=one, amax=one)
    ops.activation_forward(rt, tensor(rt, 128, 256), "swiglu", cast=cast)
    (name, constants), *more = asked
    assert name == "activation" and constants["TALL"] == tall and constants["KEEP"] == (not delayed)
    assert constants["SCALING"] == ("GIVEN_SCALE" if delayed else "NO_CAST")
    assert [n for n, _ in more] == (["quantize"] if delayed is False else [])


def test_a_row_of_scores_is_held_or_streamed(machine: Machine, asked: Any) -> None:
    rt = machine.runtime()
    for columns in (1024, 40000):
        ops.softmax_forward(rt, tensor(rt, 1, 1, 2, columns))
    assert [c["ITERS"] > 0 for name, c in asked if name == "softmax_forward"] == [True, False]


def test_a_row_of_logits_is_held_or_a_part_of_it(machine: Machine, asked: Any) -> None:
    """A block's threads and vectors, by the row, also where that is no whole vectors."""
    rt = machine.runtime()
    held = []
    for classes in (8, 32000, 128256, 50257):
        x, goal = tensor(rt, 2, classes, dtype=dtypes.bfloat16), rt.tensor(np.zeros(2, np.int64))
        call = Right(ops.loss_gradient, (rt, x, goal), {"terms": LossTerms(classes), "out": x})
        assert launched(machine, call) == ["loss"]
    for name, c in asked:
        if name == "loss":
            held.append((c["VEC"], c["SIZE"], c["HELD"], c["PEEL"]))
            assert (c["FIND"], c["GRADIENT"]) == (True, True)
    assert held == [(8, 128, 1, 0), (8, 512, 8, 0), (8, 1024, 14, 0), (8, 1024, 7, 1)]
    known = rt.empty((2, 2, 3), dtypes.float32)
    ops.loss_facts(rt, x, goal, terms=LossTerms(2 * classes))
    ops.loss_gradient(rt, x, goal, terms=LossTerms(2 * classes), known=known)
    assert [(c["FIND"], c["GRADIENT"]) for name, c in asked if name == "loss"][4:] == [(True, False), (False, True)]
    ops.loss_values(rt, known, goal, terms=LossTerms(2 * classes), total="mean of some")
    assert [c["HOW"] for name, c in asked if name == "loss_values"] == [2]


@pytest.mark.more
def test_every_kernel_that_is_asked_for_compiles(machine: Machine) -> None:
    """With the constants that plans give it: NVRTC needs no GPU."""
    for call in every(machine.runtime()).values():
        call.run()
    failed = {}
    for name, constants in sorted(jobs(), key=repr):
        try:
            assert compiler.compile_source(name, dict(constants), "sm_90")
        except LibraryError as error:
            failed[name, constants] = str(error)[:400]
    assert len(jobs()) > 40 and not failed, failed


def test_pieces_off_16_bytes_are_refused(machine: Machine) -> None:
    """Kernels load and store 16 bytes at once: another address is an error that ends the process's device."""
    rt = Runtime.cuda()
    x = tensor(rt, 32, 32)
    cast = Cast(Format(dtypes.float8_e4m3, "mxfp8"), rowwise=True, columnwise=True)
    for name in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
        q = ops.quantize(rt, x, cast)
        piece = getattr(q, name)
        setattr(q, name, Tensor(piece.ptr + 4, piece.shape, piece.dtype, piece.device, piece))
        for call in (lambda q=q: ops.dequantize(rt, q, dtypes.bfloat16), lambda q=q: ops.quantize(rt, x, cast, out=q)):
            with pytest.raises(ArgumentError, match=f"{name} = .*multiple of 16 bytes"):
                call()
    one: Any = ops.quantize(rt, tensor(rt, 128, 128), cast).rowwise_scale
    assert ops.swizzle_scales(rt, one).size == one.size
    with pytest.raises(ArgumentError, match="swizzle_scales: got .*multiple of 16 bytes"):
        ops.swizzle_scales(rt, Tensor(one.ptr + 4, one.shape, one.dtype, one.device, one))


def test_vectors_between_ranks_fit_addresses(machine: Machine, asked: Any) -> None:
    """Each tensor's address bounds the vectors in which rows move, and outputs are merged, by its own type."""
    rt = machine.runtime()
    wide, narrow = tensor(rt, 8, 2, 4, 32), tensor(rt, 8, 2, 4, 32, dtype=dtypes.bfloat16)

    def off(t: Tensor, nbytes: int) -> Tensor:
        block = rt.empty((t.nbytes + 16,), dtypes.uint8)
        return Tensor(block.ptr + nbytes, t.shape, t.dtype, t.device, block)

    for nbytes in (0, 8, 4):
        ops.context_rows(rt, off(narrow, nbytes), how="heads_to_ranks", form="sbhd", size=2)
        ops.context_sum(rt, off(wide, nbytes), narrow, out=wide)
        ops.context_sum(rt, wide, off(narrow, nbytes), out=wide)
    found = [constants.get("WIDTH") or constants["VEC"] for _, constants in asked]
    assert found == [16, 8, 8, 8, 2, 4, 4, 1, 2]


def test_many_numbers_of_calls_take_several_launches(machine: Machine) -> None:
    """Each leaves its own behind those before."""
    rt = machine.runtime()
    rng = rt.tensor(np.array([1, 2], "int64"))
    with machine.noting() as events:
        ops.context_draws(rt, rng, range(600))
    places = [dict(e.places) for e in events if e.kind == "launch"]
    assert [[at.offset for at in of.values() if at is not None] for of in places] == [[0, 0], [0, 4096], [0, 8192]]


def test_launches_of_optimizers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a group of tensors; one before it for scales, one for what the device knows; more tables for many."""
    rt = machine.runtime()

    def tensors(moment: Any, scales: Any = None) -> AdamTensors:
        states = (tensor(rt, 20000, dtype=moment) for _ in range(2))
        return AdamTensors(tensor(rt, 20000), tensor(rt, 20000), *states, None, scales)

    def adam(some: list[AdamTensors], **options: Any) -> list[str]:
        rule = AdamRule(
            **{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 1, **options}
        )
        return launched(machine, Right(ops.adam, (rt, some, rule), {}))

    plain = tensors(dtypes.float32)
    for large, many in ((False, 24), (True, 3)):
        monkeypatch.setattr(libraries, "large_parameters", lambda large=large: large)
        assert adam([plain] * 52) == ["adam"] and adam([plain] * 1200) == ["adam"] * many
    assert adam([plain], grad_scale=tensor(rt, 1)) == adam([plain], lr=tensor(rt, 1)) == ["adam_numbers", "adam"]
    assert adam([tensors(dtypes.float16, tensor(rt, 3))] * 3) == ["adam_maxima", "adam"]
    x = [tensor(rt, 20000)] * 100
    assert launched(machine, Right(ops.norm_many, (rt, [x, x[:3]]), {})) == ["square_many"] * 2 + ["norm_of_all"]
    assert launched(machine, Right(ops.scale_many, (rt, x, x, 0.5), {})) == ["scale_many"]
    assert launched(machine, Right(ops.sgd, (rt, [SgdTensors(x[0], x[1])] * 80, SgdRule(0.1)), {})) == ["sgd"]
