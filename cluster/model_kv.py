"""What a model keeps of a sequence, layer by layer, as its config.json tells.

Read by fields rather than by model, so that a model that nobody has heard of is understood too; what can't be told is
refused instead of guessed. Shapes and element types are those of the worker's caches. A Mac plans with what its worker
finds in the model itself; this is for planning without one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd
from typing import Any

from cluster.config import KV_GROUP_SIZES, check_quantization
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVFormat,
    KVSpec,
    LayerSpec,
    MLASpec,
    RecurrentStateSpec,
    SharedKVSpec,
    SlidingWindowSpec,
    StateTensor,
)

_STATE_BYTES = 4


class _Kind(Enum):
    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    DELTA = "gated_delta_net"
    MAMBA2 = "mamba2"
    CONV = "short_conv"
    NONE = "none"


_PATTERN_KINDS = {"M": _Kind.MAMBA2, "*": _Kind.FULL, "-": _Kind.NONE, "E": _Kind.NONE}
_NAMED_KINDS = {
    "full_attention": _Kind.FULL,
    "attention": _Kind.FULL,
    "sliding_attention": _Kind.WINDOW,
    "chunked_attention": _Kind.CHUNKED,
    "linear_attention": _Kind.DELTA,
    "mamba": _Kind.MAMBA2,
    "mamba2": _Kind.MAMBA2,
    "conv": _Kind.CONV,
    "mlp": _Kind.NONE,
    "moe": _Kind.NONE,
}
# What published configs leave out because it is the default of the model's own code.
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"no_rope_layer_interval": 4},
    "gemma4_text": {"sliding_window_pattern": 5},
}
# Families that mlx-lm attends fully with, though published configs name a window.
ATTEND_FULLY = frozenset(
    {
        *("gemma2", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("seed_oss", "starcoder2"),
    }
)
# Say in ways of their own which layers are what.
_UNREADABLE = (
    "linear_attn_config",
    "attn_layer_period",
    "attn_type_list",
    "hybrid_layer_pattern",
    "layer_group_size",
    "block_types",
    "block_configs",
)


def specs_from_config(
    config: dict[str, Any], *, kv_bits: int | None = None, kv_group_size: int | None = None, dtype_bytes: int = 2
) -> list[LayerSpec]:
    """One spec for each layer with a KV cache, in the model's order; layers that are only an MLP have none.

    `kv_bits` quantises keys and values, with a scale and a bias of the model's type for each `kv_group_size` elements
    (None: 64, or 32); states are never quantised. Raises ValueError naming the model type and the field that is missing
    or not understood.
    """
    check_quantization(kv_bits, kv_group_size)
    fields = _Fields.of(config)
    kinds = _layer_kinds(fields)
    first_shared = len(kinds) - fields.optional("num_kv_shared_layers", 0)
    if first_shared < 0:
        raise fields.error(f"shares the KV of {len(kinds) - first_shared} layers, and has {len(kinds)}")
    group_sizes = sorted(KV_GROUP_SIZES, reverse=True) if kv_group_size is None else [kv_group_size]
    maker = _SpecMaker(fields, kv_bits, group_sizes, dtype_bytes)
    specs: list[LayerSpec] = []
    last_of_kind: dict[_Kind, int] = {}
    for layer, kind in enumerate(kinds):
        if kind is _Kind.NONE:
            continue
        if layer < first_shared:
            last_of_kind[kind] = len(specs)
            specs.append(maker.spec(kind))
        elif kind in last_of_kind:
            specs.append(SharedKVSpec(last_of_kind[kind]))
        else:
            raise fields.error(f"layer {layer} shares the KV of a {kind.value} layer, and there is none before it")
    return specs


@dataclass(frozen=True, slots=True)
class _Fields:
    """A language model's part of a config.json. A field that is null counts as missing."""

    model_type: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "_Fields":
        text = config.get("text_config")
        values = text if isinstance(text, dict) else config
        model_type = str(values.get("model_type") or config.get("model_type") or "a model without model_type")
        present = {name: value for name, value in values.items() if value is not None}
        return cls(model_type, _DEFAULTS.get(model_type, {}) | present)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.model_type}: config.json {problem}")

    def number(self, *names: str, least: int = 1) -> int:
        """The first of these fields that is there."""
        for name in names:
            if name in self:
                value = self[name]
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise self.error(f"has {name} {value!r}, where a whole number of at least {least} is expected")
                return value
        raise self.error(f"lacks {' or '.join(names)}")

    def optional(self, name: str, default: int) -> int:
        return self.number(name, least=0) if name in self else default

    def sequence(self, name: str) -> Sequence[Any]:
        """A list, or a string of one letter an item."""
        value = self[name]
        if not isinstance(value, list | str):
            raise self.error(f"has {name} {value!r}, where a list is expected")
        return value

    def kinds(self, name: str, known: Mapping[str, _Kind]) -> list[_Kind]:
        """The layers by their names in one field."""
        names = [str(value) for value in self.sequence(name)]
        for unknown in set(names) - set(known):
            raise self.error(f"has {unknown!r} in {name}; known are {', '.join(known)}")
        return [known[value] for value in names]


