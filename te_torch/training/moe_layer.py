"""`MoELayer`: a router, experts, and experts that all tokens go to, as one module.

It is made of the parts that are documented by themselves: one launch of the router gives probabilities, map and tokens
of each expert; `moe_permute` orders a row for each token and expert; two `GroupedLinear`s around an activation are the
experts; `moe_unpermute` adds up the rows of a token, times their probabilities. The number of rows is known, tokens
times `topk`, so the host asks the device for nothing where `GroupedLinear` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from te_core.errors import ArgumentError
from te_core.layers.activation import ActivationLayerSpec, ActivationSaved
from te_core.ops.activation import GATED, KINDS
from te_core.spelling import choice_error
from te_torch.base.module import materialised, normal_init
from te_torch.base.options import check_options
from te_torch.base.quantized_init import initialising
from te_torch.base.sharding import MarkedModule, Shardable
from te_torch.calls import made_of_constants
from te_torch.doors import door
from te_torch.export.mode import exporting, not_exported
from te_torch.forks import Fork, fork_of
from te_torch.function import Call, apply, of_table, register
from te_torch.module_names import next_name, shown
from te_torch.modules.grouped_linear import GroupedLinear
from te_torch.modules.linear import Linear
from te_torch.reruns import in_backward
from te_torch.router import check_terms, fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, routed, terms_of
from te_torch.runtime import amp_cast, check_input, default_device, drawn, outside_autocast
from te_torch.training.moe import moe_permute, moe_unpermute

_ACTIVATION = of_table("activation", ActivationSaved)
#: A compiler sees no backward.
_runs_again = door(in_backward, lambda: False)


@made_of_constants
def _activation(kind: str, needs: bool) -> Call:
    return register(_ACTIVATION, ActivationLayerSpec(kind), needs)


def _activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    call = _activation(kind, torch.is_grad_enabled() and x.requires_grad)
    return apply(call, None, False, x)[0]


class Router(MarkedModule):
    """Logits of experts, or of the gate of shared ones, float32: of rounded ones other experts would be the best.

    `expert_bias` float32 [experts], where there is one, is added to what experts are chosen by, and to no gate.
    """

    expert_bias: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        bias: bool,
        init: Callable[[torch.Tensor], Any],
        fork: Fork | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self._init, self._fork = init, fork
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.register_buffer("expert_bias", torch.zeros(num_experts, device=device) if bias else None)
        if not self.weight.is_meta:
            self._draw()

    def _draw(self) -> None:
        with torch.no_grad():
            if self._fork is None:
                drawn(self._init, self.weight)
            else:
                with self._fork():
                    drawn(self._init, self.weight)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weight anew, and set the bias to 0; on the meta device they get memory on the default device."""
        if defer_init:
            return
        if self.weight.is_meta:
            self.weight = materialised(self.weight)
        if self.expert_bias is not None:
            self.expert_bias = torch.zeros_like(self.expert_bias, device=self.weight.device)
        self._draw()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """As every module's; the bias, which grows by small steps, stays in float32."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of tokens [tokens, hidden_size]."""
        with outside_autocast(x):
            return F.linear(x.float(), self.weight.float())


class Experts(GroupedLinear):
    """A linear of each expert. Their weights are one parameter: torch's engine and optimizers take a while for each."""

    _one_weight = True


