"""What each rank has of an attention's heads: slopes of ALiBi, offsets, rows of a checkpoint; and its group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_torch as te
from te_core.attention import Sizes
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.attention.inputs import Given
from te_torch.attention.plan import spec_of
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, error_of, says

WIDTH, TOKENS, BATCH = 96, 16, 2
#: How much more a GPU's rounding may differ than the CPU's: for products of other sizes it takes kernels that add in
#: another order, and scores of this size multiply what they are off by before softmax.
TIMES = {"cpu": 1, "cuda": 10}


def attention(rank: Rank, heads: int, groups: int | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    how = {"attention_dropout": 0.0, "device": rank.device, "bias": False, **options}
    module = te.MultiheadAttention(WIDTH, heads, num_gqa_groups=groups, **how)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.2)  # scores far from equal: heads that change places show
    return module


def own(t: torch.Tensor, rank: Rank, dim: int = 0, pieces: list[int] | None = None) -> torch.Tensor:
    """This rank's part of a whole parameter, of each of its pieces one by one."""
    return torch.cat([p.chunk(rank.world, dim)[rank.number] for p in t.split(pieces or [t.shape[dim]], dim)], dim)


def spread(rank: Rank, whole: Any, heads: int, groups: int | None = None, **options: Any) -> Any:
    """This rank's part of a whole attention, cut as docs/parallel.md says."""
    module = attention(rank, heads, groups, set_parallel_mode=True, tp_group=dist.group.WORLD, **options)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(own(values[name], rank, p.partition_dim))
    return module


def tokens(rank: Rank) -> torch.Tensor:
    return torch.randn(TOKENS, BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).to(rank.device)


# ------------------------------------------------------------------------------------------------ ALiBi


def apart(found: Any, wanted: Any) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("heads", "later"), [(4, False), (6, False), (6, True), (12, False)])
@by_ranks("two")
def test_slopes_go_by_the_place_among_all_heads(rank: Rank, heads: int, later: bool) -> None:
    """6 and 12 are no powers of two: the last heads have slopes between the others'. 6 of two ranks: three each."""
    options = {"fuse_qkv_params": False, "attn_mask_type": "causal"}
    whole = attention(rank, heads, **options)
    module = spread(rank, whole, heads, **options)
    if later:
        module.core_attention.set_tensor_parallel_group(None)
        module.set_tensor_parallel_group(dist.group.WORLD)
    x, y = (tokens(rank).requires_grad_() for _ in range(2))
    found, wanted = module(x, core_attention_bias_type="alibi"), whole(y, core_attention_bias_type="alibi")
    for out in (found, wanted):
        out.square().sum().backward()
    assert apart((found, x.grad), (wanted, y.grad)) < 1e-5 * TIMES[rank.device]


def test_usual_slopes_need_a_group() -> None:
    module = te.DotProductAttention(6, 16, tp_size=2)
    q = torch.randn(8, 2, 3, 16)
    said = error_of(lambda: module(q, q, q, core_attention_bias_type="alibi"), ArgumentError)
    says(said, "tp_size=2", "set_tensor_parallel_group", "alibi_slopes")
    options = {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor([0.5, 0.25, 0.125])}
    lone = te.DotProductAttention(3, 16)
    assert torch.equal(module(q, q, q, **options), lone(q, q, q, **options))
    assert torch.equal(module(q, q, q), lone(q, q, q))


@pytest.mark.parametrize(("all_heads", "usual"), [(0, True), (4, True), (8, False)])
def test_a_kernel_is_told_whose_slopes_these_are(all_heads: int, usual: bool) -> None:
    """cuDNN makes the usual slopes itself, of as many heads as it sees."""
    module = te.DotProductAttention(4, 16)
    q = torch.randn(8, 2, 4, 16)
    key = module._key(Given(q, q, q, attn_mask_type="causal", core_attention_bias_type="alibi"), "")
    static = module._static._replace(all_heads=all_heads)
    assert spec_of(static, key, Sizes(2, 8, 8, 4, 4, 16, 16), False).default_slopes is usual


# ------------------------------------------------------------------------------------------- checkpoints


