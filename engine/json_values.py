"""Reads values of a config.json or another JSON object of a checkpoint.

What is wrong is a ValueError that names the key and what is expected; the caller names the file.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from wire.names import MOST_CONTEXT_TOKENS

Json = Mapping[str, Any]
T = TypeVar("T")

NULL_IS_ABSENT = {"head_dim", "num_key_value_heads", "factor", "attention_factor"}  # as in transformers
LARGEST = 2**53  # far beyond any model; integers up to it are exact as floats
MOST = {  # of numbers by which tables are sized before the weights have been looked at
    "num_hidden_layers": 1 << 13,
    "max_position_embeddings": MOST_CONTEXT_TOKENS,
    "head_dim": 1 << 12,
    "global_head_dim": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 26,
    "linear_num_key_heads": 1 << 14,
    "linear_num_value_heads": 1 << 14,
    "linear_key_head_dim": 1 << 12,
    "linear_value_head_dim": 1 << 12,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
}


def integer(config: Json, key: str, default: int | None = None, least: int = 1) -> int:
    value, most = _value(config, key, default), MOST.get(key, LARGEST)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key} must be an integer from {least} to {most}, not {value!r:.80}")
    return value


def number(config: Json, key: str, default: float | None = None, above: float = 0) -> float:
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= LARGEST:
        raise ValueError(f"{key} must be a number above {above} and at most 2**53, not {value!r:.80}")
    return float(value)


def number_unless_zero(config: Json, key: str, default: float) -> float:
    """0 and null mean the default."""
    return number(config, key) if config.get(key) else default


def numbers(config: Json, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` positive numbers."""
    values = collection(config, key, list)
    if len(values) != count:
        raise ValueError(f"{key} must have {count} numbers, not {len(values)}")
    return tuple(number({key: value}, key) for value in values)


def _value(config: Json, key: str, default: object) -> Any:
    value = config.get(key, default)
    return default if value is None and key in NULL_IS_ABSENT else value


def flag(config: Json, key: str, default: bool = False) -> bool:
    """Null is false."""
    value = config.get(key, default)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key} must be true or false, not {value!r:.80}")
    return bool(value)


def collection(config: Json, key: str, kind: type[T]) -> T:
    """An object or a list, empty when it is null or absent."""
    value = config.get(key) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be {'a list' if kind is list else 'an object'}, not {value!r:.80}")
    return value
