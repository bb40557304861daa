"""The namespace `transformer_engine` of nvdlfw_inspect: its calls, what they answer where no feature does, and how a
feature's configuration is read.

A feature of a user's own is derived from `TEConfigAPIMapper` and has methods of `TEDefaultFeatures` with @api_method.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from nvdlfw_inspect import api as debug_api
from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from nvdlfw_inspect.config_manager import ConfigManager
from nvdlfw_inspect.logging import custom_assert
from nvdlfw_inspect.registry import api_method

from te_torch.debug import routing, stats
from te_torch.debug.schedule import EveryOne, asked
from te_torch.runtime import deprecated
from te_torch.tensors import QuantizedTensor, QuantizedTensorStorage

_GEMMS = ("fprop", "dgrad", "wgrad")
_CONSTANTS = frozenset((str, int, float, bool, type(None)))
#: What selects GEMMs and tensors: not a parameter of a feature.
OF_GEMMS = frozenset(("enabled", "gemm", "gemms", "gemms_struct"))
SELECTORS = OF_GEMMS | {"tensor", "tensors", "tensors_struct"}


def _copied(value: Any) -> Any:
    """A copy that may be changed in any depth; of the usual values cheaper than deepcopy."""
    if type(value) in _CONSTANTS:
        return value
    if type(value) is list and all(type(element) in _CONSTANTS for element in value):
        return value[:]
    return copy.deepcopy(value)


class TEConfigAPIMapper(BaseConfigAPIMapper):
    """Reads `gemms`, `gemms_struct`, `tensors` and `tensors_struct` of a feature's configuration.

    A `_struct` gives parameters to one GEMM or tensor, which count before those beside it; `tensors` and
    `tensors_struct` may stand inside an element of `gemms_struct`.
    """

    #: All keys that the configuration may have; None: any, and tensors of any name.
    keys: ClassVar[frozenset[str] | None] = None

    def parse_config_and_api(self, config: dict[str, Any], **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """(whether the configuration means the GEMM and tensor of this call, its parameters for them)."""
        if self.keys is not None:
            self._check(config)
        found: Any = {key: _copied(value) for key, value in config.items()}
        if kwargs.get("gemm_parsing"):
            found = self._process_transformer_engine_config(found, kwargs)
        elif kwargs.get("tensor_parsing"):
            found = self._process_tensor_config(found, kwargs["tensor_name"])
        if not found:
            return False, None
        if self.keys is not None and "stats" in self.keys and not found.get("stats"):
            raise ValueError(f"{type(self).__name__} without stats. Allowed: a list of statistics, as stats: [..].")
        found.pop("enabled", None)
        return True, found

    def _check(self, config: dict[str, Any]) -> None:
        """Raise for a key or a tensor that the feature does not have: nothing else would tell of it."""
        name, keys = type(self).__name__, self.keys or frozenset()
        for level in _levels(config):
            for key in level:
                if key not in keys:
                    raise ValueError(f"{name} has no key {key!r}. Allowed: {', '.join(sorted(keys))}.")
            for tensor in [*_listed(level.get("tensors")), *_listed(level.get("tensor"))]:
                if tensor not in routing.TENSORS:
                    allowed = ", ".join(routing.TENSORS)
                    raise ValueError(f"{name}: tensors: there is no {tensor!r}. Allowed: {allowed}.")

    def _process_transformer_engine_config(self, config: dict[str, Any], call: dict[str, Any]) -> dict[str, Any] | None:
        gemm = call["gemm"]
        if "gemms_struct" in config:
            struct = config.pop("gemms_struct")
            for element in struct:
                custom_assert("enabled" not in element, "'enabled' stands beside gemms_struct, not inside of it.")
                self._validate_gemm(element.get("gemm"))
            chosen = next((copy.deepcopy(e) for e in struct if e["gemm"] == gemm), None)
            if chosen is None:
                return None
            if any(name in chosen for name in ("tensors", "tensors_struct")):
                config.pop("tensors", None), config.pop("tensors_struct", None)
            config.update(chosen)
        elif "gemms" in config:
            gemms = config.pop("gemms")
            self._validate_gemm(*gemms)
            if gemm not in gemms:
                return None
            config["gemm"] = gemm
        else:
            raise ValueError(
                "Provide 'gemms_struct: List[Dict]' or 'gemms: List[str]' in the config yaml, "
                f"with GEMMs of {', '.join(_GEMMS)}."
            )
        return self._process_tensor_config(config, call["tensor_name"]) if call.get("tensor_parsing") else config

    def _validate_gemm(self, *gemms: Any) -> None:
        for gemm in gemms:
            custom_assert(gemm in _GEMMS, f"Invalid gemm: {gemm}. It must be one of {', '.join(_GEMMS)}.")

    def _say(self, api: str, layer_name: str, *of: str) -> None:
        """Log, once for each of these, that the feature ran."""
        text = f"Feature={type(self).__name__}, API={api}: {', '.join(of)}"
        debug_api.log_message(text, layer_name, extra_cachable_args=of)


class Seen(NamedTuple):
    """A tensor as a feature that looks at tensors is shown it."""

    layer: str
    name: str
    iteration: int
    values: torch.Tensor | None  # None of a weight that is held quantized
    rowwise: Any  # what it was quantized to
    columnwise: Any
    quantizer: Any

    @property
    def quantized(self) -> Any:
        """What it was quantized to, along its rows if that is there."""
        return self.columnwise if self.rowwise is None else self.rowwise


class Looking(TEConfigAPIMapper):
    """A feature that looks at tensors in the configured iterations."""

    says: ClassVar[str] = "inspect_tensor"  # in the log

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """In the configured iterations."""
        self._check_stats(config.get("stats", ()))
        return asked(config, iteration)

    def _check_stats(self, stats: Any) -> None:
        """Raise for a statistic that the feature does not have, if it can tell before it looks."""

    @api_method
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: torch.Tensor | None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
    ) -> None:
        """Look at it, and say so in the log if there was anything to look at."""
        quantized = rowwise_quantized_tensor, columnwise_quantized_tensor
        if self._look(config, Seen(layer_name, tensor_name, iteration, tensor, *quantized, quantizer)):
            self._say(self.says, layer_name, tensor_name)

    def _look(self, config: dict[str, Any], seen: Seen) -> bool:
        """Look at a tensor; whether there was anything to look at."""
        raise NotImplementedError


class Switching(TEConfigAPIMapper):
    """A feature that says of GEMMs whether they run in FP8, in every iteration."""

    in_fp8: ClassVar[bool] = False
    older: ClassVar[tuple[str, str] | None] = None  # the feature's older name, and the newer one

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """All of them, or none."""
        if self.older is not None:
            deprecated(*self.older)
        return self.in_fp8, None


class Changing(Switching):
    """A feature that has GEMMs read another tensor, in every iteration."""

    @api_method
    def modify_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Those that are configured."""
        return True, iteration + 1

    @api_method
    def modify_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        default_quantizer: Any,
        iteration: int,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """What the GEMM reads in its place; nothing if that was written to `out`."""
        made = self._changed(config, layer_name, tensor, default_quantizer, out, dtype)
        self._say("process_tensor", layer_name, gemm, tensor_name)
        return made

    def _changed(
        self, config: dict[str, Any], layer: str, tensor: torch.Tensor, quantizer: Any, out: Any, dtype: Any
    ) -> Any:
        raise NotImplementedError