def _layer_kinds(fields: _Fields) -> list[_Kind]:
    for name in _UNREADABLE:
        if name in fields:
            raise fields.error(f"tells its layers by {name}, which is not understood")
    for find in (_told_by_list, _told_by_interval, _told_by_window):
        kinds = find(fields)
        if kinds is not None:
            break
    else:
        kinds = [_Kind.FULL] * fields.number("num_hidden_layers")
        if any(name.startswith(("mamba_", "ssm_", "linear_")) for name in fields.values):
            raise fields.error("has a recurrence and lacks layer_types, which says where")
    if len(kinds) != fields.optional("num_hidden_layers", len(kinds)):
        raise fields.error(f"tells {len(kinds)} layers, and has num_hidden_layers {fields['num_hidden_layers']}")
    return kinds


def _told_by_list(fields: _Fields) -> list[_Kind] | None:
    if "hybrid_override_pattern" in fields:
        return fields.kinds("hybrid_override_pattern", _PATTERN_KINDS)
    for name in ("layers_block_type", "layer_types"):
        if name in fields:
            kinds = fields.kinds(name, _NAMED_KINDS)
            if fields.model_type in ATTEND_FULLY:
                kinds = [_Kind.FULL if kind is _Kind.WINDOW else kind for kind in kinds]
            # Newer configs call every recurrence "linear_attention", and Nemotron's is Mamba 2.
            if "linear_num_value_heads" not in fields and "mamba_num_heads" in fields:
                kinds = [_Kind.MAMBA2 if kind is _Kind.DELTA else kind for kind in kinds]
            return kinds
    if "full_attn_idxs" in fields:
        full = fields.sequence("full_attn_idxs")
        if not all(isinstance(index, int) for index in full):
            raise fields.error(f"has full_attn_idxs {full!r}, where a list of layer numbers is expected")
        return [_Kind.FULL if i in full else _Kind.CONV for i in range(fields.number("num_hidden_layers"))]
    return None


def _told_by_interval(fields: _Fields) -> list[_Kind] | None:
    if fields.model_type == "mamba2":
        return [_Kind.MAMBA2] * fields.number("num_hidden_layers")
    if "full_attention_interval" in fields:
        return _every(fields, fields.number("full_attention_interval"), _Kind.DELTA)
    if "attention_chunk_size" in fields:
        # One means rotary positions, and only such layers are chunked. An empty list stands for the interval.
        if fields.values.get("no_rope_layers"):
            return [_Kind.CHUNKED if has_rope else _Kind.FULL for has_rope in fields.sequence("no_rope_layers")]
        return _every(fields, fields.number("no_rope_layer_interval"), _Kind.CHUNKED)
    return None


def _told_by_window(fields: _Fields) -> list[_Kind] | None:
    if "sliding_window" not in fields or fields.values.get("use_sliding_window") is False:
        return None
    if fields.model_type in ATTEND_FULLY:
        return None
    num_layers = fields.number("num_hidden_layers")
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return [_Kind.WINDOW if pattern[i % len(pattern)] == "L" else _Kind.FULL for i in range(num_layers)]
    if pattern is not None:
        return _every(fields, fields.number("sliding_window_pattern"), _Kind.WINDOW)
    if "max_window_layers" in fields:
        first = fields.number("max_window_layers", least=0)
        return [_Kind.WINDOW if i >= first else _Kind.FULL for i in range(num_layers)]
    raise fields.error("has a sliding_window and lacks layer_types or sliding_window_pattern, which say where")


def _every(fields: _Fields, interval: int, other: _Kind) -> list[_Kind]:
    """Full attention at the end of each interval."""
    return [_Kind.FULL if (i + 1) % interval == 0 else other for i in range(fields.number("num_hidden_layers"))]