def cut(rank: Rank, groups: int, kind: str, interleaved: bool, one_by_one: bool) -> float:
    options = {"fuse_qkv_params": True, "qkv_weight_interleaved": interleaved, "attention_type": kind, "bias": True}
    rows = [WIDTH // 4 * n for n in ((4, groups, groups) if kind == "self" else (groups, groups))]
    whole = attention(rank, 4, groups, **options)
    module = attention(rank, 4, groups, set_parallel_mode=True, tp_group=dist.group.WORLD, **options)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            fused = name.startswith(("qkv.", "key_value."))
            marked = getattr(p, "tensor_model_parallel", False)
            value = values[name]
            p.copy_(own(value, rank, p.partition_dim, rows if fused and one_by_one else None) if marked else value)
    more = {} if kind == "self" else {"encoder_output": tokens(rank).flip(0)}
    return apart([module(tokens(rank), **more)], [whole(tokens(rank), **more)])


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("groups", [4, 2])
@by_ranks("two")
def test_a_fused_projection_is_cut_as_it_lies(rank: Rank, groups: int, kind: str) -> None:
    """Interleaved: plain rows. Not interleaved: queries, keys and values one by one. The other way is wrong."""
    for interleaved in (True, False):
        right, wrong = (cut(rank, groups, kind, interleaved, by) for by in (not interleaved, interleaved))
        assert right < 1e-5 * TIMES[rank.device] and wrong > 1e-2


# ----------------------------------------------------------------------------------- offsets, and groups


@by_ranks("two")
def test_a_learnable_offset_says_how_it_is_cut(rank: Rank) -> None:
    options = {"fuse_qkv_params": False, "softmax_type": "learnable"}
    whole = attention(rank, 4, **options)
    module = spread(rank, whole, 4, **options)
    p = module.core_attention.softmax_offset
    assert (p.tensor_model_parallel, p.partition_dim, p.partition_stride, tuple(p.shape)) == (True, 0, 1, (2,))
    assert not hasattr(whole.core_attention.softmax_offset, "tensor_model_parallel")
    assert (module(tokens(rank)) - whole(tokens(rank))).abs().max() < 1e-4 * TIMES[rank.device]


@by_ranks("two")
def test_a_mesh_of_one_dimension_is_its_group(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device, (1, 2), mesh_dim_names=("dp", "tp"))
    row: dict[str, Any] = {"parallel_mode": "row", "device": rank.device}
    first, later = te.Linear(32, 32, tp_group=mesh["tp"], **row), te.Linear(32, 32, tp_size=2, **row)
    later.set_tensor_parallel_group(mesh["tp"])
    whole = attention(rank, 4, set_parallel_mode=True, tp_group=mesh["tp"])
    x = torch.ones(4, 16, device=rank.device)
    assert first(x).shape == later(x).shape == (4, 32) and whole(tokens(rank)).shape == (TOKENS, BATCH, WIDTH)
    assert all(m.tp_group is mesh["tp"].get_group() for m in (first, later, whole.proj, whole.core_attention))
    for given, said in ((mesh, ("2 dimensions ('dp', 'tp')", "get_group()")), ("tp", ("type str",))):
        for call in (lambda g: te.Linear(32, 32, tp_group=g, device=rank.device), later.set_tensor_parallel_group):
            says(error_of(lambda call=call, given=given: call(given), ArgumentError), *said)
    says(error_of(lambda: later.set_tensor_parallel_group(mesh)), "Linear.set_tensor_parallel_group")


@by_ranks("two")
def test_a_group_that_is_gone(rank: Rank, tmp_path: Path) -> None:
    layer = te.Linear(32, 32, parallel_mode="row", tp_group=dist.group.WORLD, device=rank.device)
    layer(torch.ones(4, 16, device=rank.device))
    dist.barrier()
    dist.destroy_process_group()
    backend, store = "nccl" if rank.device == "cuda" else "gloo", dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group(backend, store=store, rank=rank.number, world_size=2)
    x = torch.ones(4, 16, device=rank.device, requires_grad=True)
    says(error_of(lambda: layer(x), ArgumentError), "ArgumentError: Linear.forward", "set_tensor_parallel_group")
    layer.set_tensor_parallel_group(dist.group.WORLD)
    assert layer(x).shape == (4, 32)


def test_an_error_names_its_place_once() -> None:
    layer = te.TransformerLayer(64, 128, 4, set_parallel_mode=True, tp_size=2, device="cpu")
    with pytest.raises(
        UnsupportedError, match=r"^LayerNormLinear\.forward in self_attention\.layernorm_qkv: got tp_size=2"
    ):
        layer(torch.randn(4, 2, 64))
