"""What the modules' constructors take: each argument's values by its name.

Every constructor hands over what it was given, before it makes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from te_core.layers.entries import Option
from te_core.layers.table import OPTIONS
from te_core.ops.norm import KINDS as NORMS
from te_core.ops.norm import MAX_ROW
from te_core.spelling import choice_error
from te_torch.parallel.symmetric import check_way
from te_torch.runtime import FLOATS
from te_torch.values import OptionError, is_flag, is_number, is_size


class _Rule(NamedTuple):
    """The values that an argument may have, and how that is said."""

    takes: Callable[[Any], bool]
    allowed: str
    choices: tuple[str, ...] = ()


def _sizes(value: Any) -> bool:
    return is_size(value) or (isinstance(value, Sequence) and len(value) > 0 and all(map(is_size, value)))


def _dtype(value: Any) -> bool:
    dtype = torch.get_default_dtype() if value is None else value
    return isinstance(dtype, torch.dtype) and dtype in FLOATS


def _window(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray | torch.Tensor) and len(value) == 2 and all(map(_is_integer, value))


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _margins(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) <= {"forward", "backward", "inference"} and all(n == 0 or is_size(n) for n in value.values())
    return value == 0 or is_size(value)


def _device(value: Any) -> bool:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        return False
    if device.type != "cuda" or torch._C._len_torch_dispatch_stack() > 0:  # fake tensors stand in for a GPU
        return device.type in ("cpu", "meta", "cuda")
    return (device.index or 0) < torch.cuda.device_count()


def _or_none(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.takes(value), f"{rule.allowed}, or None")


def _rule_of(option: Option) -> _Rule:
    """The rule of an option of layers, for numbers and flags of other libraries' types, too."""
    stands_for = is_flag if option.kind is bool else is_number if option.kind is float else None

    def takes(value: Any) -> bool:
        return option.allows(option.kind(value) if stands_for is not None and stands_for(value) else value)

    return _Rule(takes, option.said(), option.choices)


_SIZE = _Rule(is_size, "an integer >= 1")
_ABOVE = _Rule(lambda value: is_number(value) and value > 0, "a number above 0")
_FLAG = _Rule(is_flag, "True or False")
_STRING = _Rule(lambda value: isinstance(value, str), "a string")
_DTYPE = _Rule(_dtype, "float32, bfloat16 or float16 (None: torch's default dtype, which has to be one of these)")
_CALLABLE = _or_none(_Rule(callable, "a callable"))

_DEVICES = "a device of torch, 'cpu', 'meta', or 'cuda' where there is a GPU" + (
    "" if torch.version.cuda else f" and a torch built for CUDA (torch {torch.__version__} is built for the CPU)"
)