class _SpecMaker:
    """The spec of each kind of layer of one model."""

    def __init__(self, fields: _Fields, kv_bits: int | None, group_sizes: Sequence[int], dtype_bytes: int) -> None:
        self._fields = fields
        self._kv_bits = kv_bits
        self._group_sizes = group_sizes
        self._dtype_bytes = dtype_bytes
        self._makers: dict[_Kind, Callable[[], KVSpec]] = {
            _Kind.FULL: self._full,
            _Kind.WINDOW: self._window,
            _Kind.CHUNKED: self._chunked,
            _Kind.DELTA: self._delta,
            _Kind.MAMBA2: self._mamba2,
            _Kind.CONV: self._conv,
        }
        self._made: dict[_Kind, KVSpec] = {}

    def spec(self, kind: _Kind) -> KVSpec:
        if kind not in self._made:
            self._made[kind] = self._makers[kind]()
        return self._made[kind]

    def _format(self, *dims: int) -> KVFormat:
        """Of vectors of these lengths."""
        if self._kv_bits is None:
            return KVFormat(8 * self._dtype_bytes)
        common = gcd(*dims)
        for group_size in self._group_sizes:
            if common % group_size == 0:
                return KVFormat(self._kv_bits, group_size, 2 * self._dtype_bytes)
        least = min(self._group_sizes)
        raise self._fields.error(f"has keys or values of {common} elements; kv_bits needs a multiple of {least}")

    def _heads(self) -> int:
        return self._fields.number("num_key_value_heads", "num_attention_heads")

    def _dims(self) -> tuple[int, int | None]:
        """Of a key and, if it is another, of a value."""
        fields = self._fields
        if "head_dim" in fields or "attention_head_dim" in fields:
            key_dim = fields.number("head_dim", "attention_head_dim")
        else:
            key_dim = fields.number("hidden_size") // fields.number("num_attention_heads")
        value_dim = fields.optional("v_head_dim", key_dim)
        return key_dim, None if value_dim == key_dim else value_dim

    def _full(self) -> KVSpec:
        fields = self._fields
        if "kv_lora_rank" in fields:
            return self._latent()
        heads = self._heads()
        if fields.values.get("attention_k_eq_v"):
            heads = fields.optional("num_global_key_value_heads", heads)
        key_dim, value_dim = self._dims()
        if "global_head_dim" in fields:
            key_dim, value_dim = fields.number("global_head_dim"), None
        return FullAttentionSpec(heads, key_dim, self._format(key_dim, value_dim or key_dim), value_dim)

    def _latent(self) -> KVSpec:
        fields = self._fields
        rope_dim = fields.number("qk_rope_head_dim")
        latent_dim, index_dim = fields.number("kv_lora_rank"), fields.optional("index_head_dim", 0)
        return MLASpec(latent_dim, rope_dim, self._format(latent_dim, rope_dim, index_dim), index_dim)

    def _window(self) -> KVSpec:
        key_dim, value_dim = self._dims()
        kv_format = self._format(key_dim, value_dim or key_dim)
        return SlidingWindowSpec(self._heads(), key_dim, self._fields.number("sliding_window"), kv_format, value_dim)

    def _chunked(self) -> KVSpec:
        key_dim, value_dim = self._dims()
        kv_format = self._format(key_dim, value_dim or key_dim)
        return ChunkedLocalSpec(
            self._heads(), key_dim, self._fields.number("attention_chunk_size"), kv_format, value_dim
        )

    def _delta(self) -> KVSpec:
        number = self._fields.number
        key_heads, value_heads = number("linear_num_key_heads"), number("linear_num_value_heads")
        key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return self._state(_Kind.DELTA, number("linear_conv_kernel_dim"), channels, (value_heads, value_dim, key_dim))

    def _mamba2(self) -> KVSpec:
        number = self._fields.number
        heads = number("mamba_n_heads", "mamba_num_heads", "num_heads")
        # In a pure Mamba the plain name means the recurrence; beside attention, attention.
        plain = ("head_dim",) if self._fields.model_type == "mamba2" else ()
        head_dim = number("mamba_d_head", "mamba_head_dim", *plain)
        state_dim = number("mamba_d_state", "ssm_state_size", "state_size")
        channels = heads * head_dim + 2 * number("mamba_n_groups", "n_groups") * state_dim
        kernel = number("mamba_d_conv", "conv_kernel")
        return self._state(_Kind.MAMBA2, kernel, channels, (heads, head_dim, state_dim))

    def _conv(self) -> KVSpec:
        number = self._fields.number
        return self._state(_Kind.CONV, number("conv_L_cache"), number("hidden_size"), None)

    def _state(self, kind: _Kind, kernel: int, channels: int, shape: Sequence[int] | None) -> RecurrentStateSpec:
        """The inputs that a convolution sees again, in the model's type, and a state in float32."""
        conv = StateTensor((kernel - 1, channels), self._dtype_bytes)
        if shape is None:
            return RecurrentStateSpec(kind.value, (conv,))
        return RecurrentStateSpec(kind.value, (conv, StateTensor(tuple(shape), _STATE_BYTES)))
