"""Attention that cuDNN refuses runs in plain JAX: what it gives, where it runs, and what is said of it.

On a CPU te_core's attention refuses nothing: tests let it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import te_jax as te  # noqa: E402
from te_jax import record  # noqa: E402

from te_core import UnsupportedError  # noqa: E402
from te_core.tape.hosted import Brought  # noqa: E402
from tests.backends import jax_on_gpu  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.reference import attention as reference  # noqa: E402
from tests.tolerances import DB, snr_db  # noqa: E402

ON_GPU = jax_on_gpu()
HEADS, GROUPS, QK, V = 4, 2, 12, 20
LEN_Q, LEN_KV = (9, 0, 16), (12, 5, 24)
Compiled = Callable[..., Any]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Compiled]]:
    """Compiles a function in whose program te_core refuses work by these names, as cuDNN does on a GPU."""

    def compiled(function: Any, given: Any, names: tuple[str, ...] = ("forward", "backward")) -> Compiled:
        traced, real = jax.jit(lambda *a: function(*a)).trace(*given), record.Work.on

        def on(work: record.Work, device: Any) -> Brought:
            if work.name in {f"attention {name}" for name in names}:
                raise UnsupportedError(work.name, "on purpose", "", "")
            return real(work, device)

        monkeypatch.setattr(record, "_notes", {})
        with monkeypatch.context() as patch:
            if not ON_GPU:
                patch.setattr(record.Work, "on", on)
            lowered = traced.lower()
        assert len(record._notes) == len(names) or ON_GPU
        return lowered.compile()

    yield compiled


def drawn(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


#: The mask; more options; the shape of the bias; whether lengths of queries are those of keys; whether they are packed.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...] | None, bool, bool]] = {
    "none": ("no_mask", {}, None, False, False),
    "causal": ("causal", {"scaling_factor": 0.7}, None, False, False),
    "bottom right": ("causal_bottom_right", {}, None, False, False),
    "window": ("causal", {"window_size": (3, 0)}, None, True, False),
    "both ways": ("no_mask", {"window_size": (3, 2)}, None, False, False),
    "bias": ("no_mask", {}, (3, HEADS, 16, 24), False, False),
    "one bias": ("causal", {}, (1, 1, 1, 24), False, False),
    "off by one": ("causal", {"softmax_type": "off-by-one"}, None, False, False),
    "learnable": ("no_mask", {"softmax_type": "learnable"}, (1, HEADS, 16, 24), False, False),
    "padding": ("padding", {}, None, False, False),
    "padded causal": ("padding_causal", {"softmax_type": "learnable"}, (3, 1, 16, 24), False, False),
    "padded bottom right": ("padding_causal_bottom_right", {"window_size": (6, 0)}, None, False, False),
    "packed": ("padding", {"softmax_type": "learnable"}, None, False, True),
    "packed causal": ("padding_causal", {"window_size": (4, 0)}, None, True, True),
    "packed bottom right": ("padding_causal_bottom_right", {}, None, False, True),
    "packed bias": ("padding", {}, (3, HEADS, 25, 41), False, True),
}


class Problem:
    """Arrays of a case in rows [batch, length, heads, width], and what the reference takes."""

    def __init__(
        self,
        mask: str,
        options: dict[str, Any],
        bias: tuple[int, ...] | None = None,
        alike: bool = False,
        packed: bool = False,
        turned: bool = False,
    ) -> None:
        self.mask, self.packed = mask, packed
        self.options = options | {"attn_mask_type": self.mask}
        self.lengths = (LEN_Q, LEN_Q) if alike else (LEN_KV, LEN_Q) if turned else (LEN_Q, LEN_KV)
        padded = self.packed or "padding" in self.mask
        queries, keys = (16, 16) if alike else (24, 16) if turned else (16, 24)
        shapes = {"q": (3, queries, HEADS, QK), "k": (3, keys, GROUPS, QK), "v": (3, keys, GROUPS, V)}
        self.arrays = {n: drawn(*shape, seed=i) for i, (n, shape) in enumerate(shapes.items())}
        self.dy = drawn(3, queries, HEADS, V, seed=9)
        if bias is not None:
            self.arrays["bias"] = drawn(*bias, seed=5)
        if options.get("softmax_type") == "learnable":
            self.arrays["sink"] = drawn(HEADS, seed=6)
        left, right = options.get("window_size") or (-1, -1)
        if padded:
            self.options["sequence_descriptor"] = te.SequenceDescriptor.from_seqlens(
                tuple(jnp.asarray(n, jnp.int32) for n in self.lengths)
            )
        self.problem = reference.Problem(
            options.get("scaling_factor", QK**-0.5), left, 0 if "causal" in self.mask else right,
            self.mask.endswith("bottom_right"),
            *(np.asarray(n) if padded else None for n in self.lengths),
            bias=None if bias is None else self.arrays["bias"][:, :, :16, :24],
            softmax=options.get("softmax_type", "vanilla"), sink=self.arrays.get("sink"),
        )  # fmt: skip

    def side(self, name: str) -> tuple[int, ...]:
        return self.lengths[name in "kv"]

    def given(self, name: str, rows: Any) -> Any:
        """An array as `fused_attn` takes it."""
        if not self.packed or name in ("bias", "sink"):
            return jnp.asarray(rows)
        lengths = self.side(name)
        return jnp.concatenate([jnp.asarray(rows[i, :n]) for i, n in enumerate(lengths)])

    def call(self, *arrays: Any) -> Any:
        """(the output, the gradients)."""
        names = list(self.arrays)

        def attended(*arrays: Any) -> Any:
            a = dict(zip(names, arrays, strict=True))
            layout = "thd_thd_thd" if self.packed else "bshd_bshd_bshd"
            return te.fused_attn(
                (a["q"], a["k"], a["v"]), a.get("bias"), qkv_layout=layout, softmax_offset=a.get("sink"), **self.options
            )

        y, back = jax.vjp(attended, *arrays)
        return {"y": y, **dict(zip(names, back(self.given("y", self.dy)), strict=True))}

    def wanted(self) -> dict[str, Any]:
        """By the reference."""
        by_head = {n: a.swapaxes(1, 2) for n, a in self.arrays.items() if n in ("q", "k", "v")}
        made = reference.forward(*by_head.values(), self.problem)
        grads = reference.backward(self.dy.swapaxes(1, 2), *by_head.values(), self.problem)
        found = {"y": made.out, "q": grads.dq, "k": grads.dk, "v": grads.dv}
        found = {n: self.given(n, np.asarray(a).swapaxes(1, 2)) for n, a in found.items()}
        return found | {"bias": grads.dbias, "sink": grads.dsink}


@pytest.mark.parametrize("name", CASES)
def test_is_attention(name: str, refused: Any) -> None:
    p = Problem(*CASES[name])
    given = [p.given(n, a) for n, a in p.arrays.items()]
    found, wanted = refused(p.call, given)(*given), p.wanted()
    for key, value in found.items():
        if key == "bias":
            value, outside = value[:, :, :16, :24], value.at[:, :, :16, :24].set(0)
            assert not outside.any()
        assert snr_db(value, wanted[key]) > DB["fp32"], key
    assert "attention forward on" in te.explain() and "plain JAX" in te.explain()


@covering(
    turns=2,
    mask=[member.value for member in te.AttnMaskType],
    window=[None, (1, 1), (3, 0), (0, 2), (-1, 2), (2, -1)],
    side=["more keys", "more queries", "packed", "packed, more queries"],
)
def test_windows_of_unlike_lengths(mask: str, window: tuple[int, int] | None, side: str) -> None:
    """As documented: query i sees the keys i - left to i + right. The last query is beside the last key only where the
    mask says bottom right."""
    if side.startswith("packed") and "padding" not in mask:
        mask = {"no_mask": "padding"}.get(mask, f"padding_{mask}")
    p = Problem(mask, {"window_size": window}, packed="packed" in side, turned="more queries" in side)
    given = [p.given(n, a) for n, a in p.arrays.items()]
    found, wanted = p.call(*given), p.wanted()
    for key, value in found.items():
        assert snr_db(value, wanted[key]) > DB["fp32"], key


@pytest.mark.skipif(ON_GPU, reason="hardware: a GPU refuses both ways")
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", ["learnable", "padded causal", "packed"])
def test_either_way_reads_what_the_other_saved(name: str, way: str, refused: Any) -> None:
    p = Problem(*CASES[name])
    given = [p.given(n, a) for n, a in p.arrays.items()]
    both = jax.block_until_ready(jax.jit(p.call)(*given))  # before te_core is made to refuse
    one = refused(p.call, given, (way,))(*given)
    for key, value in one.items():
        assert snr_db(value, both[key]) > DB["fp32"], key


def test_dropout(refused: Any) -> None:
    """Backward drops what forward dropped: y is linear in v, so v . dv is y . dy."""
    q, k, v = (jnp.asarray(drawn(2, 32, 4, 12, seed=i)) for i in range(3))

    def call(q: Any, k: Any, v: Any, seed: Any) -> Any:
        y, back = jax.vjp(lambda *a: te.fused_attn(a, seed=seed, dropout_probability=0.3), q, k, v)
        return y, back(y)[2]

    compiled = refused(call, (q, k, v, jax.random.key(1)))
    (y, dv), (again, _), (other, _) = (compiled(q, k, v, jax.random.key(i)) for i in (1, 1, 2))
    assert np.array_equal(y, again) and not np.array_equal(y, other)
    np.testing.assert_allclose((v * dv).sum(), (y * y).sum(), rtol=1e-5)
    kept = compiled(q, k, jnp.ones_like(v), jax.random.key(3))[0]
    assert abs(kept.mean() - 1) < 0.05 and kept.std() > 0.1


def test_on_devices_of_a_mesh(refused: Any) -> None:
    count = min(2, len(jax.devices()))
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",)), jax.sharding.PartitionSpec("data")
    q, k, v = (jnp.asarray(drawn(4, 16, 4, 12, seed=i)) for i in range(3))
    alone = lambda *a: jax.grad(lambda *a: (te.fused_attn(a) ** 2).sum(), (0, 1, 2))(*a)  # noqa: E731
    split = jax.shard_map(alone, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3)
    for found, wanted in zip(refused(split, (q, k, v))(q, k, v), refused(alone, (q, k, v))(q, k, v), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """As many GPUs that are not there as JAX sees devices."""
    from tests.core.fake_cuda import Machine

    monkeypatch.setattr(record, "_runtimes", {})
    return Machine(monkeypatch, tmp_path, devices=len(jax.devices()))


@pytest.mark.skipif(ON_GPU, reason="hardware: on a CPU, for a GPU that is not there")
def test_a_gpu_decides_when_a_program_is_lowered_for_it(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of te_core in programs for a GPU, and what is said of them."""
    monkeypatch.setattr(record, "_notes", {})

    def calls(dtype: Any, width: int, strict: bool = False) -> int:
        q = jnp.zeros((2, 18, 4, width), dtype)  # a shape of no other test: its works are new
        with te.autocast(enabled=False, strict=strict):
            traced = jax.jit(lambda q: jax.grad(lambda q: te.fused_attn((q, q, q)).sum())(q)).trace(q)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("te_tape")

    assert calls(jnp.bfloat16, 64) == 2 and "plain JAX" not in te.explain()
    assert calls(jnp.float32, 64) == 0
    said = r"attention forward on cuda:0: float32\[2, 18, 4, 64\].*plain JAX, for te_core refuses: It takes bfloat16"
    assert any(re.match(said, line) for line in te.explain().splitlines())
    assert calls(jnp.bfloat16, 12) == 0 and "multiples of 16 bytes" in te.explain()
    with pytest.raises(UnsupportedError, match="float32"):
        calls(jnp.float32, 64, strict=True)
    assert calls(jnp.bfloat16, 64, strict=True) == 2
    x = jnp.zeros((18, 2, 32))
    params = {"qkv_weight": jnp.zeros((96, 32)), "proj_weight": jnp.zeros((32, 32))}
    whole = jax.jit(lambda x: te.multihead_attention(x, params, num_attention_heads=4)).trace(x)
    with pytest.raises(UnsupportedError, match="float32"):
        whole.lower(lowering_platforms=("cuda",))


@pytest.mark.skipif(ON_GPU or len(jax.devices()) < 2, reason="hardware: on a CPU, for GPUs that are not there")
@pytest.mark.parametrize("several", [True, False])
def test_all_gpus_are_made_ready_before_a_program_over_a_mesh_runs(machine: Any, several: bool) -> None:
    """On a GPU that records and loads in a running program others would wait, and it for them."""
    count = 2 if several else 1
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",)), jax.sharding.PartitionSpec("data")
    q = jnp.zeros((count, 20 + count, 4, 64), jnp.bfloat16)  # a shape of no other test: its work is new
    split = jax.shard_map(lambda q: te.fused_attn((q, q, q)), mesh=mesh, in_specs=spec, out_specs=spec)
    before = set(record._works)
    jax.jit(split).trace(q).lower(lowering_platforms=("cuda",))
    (work,) = (record._works[digest] for digest in record._works.keys() - before)
    ready = {device.index for device in work._programs if device.kind == "cuda"}
    assert ready == set(range(len(jax.devices()) if several else 1))
