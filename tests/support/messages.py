"""hypothesis strategies for protobuf messages: any message of a type, from its descriptor, with many edge values."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_EDGES_32 = [0, 1, 2, 3, 4, 5, 8, 16, 24, 79, 80, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
_TEXTS = [
    "", "x", "127.0.0.1:1", "unix:/tmp/x", "a b\0c", "%zz:99999", "é" * 300, "x" * 30_000, "w", "float32", "prefill",
    "decode",
]  # fmt: skip

_KINDS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: st.sampled_from(_EDGES_32) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_FIXED32: st.sampled_from(_EDGES_32),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([*_EDGES_32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: st.sampled_from([0, 1, 2, -1, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.sampled_from([*_EDGES_32, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.TYPE_DOUBLE: st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e300, 5e-324]) | st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.sampled_from([0.0, 0.5, 1.0, -1.0]) | st.floats(width=32),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.sampled_from(_TEXTS) | st.text(max_size=20),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=50),
}


@st.composite
def mutate(draw: st.DrawFn, start: Message, most: int = 4) -> Message:
    """`start` with up to `most` fields, at any depth, set to other values."""
    message = type(start)()
    message.CopyFrom(start)
    for _ in range(draw(st.integers(0, most))):
        _change_one(draw, message)
    return message


def _change_one(draw: st.DrawFn, message: Message) -> None:
    fields = [field for field in message.DESCRIPTOR.fields if not _is_map(field)]
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    if draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _change_child(draw, message, field)
    elif field.is_repeated:
        values = draw(st.lists(_KINDS[field.type], max_size=5))
        message.ClearField(field.name)
        is_long = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        getattr(message, field.name).extend(
            values * draw(st.sampled_from([1, 1, 1, 2, 100, 100 if is_long else 10_000]))
        )
    else:
        setattr(message, field.name, draw(_KINDS[field.type]))


def _change_child(draw: st.DrawFn, message: Message, field: Any) -> None:
    child = getattr(message, field.name)
    if field.is_repeated:
        for _ in range(draw(st.sampled_from([0, 1, 2, 5, 2000]))):
            child.add()
        child = child[0] if child else None
    if child is not None:
        child.SetInParent()
        _change_one(draw, child)


def _is_map(field: Any) -> bool:
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry
