"""Any content of a configuration file gives settings or a readable error."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from cyclopts.exceptions import CycloptsError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.sources import CONFIG_TYPES
from runtime.settings import ConfigError, field_names
from tests.support.combinations import examples
from tests.support.command_line import parse

fuzz = settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
VALUES = [
    "0", "-1", "1", "8000", "65536", "1e400", "nan", "inf", "-inf", "0.5", "true", "false", '""', '"auto"', '"0.0.0.0"',
    '"a:1"', '["a:1"]', "[]", "[1]", '[["a"]]', "{}", "{ a = 1 }", "1979-05-27", '"é\\u0000"', "99999999999999999999",
    '"' + "x" * 5000 + '"', '"[::1]"', "'''\n'''",
]  # fmt: skip


def read_settings(command: str, path: Path) -> Any:
    with contextlib.suppress(ConfigError, CycloptsError):
        return parse(command, file=path)
    return None


@pytest.mark.parametrize("command", ["serve", "gateway"])
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
    for data in (b"a = " + b"[" * 50_000, b"\xff = 1", b"\0", b'port = "\xc3"'):
        path.write_bytes(data)
        read_settings(command, path)