#: Options of which modules take more than their layers.
_WIDER = ("activation", "attn_mask_type", "core_attention_bias_type", "softmax_type", "window_size")
_RULES: dict[str, _Rule] = {
    **{name: _rule_of(option) for name, option in OPTIONS.items() if name not in _WIDER},
    **dict.fromkeys(
        ("in_features", "out_features", "ffn_hidden_size", "num_attention_heads", "num_gemms"), _SIZE
    ),
    **dict.fromkeys(("max_batch_size", "max_sequence_length"), _SIZE),
    **dict.fromkeys(
        ("num_gqa_groups", "kv_channels", "layer_number", "align_size", "tp_size", "num_heads_kv", "head_dim_k",
         "head_dim_v", "total_num_pages", "page_size", "max_ctx_len", "shared_ffn_hidden_size"),
        _or_none(_SIZE),
    ),
    **dict.fromkeys(("layernorm_epsilon", "qk_norm_eps"), _rule_of(OPTIONS["eps"])),
    "dim": _SIZE,
    **{name: _or_none(_rule_of(OPTIONS[name])) for name in ("num_groups", "group_topk", "scaling_factor")},
    **dict.fromkeys(("expert_bias_rate", "aux_loss_coeff"), _Rule(lambda n: is_number(n) and n >= 0, "a number >= 0")),
    "rotary_percent": _Rule(lambda value: is_number(value) and 0 < value <= 1, "a share: above 0, at most 1"),
    "rotary_base": _ABOVE,
    "seq_len_interpolation_factor": _or_none(_ABOVE),
    "pretrained_max_position_embeddings": _or_none(_SIZE),
    "drop_path_rate": _rule_of(OPTIONS["hidden_dropout"]),
    **dict.fromkeys(
        ("bias", "return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute", "return_layernorm_output_gathered",
         "input_layernorm", "output_layernorm", "parallel_attention_mlp", "apply_residual_connection_post_layernorm",
         "fuse_qkv_params", "qk_norm_before_rope", "return_max_logit", "save_original_input", "single_grouped_weight",
         "single_grouped_bias", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad",
         "ub_bulk_wgrad", "ub_tp_comm_overlap", "expert_bias", "return_aux_loss", "shared_gate"),
        _FLAG,
    ),
    **dict.fromkeys(
        ("sequence_parallel", "set_parallel_mode", "enc_dec_bottom_right_diagonal", "is_paged"), _or_none(_FLAG)
    ),
    **dict.fromkeys(("params_dtype", "dtype"), _DTYPE),
    **dict.fromkeys(("init_method", "output_layer_init_method", "get_rng_state_tracker"), _CALLABLE),
    **dict.fromkeys(("window_size", "enc_dec_window_size"), _or_none(_Rule(_window, "two integers (left, right)"))),
    "hidden_size": _SIZE,
    "attn_input_format": _rule_of(OPTIONS["qkv_format"]),
    "sm_margin": _Rule(_margins, "an integer >= 0, or a dict of these for 'forward', 'backward' and 'inference'"),
    "activation_params": _or_none(
        _Rule(lambda value: isinstance(value, Mapping) and all(map(is_number, value.values())), "a dict of numbers")
    ),
    "device": _or_none(_Rule(_device, _DEVICES)),
    **dict.fromkeys(("name", "rng_tracker_name", "ub_name"), _or_none(_STRING)),
}  # fmt: skip
#: Where an argument of that name is another one.
_OF: dict[tuple[str, str], _Rule] = {
    **dict.fromkeys(
        [(norm, name) for norm in NORMS for name in ("normalized_shape", "hidden_size")],
        _or_none(
            _Rule(
                lambda value: _sizes(value) and math.prod([value] if is_size(value) else value) <= MAX_ROW,
                f"an integer >= 1 or several, with at most {MAX_ROW} elements a row",
            )
        ),
    ),
    **dict.fromkeys(
        [("LayerNormLinear", "in_features"), ("LayerNormMLP", "hidden_size")],
        _Rule(lambda value: is_size(value) and value <= MAX_ROW, f"an integer from 1 to {MAX_ROW}, a row of the norm"),
    ),
    ("InferenceParams", "dtype"): _Rule(lambda value: value is None or _dtype(value), _DTYPE.allowed),
    ("DotProductAttention", "kv_channels"): _Rule(
        lambda value: is_size(value) or (_sizes(value) and len(value) == 2), "an integer >= 1, or (of q and k, of v)"
    ),
}


#: Whose arguments are checked by these rules.
_CONSTRUCTORS = frozenset(
    (*NORMS, "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "InferenceParams", "LayerNormLinear",
     "LayerNormMLP", "Linear", "MoELayer", "MultiheadAttention", "RotaryPositionEmbedding", "TransformerLayer")
)  # fmt: skip
#: Rules that say nothing which a description of the argument does not.
_PLAIN = ("True or False", "a callable", "a string", "a device", "float32")


def allowed_values(operation: str, name: str) -> str:
    """Which values an argument of this constructor may have, in words; "" where its description says it."""
    rule = (_OF.get((operation, name)) or _RULES.get(name)) if operation in _CONSTRUCTORS else None
    return "" if rule is None or rule.allowed.startswith(_PLAIN) else rule.allowed


def check_values(operation: str, options: Mapping[str, Any]) -> None:
    """Refuse values that a constructor does not take; `options` are its arguments by name."""
    for name, value in options.items():
        rule = _OF.get((operation, name)) or _RULES.get(name)
        if rule is not None and not rule.takes(value):
            if rule.choices:
                raise choice_error(operation, name, value, rule.choices, OptionError)
            default = f", torch.get_default_dtype()={torch.get_default_dtype()}" if rule is _DTYPE and not value else ""
            raise OptionError(operation, f"{name}={value!r}{default}", rule.allowed, f"correct {name}")


def window_of(operation: str, value: Any, name: str = "window_size") -> tuple[int, int]:
    """A forward's window in integers of its own: a plan compares it with that of the next call, whose list may be this
    one, changed in place."""
    check_values(operation, {name: value})
    left, right = map(index, value)
    return left, right


def check_options(operation: str, options: Mapping[str, Any]) -> None:
    """The same, and refuse a `parallel_mode` or a `symmetric_ar_type` that is not known."""
    check_values(operation, options)
    mode = options.get("parallel_mode")
    if mode is not None and str(mode).lower() not in ("column", "row"):
        raise choice_error(operation, "parallel_mode", mode, (None, "column", "row"))
    check_way(operation, options.get("symmetric_ar_type"))
