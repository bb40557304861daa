"""A module as the runs of `tests/torch/sequences.py` have it: how it is made and called, and what can be seen of it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_torch.quantized import QuantizedTorch
from tests import layer_draws
from tests.layer_options import DTYPES, FP8
from tests.threads import together
from tests.torch.sequence_options import COMPOSED, Sequence
from tests.world import bits, randomise, values

Record = dict[str, Any]
#: What hooks and inspectors of the run saw. They are copied and pickled with their modules, so they hold no run.
LOG: list[Any] = []
#: Error texts of torch say which saved tensor was looked at first, and ours the number of an unnamed layer.
_SAID_OTHERWISE = (
    (re.compile(r"(modified by an inplace operation).*", re.DOTALL), r"\1"),
    (re.compile(r"Layer_\d+"), "Layer"),
    (re.compile(r"0x[0-9a-f]+"), "address"),
)
_SCALES = (1.0, 4.0, 0.25)  # of inputs, in turns: histories have something to say
_OF_ATTENTION = (
    "attention_mask cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded max_seqlen_q max_seqlen_kv core_attention_bias "
    "core_attention_bias_type alibi_slopes checkpoint_core_attention window_size pad_between_seqs"
).split()
_OTHER_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "TransformerLayer": ({"window_size": (2, 0)}, {"self_attn_mask_type": "padding_causal"}, {"fast_zero_fill": False}),
    "MultiheadAttention": ({"window_size": (2, 0)}, {"attn_mask_type": "padding_causal"}, {"fast_zero_fill": False}),
    "DotProductAttention": ({"window_size": (2, 0)}, {"attn_mask_type": "padding_causal"}, {"bf16_backward": True}),
    "Linear": ({"fp8_output": True}, {"fp8_grad": True}, {"fp8_output": True}),
}


def seen(value: Any) -> Any:
    """What a value comes to: the bits of its tensors, in the order of its parts."""
    if isinstance(value, torch.Tensor):
        return tuple(bits(value).values())
    if isinstance(value, dict):
        return tuple((name, seen(part)) for name, part in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(seen, value))
    return type(value).__name__


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    if isinstance(value, (tuple, list)):
        return [t for part in value for t in tensors_in(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def attempt(record: Record, name: str, function: Callable[[], Any]) -> Any:
    """What the function returns; None if it raises an error, which is noted."""
    try:
        return function()
    except Exception as error:
        text = str(error)
        for pattern, other in _SAID_OTHERWISE:
            text = pattern.sub(other, text)
        record[f"{name}: error"] = f"{type(error).__name__}: {text}"
        return None


class Looking(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class LookingOn(torch.overrides.TorchFunctionMode):
    """The same of functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class World:
    """What a sequence has: its module, handles of hooks, optimizers, calls whose backward is to come."""

    def __init__(self, sequence: Sequence, reference: bool) -> None:
        self.sequence, self.d, self.reference = sequence, sequence.module, reference
        self.recipes = [replace(self.d, recipe=name, recipe_options=options) for name, options in sequence.recipes]
        self.made = [d.make_recipe() for d in self.recipes]
        self.module = self.build()
        self.others: list[Any] = []  # modules that the sequence has left
        self.handles: list[Any] = []
        self.optimizers: dict[str, Any] = {}
        self.waiting: list[tuple[list[Any], dict[str, Any], int]] = []
        self.kept: dict[Any, Any] = {}
        self.window = [2, 0]
        self.count = 0
        self.ended = False

    # ------------------------------------------------------------------------------------ making

    def build(self) -> Any:
        """A model of the sequence's sizes."""
        d = self.d
        if d.kind in COMPOSED:
            return layer_draws.build(d, self.made[0])
        quantized = te.quantized_model_init(recipe=self.made[0]) if d.way.get("quantized") else contextlib.nullcontext()
        with quantized:
            module = self._made()
        randomise(module, d.seed % 1000)
        frozen = d.way.get("frozen", "")
        for i, p in enumerate(module.parameters()):
            if frozen == "all" or (frozen == "half" and i % 2) or (frozen == "matrices" and p.ndim == 2):
                p.requires_grad_(False)
        return module.eval() if d.way.get("eval") else module

    def _made(self) -> Any:
        d, layer = self.d, self.d.layer
        width, wide, dtype = layer["hidden_size"], layer["ffn_hidden_size"], DTYPES[layer["params_dtype"]]
        norm = {n: layer[n] for n in ("normalization", "zero_centered_gamma") if n in layer}
        norm |= {"eps": layer["layernorm_epsilon"]} if "layernorm_epsilon" in layer else {}
        more = dict(d.call.get("linears", {}))
        if d.way.get("main_grad"):
            more["fuse_wgrad_accumulation"] = True
        plain = {"params_dtype": dtype, "device": d.device, "bias": layer.get("bias", True)} | {
            n: more[n] for n in ("return_bias", "delay_wgrad_compute", "fuse_wgrad_accumulation") if n in more
        }
        split = {n: more[n] for n in ("parameters_split",) if n in more}
        original = {n: more[n] for n in ("save_original_input",) if n in more}
        returned = {n: more[n] for n in ("return_layernorm_output",) if n in more}
        if d.kind == "Linear":
            return te.Linear(width, wide, **plain, **split, **original)
        if d.kind == "LayerNormLinear":
            return te.LayerNormLinear(width, wide, **plain, **norm, **split, **returned)
        if d.kind == "LayerNormMLP":
            again, activation = more.get("checkpoint", False), layer.get("activation", "gelu")
            return te.LayerNormMLP(width, wide, activation=activation, checkpoint=again, **plain, **norm, **returned)
        if d.kind == "GroupedLinear":
            return te.GroupedLinear(3, width, wide, **plain, **original)
        if d.kind in ("LayerNorm", "RMSNorm"):
            norm.pop("normalization", None)
            return getattr(te, d.kind)(width, dtype=dtype, device=d.device, **norm)
        heads, channels = layer["num_attention_heads"], layer["kv_channels"]
        names = ("num_gqa_groups", "attention_dropout", "window_size", "bottom_right_diagonal", "softmax_type")
        options = {n: layer[n] for n in names if n in layer}
        mask, number = layer["self_attn_mask_type"], layer.get("layer_number")
        return te.DotProductAttention(
            heads, channels, qkv_format=d.form, attn_mask_type=mask, layer_number=number, **options
        )

    def parameters(self) -> list[Any]:
        """Those of the module; one that it has not, where it has none."""
        return list(self.module.parameters()) or [torch.nn.Parameter(torch.ones(2))]

    @property
    def dtype(self) -> torch.dtype:
        """What the module's parameters are in."""
        return next((p.dtype for p in self.module.parameters()), DTYPES[self.d.layer["params_dtype"]])

    # ------------------------------------------------------------------------------------ inputs

    def inputs(self, a: dict[str, Any]) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
        """(what requires gradients by name, arguments, options) of a call."""
        d = replace(self.d, sizes=a.get("sizes", self.d.sizes), seed=self.d.seed + a.get("values", 0))
        given = layer_draws.inputs(d)
        dtype = DTYPES[a["dtype"]] if "dtype" in a else self.dtype
        x = (given.x.roll(self.count, 0) * _SCALES[self.count % 3]).to(dtype)
        options = dict(given.options)
        leaves: dict[str, Any] = {}
        needs = not a.get("frozen")
        for name in layer_draws.MORE:
            if name in options:
                options[name] = options[name].to(dtype, copy=True).requires_grad_(bool(a.get("needs_more")))
                leaves[name] = options[name]
        if self.d.kind == "DotProductAttention":
            args = self._heads(d, a, x, leaves)
            options = {name: t for name, t in options.items() if name in _OF_ATTENTION}
            for name in ("cu_seqlens", "max_seqlen"):
                if f"{name}_q" in options:
                    options[f"{name}_kv"] = options[f"{name}_q"]
            if "cu_seqlens_q_padded" in options:
                options["cu_seqlens_kv_padded"] = options["cu_seqlens_q_padded"]
        else:
            args = [self._placed(x, a, leaves, "x", needs)]
        encoded = options.get("encoder_output")
        if a.get("alias") and encoded is not None and encoded.shape == args[0].shape:
            options["encoder_output"] = args[0]
        if self.d.kind == "GroupedLinear":
            rows, part = args[0].numel() // args[0].shape[-1], 2 + a.get("values", 0)
            args.append([rows // part, 0, rows - rows // part])
        if self.d.kind not in ("DotProductAttention", "LayerNorm", "RMSNorm") and "first" in a:
            options["is_first_microbatch"] = a["first"]
        if self.d.kind in ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"):
            options = {name: t for name, t in options.items() if name == "is_first_microbatch"}
        if "options" in a and (self.d.form != "thd" or a["options"] == 0):
            options |= _OTHER_OPTIONS.get(self.d.kind, ({}, {}, {}))[a["options"]]
        if a.get("window") and self.d.kind in ("DotProductAttention", "MultiheadAttention", "TransformerLayer"):
            options["window_size"] = self.window
        return leaves, args, options

    def _heads(self, d: Any, a: dict[str, Any], x: torch.Tensor, leaves: dict[str, Any]) -> list[Any]:
        """Queries, keys and values: apart, views of one projection, or one tensor twice."""
        heads, channels = d.layer["num_attention_heads"], d.layer["kv_channels"]
        groups = d.layer.get("num_gqa_groups", heads)
        tokens = x.shape[:-1]
        alias, needs = a.get("alias"), not a.get("frozen")

        def made(count: int, name: str) -> torch.Tensor:
            t = values(*tokens, count, channels, seed=d.seed + len(leaves)) * _SCALES[self.count % 3]
            return self._placed(t.to(x.dtype), a, leaves, name, needs)

        q = made(heads, "q")
        if alias and groups == heads:
            return [q, q, q] if alias == "one" else [q, q, made(groups, "v")]
        if d.seed % 3 and groups == heads:  # as a fused projection lies
            packed = made(3 * heads, "packed")
            return [packed[..., i * heads : (i + 1) * heads, :] for i in range(3)]
        return [q, made(groups, "k"), made(groups, "v")]

    def _placed(self, t: torch.Tensor, a: dict[str, Any], leaves: dict[str, Any], name: str, needs: bool) -> Any:
        """The values in this layout, and the leaf that they are of."""
        layout = a.get("layout", "")
        key = (name, tuple(t.shape), t.dtype, layout)
        if a.get("kept") and key in self.kept:
            leaf = self.kept[key].requires_grad_(needs)
        else:
            leaf = _LEAVES.get(layout, torch.Tensor.clone)(t).detach()
            leaf = torch.nn.Parameter(leaf, needs) if layout == "Parameter" else leaf.requires_grad_(needs)
            if a.get("kept"):
                self.kept[key] = leaf
        leaf.grad = None
        leaves[name] = leaf
        return _VIEWS[layout](leaf, t) if layout in _VIEWS else leaf

    # ------------------------------------------------------------------------------------ calls

    def call(self, record: Record, a: dict[str, Any]) -> None:
        """Call the module as often as is said, each with a backward if it is to have one."""
        for i in range(a.get("times", 1)):
            if self.ended:
                return
            self.count += 1
            if self.reference:
                for module in (self.module, *self.others):
                    forget(module)
            self._once(record, f"{i}", a)
            if self.ended:
                return
            for name, value in self.state().items():
                record[f"{i} {name}"] = value

    def _once(self, record: Record, name: str, a: dict[str, Any]) -> None:
        if not a.get("accumulate"):
            for p in self.module.parameters():
                p.grad = None
        self._give_main_grads(bool(a.get("accumulate")))
        found = attempt(record, f"{name} inputs", lambda: self.inputs(a))
        if found is None:
            return
        leaves, args, options = found
        torch.default_generator.manual_seed(1000 * self.sequence.seed + self.count)  # torch.manual_seed looks for a GPU
        if a.get("threads"):
            record[f"{name} threads"] = attempt(record, name, lambda: self._threads(a, args, options))
            return
        with self.surroundings(a):
            y = attempt(record, name, lambda: self._forward(a, leaves, args, options))
            record[f"{name} random"] = bits(torch.get_rng_state())[""]
            outputs = tensors_in(y)
            for i, t in enumerate(outputs):
                record[f"{name} y{i}"] = seen(t), t.requires_grad, t.is_leaf
                if a.get("watch") and t.requires_grad and not t.is_leaf:
                    t.register_hook(lambda g, i=i: LOG.append(("gradient of output", i, seen(g))))
            if a.get("backward") == "inside":
                self.backward(record, name, outputs, leaves, a)
        if a.get("backward") == "inside" or y is None:
            return
        with attempt(record, f"{name} between", lambda: self._between(a, leaves, outputs)) or contextlib.nullcontext():
            if a.get("backward") == "later":
                self.waiting.append((outputs, leaves, self.count))
            elif a.get("backward") != "drop":
                self.backward(record, name, outputs, leaves, a)

    @contextlib.contextmanager
    def surroundings(self, a: dict[str, Any]) -> Iterator[None]:
        """The contexts that a call runs in."""
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            if a.get("saved") == "cpu":
                enter(torch.autograd.graph.save_on_cpu())
            elif a.get("saved"):
                enter(torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t))
            if a.get("mode"):
                enter(Looking() if a["mode"] == "dispatch" else LookingOn())
            self._enter_regions(a, enter)
            if a.get("amp"):
                enter(torch.autocast(self.d.device, DTYPES[a["amp"]]))
            if a.get("grad"):
                enter(torch.set_grad_enabled(False) if "set" in a["grad"] else getattr(torch, a["grad"])())
            yield

    def _enter_regions(self, a: dict[str, Any], enter: Callable[[Any], Any]) -> None:
        which, how = a.get("recipe"), a.get("region")
        recipes = [d.make_recipe() for d in self.recipes] if a.get("fresh") else self.made
        recipe = None if which is None else recipes[which]
        if recipe is None:
            if how:
                enter(te.autocast(enabled=False))
            return
        if how == "calibrating":
            enter(te.autocast(enabled=False, calibrating=True, recipe=recipe))
            return
        if how == "nested":
            enter(te.autocast(recipe=recipe))
        elif how == "other" and recipes[1 - which] is not None:
            enter(te.autocast(recipe=recipes[1 - which]))
        enter(te.autocast(recipe=recipe))
        if how == "off":
            enter(te.autocast(enabled=False))

    def _forward(self, a: dict[str, Any], leaves: dict[str, Any], args: list[Any], options: dict[str, Any]) -> Any:
        how, module = a.get("checkpoint"), self.module
        if a.get("through") and self.others:  # another model makes the input, if it gives what this one takes
            made = tensors_in(self.others[0](*args, **options))[0]
            if made.shape == args[0].shape:
                leaves |= {f"other {n}": p for n, p in self.others[0].named_parameters()}
                args = [made, *args[1:]]
        if how == "te":
            return te.checkpoint(module, *args, **options)
        if how:
            tensors = [t for t in args if isinstance(t, torch.Tensor)]
            reentrant = how == "reentrant" and any(t.requires_grad for t in tensors)
            rest = args[len(tensors) :]
            return checkpoint(lambda *t: module(*t, *rest, **options), *tensors, use_reentrant=reentrant)
        if a.get("functional"):
            others = {n: self._instead(p) for n, p in module.named_parameters()}
            leaves.update(others)
            return torch.func.functional_call(module, others, tuple(args), options)
        return module(*args, **options)

    @staticmethod
    def _instead(p: torch.Tensor) -> torch.Tensor:
        other = p.detach().clone() if isinstance(p, QuantizedTorch) else p.detach() * 1.125
        other.requires_grad_(p.requires_grad)
        if hasattr(p, "main_grad"):
            other.main_grad = torch.zeros_like(p.main_grad)  # type: ignore[attr-defined]
        return other

    def _threads(self, a: dict[str, Any], args: list[Any], options: dict[str, Any]) -> Any:
        """Four calls at once, forward alone. Nothing draws random numbers, which threads would take in any order."""
        which = a.get("recipe")
        d = None if which is None else self.recipes[which]
        history = d is not None and (d.recipe in ("delayed", "custom") or bool(set(d.recipe_options) & set(FP8)))

        def forward() -> Any:  # a region that ends in grad mode updates the scales that other threads read
            with torch.set_grad_enabled(not history), self.surroundings(a):
                return seen(self.module(*args, **options))

        before = torch.get_rng_state()
        once = forward()
        if not torch.equal(before, torch.get_rng_state()):
            return once
        return once, together(*[forward] * 4)

    # ------------------------------------------------------------------------------------ backward

    def backward(
        self, record: Record, name: str, outputs: list[Any], leaves: dict[str, Any], a: dict[str, Any]
    ) -> None:
        """The backward of a call, and the gradients of its inputs."""
        how = a.get("backward", "")
        used = [t for t in (outputs[:1] if how == "first alone" else outputs) if t.requires_grad]
        leaf = [t for t in leaves.values() if t is not None and t.requires_grad]
        trained = [p for p in self.module.parameters() if p.requires_grad]
        if not used:
            return
        grads = [values(*t.shape, seed=self.count + i, dtype=t.dtype) for i, t in enumerate(used)]

        def run() -> Any:
            if how == "input alone" and leaf:
                return seen(torch.autograd.grad(used, leaf, grads, allow_unused=True))
            if how == "one parameter" and trained:
                one = trained[self.count % len(trained)]
                return seen(torch.autograd.grad(used, [one], grads, allow_unused=True))
            if how == "one input" and trained:  # of backward's `inputs`
                return torch.autograd.backward(used, grads, inputs=[trained[self.count % len(trained)]])
            if how == "twice":
                torch.autograd.backward(used, grads, retain_graph=True)
            torch.autograd.backward(used, grads)
            return None

        record[f"{name} grads"] = attempt(record, f"{name} backward", run)
        if f"{name} backward: error" in record:  # what had its gradient before depends on the order of backward
            self.ended = True
            return
        attempt(record, f"{name} delayed", self._delayed_gradients)
        for n, t in leaves.items():
            record[f"{name} d {n}"] = None if t is None or t.grad is None else bits(t.grad)
            if t is not None and hasattr(t, "main_grad"):
                record[f"{name} main d {n}"] = bits(t.main_grad)

    def backward_of_waiting(self, record: Record, reverse: bool) -> None:
        """The backward of all calls that were put off."""
        waiting, self.waiting = self.waiting, []
        self._give_main_grads(True)
        for i, (outputs, leaves, count) in enumerate(reversed(waiting) if reverse else waiting):
            if not self.ended:
                self.count = count
                self.backward(record, f"waiting {i}", outputs, leaves, {})

    def _delayed_gradients(self) -> None:
        for module in self.module.modules():
            if getattr(module, "delay_wgrad_compute", False):
                module.backward_dw()

    def _give_main_grads(self, keep: bool) -> None:
        if not any(getattr(m, "fuse_wgrad_accumulation", False) for m in self.module.modules()):
            return
        for p in self.module.parameters():
            if not (keep and hasattr(p, "main_grad")):
                p.main_grad = torch.zeros(p.shape)

    @contextlib.contextmanager
    def _changed(self, change: Callable[[], None], back: Callable[[], None]) -> Iterator[None]:
        change()
        try:
            yield
        finally:
            back()

    def _between(self, a: dict[str, Any], leaves: dict[str, Any], outputs: list[Any]) -> Any:
        """What changes between forward and backward; a context for what changes back."""
        how, module = a.get("between"), self.module
        with torch.no_grad():
            if how == "input":
                next(iter(leaves.values())).mul_(2.0)
            elif how == "weight":
                self.parameters()[-1].mul_(1.5)
            elif how == "data":
                p = self.parameters()[0]
                p.data = p.data * 1.5
        if how == "output":
            outputs[0].mul_(2.0)
        if how == "freeze":
            p = self.parameters()[0]
            was = p.requires_grad
            return self._changed(lambda: p.requires_grad_(not was), lambda: p.requires_grad_(was))
        if how == "eval":
            return self._changed(lambda: module.train(not module.training), lambda: module.train(not module.training))
        if how == "region":
            return self.surroundings({"recipe": 1})
        if how == "deterministic":
            use = torch.use_deterministic_algorithms
            return self._changed(lambda: use(True), lambda: use(False))
        return None

    # ------------------------------------------------------------------------------------ what can be seen

    def state(self) -> Record:
        """Parameters with their gradients, buffers (scales and histories among them), what hooks saw."""
        found: Record = {}
        for name, p in self.module.named_parameters():
            found[f"parameter {name}"] = bits(p), p.requires_grad
            found[f"gradient {name}"] = None if p.grad is None else seen(p.grad)
            if hasattr(p, "main_grad"):
                found[f"main_grad {name}"] = bits(p.main_grad)
        for name, b in self.module.named_buffers():
            found[f"buffer {name}"] = bits(b)
        found["seen by hooks"] = Counter(LOG)
        LOG.clear()
        return found


def forget(module: torch.nn.Module) -> None:
    """A call of the reference is the first of its kind: what modules keep of earlier calls is taken from them."""
    for part in module.modules():
        for name in ("_calls", "_choices"):
            if isinstance(kept := vars(part).get(name), dict):
                kept.clear()


_LEAVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, -2).contiguous(),
    "sliced": lambda t: torch.cat([t, t], -1),
    "stepped": lambda t: torch.stack([t, t], -1),
    "expanded": lambda t: t[:1].clone(),
    "shifted": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)]),
    "strided leaf": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
}
_VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "transposed": lambda leaf, t: leaf.transpose(0, -2),
    "sliced": lambda leaf, t: leaf[..., : t.shape[-1]],
    "stepped": lambda leaf, t: leaf[..., 0],
    "expanded": lambda leaf, t: leaf.expand_as(t),
    "shifted": lambda leaf, t: leaf[1:].view(t.shape),
    "no leaf": lambda leaf, t: leaf * 1,
}
