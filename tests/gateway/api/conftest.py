"""The APIs that the tests here share."""

from collections.abc import Iterator

import pytest

from tests.support.api_server import ANSWER, FULL, PLAIN, Served, run_api
from tests.support.tiny_tokenizer import write_sentencepiece, write_system_first, write_thinking


@pytest.fixture(scope="package")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_api(tmp_path_factory.mktemp("full"), FULL) as running:
        running.http.headers.update(dict(running.metadata))
        yield running


@pytest.fixture(scope="package")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_api(tmp_path_factory.mktemp("bare"), PLAIN) as running:
        yield running


@pytest.fixture(scope="package")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_api(tmp_path_factory.mktemp("sentence"), PLAIN, write_sentencepiece) as running:
        yield running


@pytest.fixture(scope="package")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_api(tmp_path_factory.mktemp("thinking"), FULL, write_thinking) as running:
        running.http.headers.update(dict(running.metadata))
        yield running


@pytest.fixture(scope="package")
def system_first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with run_api(tmp_path_factory.mktemp("system_first"), FULL, write_system_first) as running:
        running.http.headers.update(dict(running.metadata))
        yield running


@pytest.fixture
def served(full: Served) -> Served:
    """Requires keys and knows tools; its ring is reset for each test."""
    full.ring.reset(full.script(ANSWER))
    return full


@pytest.fixture
def plain(bare: Served) -> Served:
    """Has neither keys nor tools."""
    bare.ring.reset(bare.script(ANSWER))
    return bare
