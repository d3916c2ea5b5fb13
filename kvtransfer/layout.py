"""Whether two pools hold the same kind of pages. Pure."""

from protos import kv_pb2

# 1: layers outermost in a page. 2: heads outermost (wire/kv_layout.py), which other fields do not show.
PROTOCOL_MIN = 2
PROTOCOL_MAX = 2

_VERSION_FIELDS = ("protocol_min", "protocol_max")


def find_mismatch(ours: kv_pb2.KvLayout, theirs: kv_pb2.KvLayout) -> str | None:
    """The first difference that forbids a transfer, naming both values; None when pages may be exchanged."""
    if ours.protocol_min > theirs.protocol_max or theirs.protocol_min > ours.protocol_max:
        return (
            f"protocol versions do not overlap: {ours.protocol_min}-{ours.protocol_max} here, "
            f"{theirs.protocol_min}-{theirs.protocol_max} there"
        )
    for field in kv_pb2.KvLayout.DESCRIPTOR.fields:
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in _VERSION_FIELDS and here != there:
            return f"{field.name} differs: {here!r} here, {there!r} there"
    return None
