"""Any content of a configuration file, a variable or a handshake's layout gives settings or a readable error."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from cyclopts.exceptions import CycloptsError
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.sources import CONFIG_TYPES
from kvtransfer.layout import find_mismatch
from protos import kv_pb2
from runtime.settings import ConfigError, field_names
from tests.support.command_line import parse
from tests.support.messages import mutate

fuzz = settings(max_examples=60, suppress_health_check=list(HealthCheck))
VALUES = [
    "0", "-1", "1", "8000", "65536", "1e400", "nan", "inf", "-inf", "0.5", "true", "false", '""', '"auto"', '"0.0.0.0"',
    '"a:1"', '["a:1"]', "[]", "[1]", '[["a"]]', "{}", "{ a = 1 }", "1979-05-27", '"é\\u0000"', "99999999999999999999",
    '"' + "x" * 5000 + '"', '"[::1]"', "'''\n'''",
]  # fmt: skip


def read_settings(command: str, path: Path | None) -> Any:
    """The settings from a file and its environment. Errors must be one line."""
    with contextlib.suppress(ConfigError, CycloptsError):
        return parse(command, file=path)
    return None


@pytest.mark.parametrize("command", CONFIG_TYPES)
def test_files(command: str, tmp_path: Path) -> None:
    names = st.sampled_from([*field_names(CONFIG_TYPES[command]), "nonsense", "a.b", '"é"'])
    lines = st.lists(st.tuples(names, st.sampled_from(VALUES)), max_size=4)
    path = tmp_path / "baton.toml"

    @fuzz
    @given(lines)
    def read(pairs: list[tuple[str, str]]) -> None:
        path.write_text("".join(f"{name} = {value}\n" for name, value in pairs))
        found = read_settings(command, path)
        assert found is None or isinstance(found, CONFIG_TYPES[command])

    read()


def test_any_bytes_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"

    @fuzz
    @given(st.binary(max_size=60) | st.text(alphabet='ab=[]{}".\n#', max_size=30).map(str.encode))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_settings("serve", path)

    read()
    path.write_text("a = " + "[" * 50_000)
    read_settings("serve", path)


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = st.sampled_from(field_names(CONFIG_TYPES["gateway"]))
    text = st.sampled_from([value.strip('"') for value in VALUES]).filter(lambda value: "\0" not in value)
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)

    @fuzz
    @given(st.dictionaries(names, text, max_size=3))
    def read(variables: dict[str, str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(f"BATON_{name.upper()}", value)
            read_settings("gateway", None)

    read()


LAYOUT = kv_pb2.KvLayout(
    protocol_min=3, protocol_max=3, weights="w", dtype="float32", num_layers=2, num_kv_heads=1, page_tokens=4,
    head_dim=8,
)  # fmt: skip


@fuzz
@given(mutate(LAYOUT))
def test_layouts_match_only_when_they_are_the_same(layout: Message) -> None:
    assert isinstance(layout, kv_pb2.KvLayout)
    mismatch = find_mismatch(LAYOUT, layout)
    plain = kv_pb2.KvLayout()
    plain.CopyFrom(layout)
    overlaps = layout.protocol_min <= 3 <= layout.protocol_max
    plain.protocol_min = plain.protocol_max = 3
    assert (mismatch is None) == (overlaps and plain == LAYOUT)
    assert mismatch is None or "differs" in mismatch or "overlap" in mismatch
