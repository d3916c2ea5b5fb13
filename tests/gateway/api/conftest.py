"""The APIs that the tests here share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.api.http import answer as http_answer
from gateway.request.prepare import ApiOptions
from tests.support.api_server import ANSWER, FULL, PLAIN, Served, run_api
from tests.support.tiny_tokenizer import write_byte_level, write_sentencepiece, write_system_first, write_thinking


def shared(options: ApiOptions, write: Callable[[Path], Path] = write_byte_level) -> Any:
    """A fixture: one API for all tests of this folder, whose client has the key."""

    @pytest.fixture(scope="package")
    def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        with run_api(tmp_path_factory.mktemp("model"), options, write) as served:
            served.http.headers.update(dict(served.metadata))
            yield served

    return running


full, bare = shared(FULL), shared(PLAIN)
sentence, thinking = shared(PLAIN, write_sentencepiece), shared(FULL, write_thinking)
system_first = shared(FULL, write_system_first)


@pytest.fixture(autouse=True)
def refusals_have_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, what an engine refuses at once comes before its stream begins."""
    monkeypatch.setattr(http_answer, "HOLD_S", 2.0)


@pytest.fixture
def served(full: Served) -> Served:
    """Requires keys and knows tools; its engine is reset for each test."""
    full.engine.reset(full.script(ANSWER))
    return full


@pytest.fixture
def plain(bare: Served) -> Served:
    """Has neither keys nor tools."""
    bare.engine.reset(bare.script(ANSWER))
    return bare
