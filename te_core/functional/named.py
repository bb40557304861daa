"""A layer for those who call it by the names of its arguments: what they pass is checked, and put into its places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.calls import Call
from te_core.errors import ArgumentError
from te_core.functional.arrays import read
from te_core.functional.contract import Contract, check_row_map
from te_core.layers.entries import Layer
from te_core.precision import Precision
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Named:
    """A layer of the table, without a library of arrays: both `te_core.functional` and `te_jax` ask it."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.arguments = {a.name: a for a in layer.offered()}
        self.gradients = tuple(a.name for a in layer.arguments)  # of backward's results, by place
        self.several = next((a.name for a in layer.offered() if a.several), None)  # the weights of several products
        self.results = len(layer.outputs) + (layer.name == "attention")  # whose second output is not offered
        draws = sum(a.dtypes == "draws" for a in layer.arguments)
        self.pairs = (2,) if draws <= 2 else (draws, 2)  # the shape of its random numbers, if it draws any

    def check(
        self, tensors: Mapping[str, Any], options: Mapping[str, Any], precision: Precision | None, rt: Runtime
    ) -> dict[str, Any]:
        """All options; what tensors are fits them. No value is read."""
        settled = self.layer.settled(self.layer.name, options)
        contract = Contract(self.layer.name, rt.device, settled, precision is not None)
        for name, argument in self.arguments.items():
            parts = tensors[name] or () if argument.several else [tensors[name]]
            for i, part in enumerate(parts):
                if part is not None:
                    contract.check(argument, f"{name}[{i}]" if argument.several else name, part)
        contract.finish()
        kind = settled.get("normalization")
        for name in [n for n in self.arguments if n.endswith("layer_norm_bias") and kind is not None]:
            without = tensors[name] is None
            if (kind == "LayerNorm") == without:
                got, do = f"{kind} with{'out' * without} {name}", "correct normalization or the bias"
                raise ArgumentError(self.layer.name, got, "one for LayerNorm, none for RMSNorm", do)
        if "attn_mask_type" in settled:
            padded = "padding" in settled["attn_mask_type"] or settled["qkv_format"] == "thd"
            if padded != (tensors["cu_seqlens_q"] is not None):
                got = f"attn_mask_type={settled['attn_mask_type']!r} with{'out' * padded} cu_seqlens_q"
                allowed = "running sums of lengths for padded and for packed sequences, none for others"
                do = "pass cu_seqlens_q" if padded else "leave it out, or choose a padding mask"
                raise ArgumentError(self.layer.name, got, allowed, do)
        if tensors.get("residual_bias") is not None and tensors.get("residual") is None:
            raise ArgumentError(self.layer.name, "residual_bias alone", "it beside residual", "pass residual, too")
        return settled

    def offsets(self, tensors: Mapping[str, Any], settled: Mapping[str, Any]) -> list[tuple[str, int]]:
        """Running sums of lengths, and what they may come to."""
        found = []
        for name in [n for n in self.arguments if n.startswith("cu_seqlens") and tensors[n] is not None]:
            if self.layer.name == "softmax":
                b, _, q, kv = tensors["x"].shape
                tokens = b * (kv if "kv" in name else q)
            else:
                shape = tensors["k" if "kv" in name else self.layer.arguments[0].name].shape
                form = settled.get("qkv_format") or settled["tensor_format"]
                tokens = shape[0] if form == "thd" else np.prod(shape[:2])
            found.append((name, int(tokens)))
        return found

    def wanted(self, needs: Iterable[str] | None, tensors: Mapping[str, Any]) -> frozenset[str]:
        """The arguments whose gradients are wanted: `needs`, or all that have one."""
        possible = frozenset(n for n, a in self.arguments.items() if a.gradient and tensors[n] is not None)
        if needs is None:
            return possible
        listed: Any = needs if isinstance(needs, Iterable) and not isinstance(needs, str) else (needs,)
        wanted = frozenset(name if isinstance(name, str) else repr(name) for name in listed)
        if not wanted <= possible:
            allowed, do = ", ".join(n for n in self.arguments if n in possible), "name arguments that have a gradient"
            raise ArgumentError(self.layer.name, f"needs={sorted(wanted - possible)}", allowed, do)
        return wanted

    def implied(self, tensors: Mapping[str, Any], given: Mapping[str, Any], rt: Runtime) -> dict[str, Any]:
        """The options that follow from the arguments."""
        options = self.layer.options
        if "rows" in options:
            return dict(zip(("tokens", "rows"), self._moved(tensors, given, rt), strict=True))
        if "stream" in options:
            return {"stream": tensors["residual"] is not None}
        if "num_gemms" in options:
            return {"num_gemms": len(tensors["weight"])}
        if "kv_channels" in options:
            return {
                "kv_channels": self._head_width(tensors, given),
                "turned_by_angles": tensors["rotary_pos_emb"] is not None,
            }
        if "head_dim_qk" not in options:
            return {}
        q, k, v = (tensors[name].shape for name in "qkv")
        sizes = {"num_attention_heads": q[-2], "num_gqa_groups": k[-2], "head_dim_qk": q[-1], "head_dim_v": v[-1]}
        if min(sizes.values()) < 1:
            raise ArgumentError(self.layer.name, f"{sizes}", "sizes from 1 on", "correct the shapes of q, k and v")
        return sizes

    def _head_width(self, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> int:
        """How many channels the heads of a projection to queries, keys and values have."""
        op, name = self.layer.name, self.layer.products[0]
        heads, rows, columns = given.get("num_attention_heads"), tensors[name].shape[0], tensors["proj_weight"].shape[1]
        if heads is None:
            raise ArgumentError(op, "no num_attention_heads", "how many heads there are", "pass num_attention_heads")
        groups = given.get("num_gqa_groups") or heads
        width = int(rows // (heads + 2 * groups))
        if heads % groups or not width or (width * (heads + 2 * groups), width * heads) != (rows, columns):
            got = f"{heads} heads in {groups} groups with {rows} rows of {name} and {columns} columns of proj_weight"
            allowed = "(heads + 2 groups) * channels rows, and heads * channels columns; groups that divide the heads"
            raise ArgumentError(op, got, allowed, "correct num_attention_heads, num_gqa_groups or the weights")
        return width

    def _moved(self, tensors: Mapping[str, Any], given: Mapping[str, Any], rt: Runtime) -> tuple[int, int]:
        """(tokens, rows) of what moves tokens to experts or back."""
        x, routing, masked = tensors["x"], tensors.get("routing_map"), given.get("map_type", "mask") == "mask"
        if routing is not None:
            rows = given.get("num_out_tokens", -1)
            if rows < 0 and masked and rt.device.kind != "cpu":
                got, do = "num_out_tokens=-1 with a mask on a device", "pass the number of rows"
                raise ArgumentError(self.layer.name, got, "a number that the host need not wait for", do)
            if rows < 0:
                rows = np.count_nonzero(routing.numpy()) if masked else routing.size
            return x.shape[0], int(rows)
        row_map, probs, tokens = tensors["row_id_map"], tensors["merging_probs"], given.get("num_tokens")
        check_row_map(self.layer.name, "row_id_map", row_map)
        if masked and row_map.ndim == 2:
            tokens = row_map.shape[0]
        elif probs is not None:
            tokens = probs.shape[0]
        if masked != (row_map.ndim == 2) or tokens is None:
            got = f"row_id_map = {row_map!r} with map_type={'mask' if masked else 'index'!r}, num_tokens={tokens}"
            allowed = "a mask's map [tokens, 2 experts + 1]; an index map [slots * tokens] with num_tokens"
            raise ArgumentError(self.layer.name, got, allowed, "correct map_type, or pass num_tokens")
        return tokens, x.shape[0]

    def placed(self, tensors: Mapping[str, Any], made: Call, seed: Any, rt: Runtime) -> list[Any]:
        """The tensors as the core's function takes them, by place."""
        found: list[Any] = []
        drawn = 0
        for argument in self.layer.arguments:
            if argument.dtypes == "draws":
                found.append(self._draws(seed, rt, drawn) if made.draws else None)
                drawn += 1
            elif not argument.several:
                found.append(tensors.get(argument.name))
            else:
                count, given = len(tensors["weight"]), tensors[argument.name]
                if given is not None and len(given) != count:
                    got, do = f"{len(given)} in {argument.name} beside {count} weights", "pass as many of each"
                    raise ArgumentError(self.layer.name, got, f"{count}", do)
                found.extend([None] * count if given is None else given)
        return found

    def _draws(self, seed: Any, rt: Runtime, number: int) -> Tensor:
        """Seed and offset of random numbers, on the device. Of numbers each part that draws gets a pair of its own."""
        pair = (seed, 0) if type(seed) is int else seed
        listed = isinstance(pair, (tuple, list)) and len(pair) == 2
        if listed and all(type(n) is int and -(1 << 63) <= n < 1 << 63 for n in pair):
            apart = (number & 1) << 62 | (number & 2) << 60 | (number & 4) << 58
            return rt.tensor(np.array((pair[0] ^ apart, pair[1]), np.int64))
        shape = self.pairs
        allowed = f"an integer below 2^63, two of them, or an int64 array {list(shape)} on the device"
        if seed is None or isinstance(pair, (tuple, list, int)):
            do = "pass seed=: another one in each step"
            raise ArgumentError(self.layer.name, f"seed={seed!r} where numbers are drawn", allowed, do)
        t = read(self.layer.name, "seed", seed)
        if t.shape != shape or t.dtype is not dtypes.int64 or not t.is_contiguous or t.device is not rt.device:
            raise ArgumentError(self.layer.name, f"seed = {t!r}", allowed, "correct seed")
        return t if len(shape) == 1 else t.rows(number, number + 1).reshape(2)