class SharedExperts(torch.nn.Module):
    """act(x w1^T + b1) w2^T + b2 of every token."""

    def __init__(
        self,
        sizes: tuple[int, int],
        inits: tuple[Callable[[torch.Tensor], Any], ...],
        activation: str,
        name: str,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        self.activation = activation
        hidden, inner = sizes
        first, last = inits
        wide = inner * (2 if activation in GATED else 1)
        self.fc1 = Linear(hidden, wide, init_method=first, name=f"{name}.fc1", **options)
        self.fc2 = Linear(inner, hidden, init_method=last, name=f"{name}.fc2", **options)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """The same shape."""
        rows = _activated(self.fc1(x, is_first_microbatch), self.activation)
        return self.fc2(rows, is_first_microbatch)


class _WithLoss(torch.autograd.Function):
    """The probabilities, in whose backward the loss gets the gradient `scale`: nobody has to add it to another loss."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.like = scale, loss.detach()
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, dprobs: torch.Tensor) -> Any:
        return dprobs, torch.ones_like(ctx.like) * ctx.scale, None


class RouterNotes:
    """What a layer tells of its router while somebody asks (te_torch/tools/expert_report.py), on the device."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.load = torch.zeros(experts, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the tokens' entropies; tokens

    @torch.no_grad()
    def add(self, counts: torch.Tensor, logits: torch.Tensor, topk: int, score: str) -> None:
        """One more forward."""
        _, scores = fused_compute_score_for_moe_aux_loss(logits.detach(), topk, score)
        self.load.add_(counts)
        self.sums[0].add_(torch.special.entr(scores).sum())
        self.sums[1].add_(logits.shape[0])


class MoELayer(Shardable):
    """A mixture of experts: y = the sum of what a token's `topk` experts make of it, times their probabilities.

    The products of the experts run in the precision of the active `autocast` region, the router in float32. In
    training the auxiliary loss keeps the experts in use: `aux_loss_coeff` says how strongly. It is part of the
    gradients without being added to a loss, times the attribute `aux_loss_scale` (a number or a tensor: the factor of
    the other loss, as 1 / microbatches or that of a GradScaler); with `return_aux_loss` it is returned and nothing
    else. Parameters: `router.weight`, `fc1.weight` and `fc2.weight` [experts, out, in], and `shared_experts.*`,
    `shared_gate.*`. With single_grouped_weight=False, and in `quantized_model_init`, whose weights are matrices, each
    expert has parameters of its own: `fc1.weight0` ..., `fc2.weight0` ... Checkpoints of either load into the other.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or `topk` and the groups do not fit the experts.

    Example:
        layer = te.MoELayer(64, 128, num_experts=8, topk=2, aux_loss_coeff=0.01, device="cpu")
        y = layer(torch.randn(2, 16, 64))  # [2, 16, 64]
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: bool = False,
        expert_bias_rate: float = 1e-3,
        aux_loss_coeff: float = 0.0,
        return_aux_loss: bool = False,
        shared_ffn_hidden_size: int | None = None,
        shared_gate: bool = False,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        single_grouped_weight: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        check_options("MoELayer", given)
        terms = terms_of("MoELayer", topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function)
        check_terms("MoELayer", num_experts, *terms)
        _check(given)
        super().__init__()
        self.name = next_name() if name is None else name
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_experts, self.topk, self.score_function, self._terms = num_experts, topk, score_function, terms
        self.activation, self.expert_bias_rate = activation, expert_bias_rate
        self.aux_loss_coeff, self.return_aux_loss = aux_loss_coeff, return_aux_loss
        self.aux_loss_scale: float | torch.Tensor = 1.0
        place: dict[str, Any] = {
            "params_dtype": params_dtype or torch.get_default_dtype(),
            "device": device or default_device(),
        }
        first, last = init_method or normal_init, output_layer_init_method or normal_init
        fork = fork_of(get_rng_state_tracker, None)
        self.router: Any = Router(hidden_size, num_experts, expert_bias, first, fork, *place.values())
        options = place | {
            "bias": bias,
            "get_rng_state_tracker": get_rng_state_tracker,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        }
        wide = ffn_hidden_size * (2 if activation in GATED else 1)
        kind = Experts if single_grouped_weight and not initialising() else GroupedLinear
        self.fc1, self.fc2 = (
            kind(num_experts, *sizes, init_method=init, name=f"{self.name}.{part}", **options)
            for part, sizes, init in (
                ("fc1", (hidden_size, wide), first),
                ("fc2", (ffn_hidden_size, hidden_size), last),
            )
        )
        self.shared_experts: torch.nn.Module | None = None
        self.shared_gate: torch.nn.Module | None = None
        if shared_ffn_hidden_size is not None:
            widths = (hidden_size, shared_ffn_hidden_size), (first, last)
            self.shared_experts = SharedExperts(*widths, activation, f"{self.name}.shared_experts", options)
        if shared_gate:
            self.shared_gate = Router(hidden_size, 1, False, first, fork, *place.values())
        self._bias_name = "expert_bias"  # in the router
        self._notes: RouterNotes | None = None
        #: Of each expert since the bias was last updated. No buffer: DistributedDataParallel copies these over ranks.
        self._load = torch.zeros(num_experts, dtype=torch.int64, device=place["device"])

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """out [*, hidden_size], or (out, auxiliary loss) with `return_aux_loss`; in evaluation the loss is 0."""
        check_input("MoELayer.forward", inp, self.hidden_size)
        if exporting.on:
            do = "write the experts in layers of torch.nn for the export"
            raise not_exported("a MoELayer", "layers whose rows a file can know", do)
        tokens = amp_cast(inp).reshape(-1, self.hidden_size)
        logits = self._logits(tokens)
        probs, routing, counts = routed("MoELayer", logits, self._expert_bias(), self._terms)
        self._count(counts, logits)
        loss = self._aux_loss(logits, counts)
        if loss is not None and not self.return_aux_loss:
            probs = _WithLoss.apply(probs, loss, self.aux_loss_scale)
        rows, row_map = moe_permute(tokens, routing, num_out_tokens=tokens.shape[0] * self.topk)
        rows = _activated(self.fc1(rows, counts, is_first_microbatch), self.activation)
        rows = self.fc2(rows, counts, is_first_microbatch)
        y = moe_unpermute(rows, row_map, merging_probs=probs, restore_shape=tokens.shape)
        if self.shared_experts is not None:
            y = y + self._shared(tokens, is_first_microbatch)
        y = y.view(inp.shape)
        if not self.return_aux_loss:
            return y
        return y, logits.new_zeros(()) if loss is None else loss

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of our router, or of another library's, which gives them first (te_torch/tools/foreign_experts.py)."""
        found = self.router(tokens)
        return found[0].float() if isinstance(found, tuple) else found

    def _expert_bias(self) -> torch.Tensor | None:
        bias = getattr(self.router, self._bias_name, None)
        return bias if bias is None or bias.dtype == torch.float32 else bias.float()

    def _shared(self, tokens: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """What all tokens get."""
        part: Any = self.shared_experts
        y = part(tokens, is_first_microbatch) if isinstance(part, SharedExperts) else part(tokens)
        return y if self.shared_gate is None else y * torch.sigmoid(self.shared_gate(tokens)).to(y.dtype)

    def _aux_loss(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
        """The auxiliary loss of these tokens; None where there is none."""
        if not (self.training and self.aux_loss_coeff and logits.shape[0]):
            return None
        _, scores = fused_compute_score_for_moe_aux_loss(logits, self.topk, self.score_function)
        sizes = logits.shape[0], self.num_experts, self.topk
        return fused_moe_aux_loss(scores, counts, *sizes, self.aux_loss_coeff)

    def _count(self, counts: torch.Tensor, logits: torch.Tensor) -> None:
        """Note loads, once for each forward: a checkpoint runs the same one again in backward."""
        if _runs_again():
            return
        if self.training and self._expert_bias() is not None:
            if self._load.device != counts.device:
                self._load = torch.zeros_like(self._load, device=counts.device)
            self._load.add_(counts)
        if self._notes is not None:
            self._notes.add(counts, logits, self.topk, self.score_function)

    @torch.no_grad()
    def update_expert_bias(self, group: Any = None) -> None:
        """Add `expert_bias_rate` to the bias of each expert that had fewer tokens than the mean, subtract it where it
        had more, and begin to count anew. To be called behind the optimizer's step; `group` are the ranks that have
        other tokens of the same experts.
        """
        bias, load = getattr(self.router, self._bias_name, None), self._load
        if bias is None:
            allowed = "a layer with expert_bias=True"
            raise ArgumentError("MoELayer.update_expert_bias", "a layer without a bias", allowed, "make it with one")
        if group is not None:
            torch.distributed.all_reduce(load, group=group)
        tokens = load.double()
        bias.add_((tokens.mean() - tokens).sign().to(bias.dtype), alpha=self.expert_bias_rate)
        load.zero_()

    def extra_repr(self) -> str:
        """What a printed module shows."""
        names = ("hidden_size", "ffn_hidden_size", "num_experts", "topk", "activation", "score_function")
        return shown(**{name: getattr(self, name) for name in names})


def _check(given: dict[str, Any]) -> None:
    """What the constructor refuses by itself."""
    if given["activation"] not in KINDS:
        raise choice_error("MoELayer", "activation", given["activation"], KINDS)
    if given["expert_bias"] and given["score_function"] == "softmax":
        allowed, do = "a bias with sigmoid or sqrtsoftplus", "choose one of these, or leave expert_bias out"
        raise ArgumentError("MoELayer", "expert_bias=True with score_function='softmax'", allowed, do)
    if given["shared_gate"] and given["shared_ffn_hidden_size"] is None:
        got, allowed = "shared_gate=True without shared experts", "a gate of shared experts"
        raise ArgumentError("MoELayer", got, allowed, "pass shared_ffn_hidden_size, or leave shared_gate out")