def _levels(config: Any) -> Iterator[dict[str, Any]]:
    """A configuration, and what its `_struct`s give to single GEMMs and tensors."""
    if not isinstance(config, dict):
        raise ValueError(
            f"gemms_struct and tensors_struct are lists of mappings, with gemm: or tensor: in each: {config!r}."
        )
    yield config
    for name in ("gemms_struct", "tensors_struct"):
        for element in config.get(name) or ():
            yield from _levels(element)


def _listed(names: Any) -> list[Any]:
    return names if isinstance(names, list) else [] if names is None else [names]


class TEDefaultFeatures:
    """Every call that a layer makes, and what it gets where no feature answers. `iteration` counts steps."""

    def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int) -> Any:
        """Whether this GEMM runs quantized (in any format), and when the answer may change (None: never)."""
        return True, None

    def modify_tensor_enabled(self, config: Any, layer_name: str, gemm: str, tensor_name: str, iteration: int) -> Any:
        """Whether `modify_tensor` shall be called for this tensor of this GEMM, and when the answer may change."""
        return False, None

    def modify_tensor(
        self,
        config: Any,
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: torch.Tensor,
        default_quantizer: Any,
        iteration: int,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """What the GEMM reads in the place of the tensor: plain or quantized; nothing if it was written to `out`."""
        raise NotImplementedError("modify_tensor_enabled said yes, and no feature has modify_tensor for this tensor.")

    def inspect_tensor_enabled(self, config: Any, layer_name: str, tensor_name: str, iteration: int) -> Any:
        """Whether `inspect_tensor` shall be called, and when the answer may change."""
        return False, None

    def inspect_tensor(
        self,
        config: Any,
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: torch.Tensor | None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
        tp_size: int = 1,
    ) -> None:
        """Look at a tensor and what it was quantized to; `tensor` is None for a weight that is held quantized."""

    def inspect_tensor_postquantize_enabled(
        self, config: Any, layer_name: str, gemm: str, tensor_name: str, iteration: int
    ) -> Any:
        """The older call: whether `inspect_tensor_postquantize` shall be called."""
        return False, None

    def inspect_tensor_postquantize(
        self, config: Any, layer_name: str, tensor_name: str, tensor: Any, iteration: int, tp_group: Any, rowwise: bool
    ) -> None:
        """The older call: look at what a GEMM reads."""


_OPERANDS = ("gemm", "tensor_name", "iteration")
#: What a call has to bring.
_REQUIRED = {
    "fp8_gemm_enabled": ("gemm", "iteration"),
    "modify_tensor_enabled": _OPERANDS,
    "modify_tensor": (*_OPERANDS, "tensor", "default_quantizer"),
    "inspect_tensor_enabled": ("tensor_name", "iteration"),
    "inspect_tensor": ("tensor_name", "iteration", "tensor"),
    "inspect_tensor_postquantize_enabled": _OPERANDS,
    "inspect_tensor_postquantize": ("tensor_name", "iteration", "tensor"),
}
#: The argument by which a routed call is found again.
_CACHED_BY = {name: [k for k in keys if k in ("gemm", "tensor_name")] for name, keys in _REQUIRED.items()}
_CACHED_BY["inspect_tensor_postquantize"] = ["gemm", "tensor_name"]
_ONE_FEATURE = ("modify_tensor", "modify_tensor_enabled")
_LOOKS = ("inspect_tensor", "inspect_tensor_postquantize")
_TENSORS = (torch.Tensor, QuantizedTensor, QuantizedTensorStorage)


class _Quiet:
    """A tensor on its way through the package: to print it would wait for the GPU."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"


def _opened(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.value if type(v) is _Quiet else v for k, v in kwargs.items()}


class TransformerEngineAPI(BaseNamespaceAPI):
    """Routes the calls of layers to features. One exists from `initialize` to `end_debug`."""

    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = TEDefaultFeatures()
        self._cacheable_api_kwargs_map = _CACHED_BY
        self._signatures: dict[Any, frozenset[str] | None] = {}
        self._matched = False  # whether it was looked at which layers the configuration means
        routing.begin()

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        """Several features may look at a tensor, and one may change it."""
        return api_name not in _ONE_FEATURE

    def route_api(self, layer_name: str, api_name: str, **kwargs: Any) -> Any:
        """Where several features answer, the package prints all arguments of each call: tensors stay out of that."""
        quiet = {k: _Quiet(v) if isinstance(v, _TENSORS) else v for k, v in kwargs.items()}
        return super().route_api(layer_name, api_name, **quiet)

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """A call brings what it has to."""
        for name in _REQUIRED.get(api_name, ()):
            custom_assert(name in kwargs, f"Missing argument `{name}` in a call of {api_name}.")

    def routing_condition(
        self, api_name: str, config: dict[str, Any], layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a feature's configuration means this call."""
        by_gemm = "gemm" in _REQUIRED[api_name]
        if api_name.startswith("inspect_tensor_postquantize"):
            by_gemm = "gemm" in kwargs and any(name in config for name in ("gemms", "gemms_struct"))
        by_tensor = "tensor_name" in _REQUIRED[api_name]
        parse = feature_obj.parse_config_and_api
        return parse(config, gemm_parsing=by_gemm, tensor_parsing=by_tensor, **_opened(kwargs))

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """An answer is what its call asks for."""
        if api_name.endswith("_enabled"):
            value = ret[0] if isinstance(ret, tuple) else ret
            custom_assert(
                isinstance(value, bool), f"{api_name} must return a bool, or (bool, int or None): got {ret!r}."
            )
        elif api_name == "modify_tensor":
            if kwargs.get("out") is not None:
                custom_assert(ret is None, "modify_tensor with `out` must return None.")
                return
            allowed = isinstance(ret, (torch.Tensor, QuantizedTensor, QuantizedTensorStorage))
            custom_assert(allowed, f"modify_tensor must return a torch.Tensor or a quantized tensor, not {type(ret)}.")
            dtype = kwargs.get("dtype")
            if dtype is not None and type(ret) is torch.Tensor:
                custom_assert(ret.dtype == dtype, f"modify_tensor must return {dtype} here, not {ret.dtype}.")

    def handle_multi_feature_output(
        self, api_name: str, multi_feature_outputs: list[Any], features_to_invoke: Any, **kwargs: Any
    ) -> Any:
        """One yes is a yes; the answers together may change when the first of them may."""
        if not api_name.endswith("_enabled"):
            return None
        pairs = [out if isinstance(out, tuple) else (out, None) for out in multi_feature_outputs]
        yes, nexts = any(yes for yes, _ in pairs), [after for _, after in pairs if after is not None]
        if not all(isinstance(out, tuple) for out in multi_feature_outputs):
            return yes
        if nexts and all(isinstance(after, EveryOne) for after in nexts):
            return yes, nexts[0]
        return yes, min(map(int, nexts), default=None)

    def call_feature(self, call: Any, feat_config: dict[str, Any], layer_name: str, **kwargs: Any) -> Any:
        """The feature's method with the arguments that it names: older ones lack some."""
        if call.__name__ == "inspect_tensor_postquantize" and not isinstance(
            getattr(call, "__self__", None), TEDefaultFeatures
        ):
            deprecated("inspect_tensor_postquantize", "inspect_tensor, which gets the quantized tensors, too")
        kwargs = _opened(kwargs)
        if call.__name__ in _LOOKS and not self._wants(call, feat_config, layer_name, kwargs):
            return None
        return call(feat_config, layer_name, **self._accepted(call, kwargs))

    def _wants(self, call: Any, config: dict[str, Any], layer: str, kwargs: dict[str, Any]) -> bool:
        """Whether a feature itself asked to look at a tensor now: another one may have."""
        feature, question = getattr(call, "__self__", None), f"{call.__name__}_enabled"
        features = ConfigManager.get_config_for_layer(layer).get(self.name, {})
        asks = None if len(features) < 2 else getattr(feature, question, None)
        if asks is None:
            return True
        answer = asks(config, layer, **self._accepted(asks, kwargs))
        return bool(answer[0] if isinstance(answer, tuple) else answer)

    def _accepted(self, call: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that it names."""
        key = getattr(call, "__func__", call)
        if key not in self._signatures:
            parameters = inspect.signature(call).parameters.values()
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
            self._signatures[key] = None if takes_any else frozenset(p.name for p in parameters)
        names = self._signatures[key]
        return kwargs if names is None else {k: v for k, v in kwargs.items() if k in names}

    def step(self) -> None:
        """An iteration has ended: write its statistics, and ask layers anew whose answers may have changed."""
        stats.write()
        routing.stepped()
        self._tell_unmatched()

    def end_debug(self) -> None:
        """Layers run as they do without debugging."""
        self._tell_unmatched()
        stats.STATS_BUFFERS.clear()
        routing.end()

    def _tell_unmatched(self) -> None:
        """Once, with the first layers behind: warn of sections of the configuration that mean none of these."""
        if not self._matched and ConfigManager.layer_name_to_config_cache:
            self._matched = True
            routing.warn_unmatched(self.name)


__all__ = ["SELECTORS", "TEConfigAPIMapper", "TEDefaultFeatures", "TransformerEngineAPI", "api_method"]
