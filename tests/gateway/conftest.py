"""A database of the gateway's store, for tests of what is kept in it: of either kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.store.database import Database
from tests.support.postgres import run_postgres

TABLES = ("answers", "tokens", "gateways", "adapters", "shares", "batch_records")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | Path]:
    if request.param == "sqlite":
        yield tmp_path_factory.mktemp("state") / "answers"
        return
    with run_postgres() as server:
        yield server.url


@pytest.fixture
def database(place: str | Path) -> Iterator[Database]:
    """Empty."""
    found = Database(place)
    with found.transaction(is_written=True):
        for table in TABLES:
            found.do(f"DELETE FROM {table}")
    yield found
    found.close()
