"""`baton status`: the workers of a running service, as its gateway sees them."""

import json
import sys
from typing import Annotated

import httpx
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.connect import AddressError, open_client

COLUMNS = (
    "role", "address", "pid", "incarnation", "ranks", "transport", "free_pages", "used_pages", "cached_pages",
    "prefix_hits", "running", "trouble",
)  # fmt: skip
TIMEOUT = httpx.Timeout(10.0)
SET_URL = "is it a Baton gateway? Set --url"
ADVICE = {401: "set --api-key to one of the service's", 403: "set --url to the service itself, without a proxy"}
PIPE_WIDTH = 160  # characters, where there is no terminal to ask


def status(
    *,
    url: Annotated[str, Parameter(env_var="BATON_URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, Parameter(env_var="BATON_API_KEY")] = "",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show the workers of a running service.

    Parameters
    ----------
    url
        Where the service answers.
    api_key
        Key that the service wants.
    as_json
        Print JSON instead of a table.
    """
    address = url.rstrip("/").removesuffix("/v1") + "/status"
    try:
        with open_client(url, api_key, TIMEOUT) as client:
            answer = client.get(address).raise_for_status().json()
        workers = [[str(worker.get(column, "")) for column in COLUMNS] for worker in answer["workers"]]
    except AddressError as error:
        return _fail(str(error))
    except httpx.HTTPStatusError as error:
        return _fail(
            f"{address} answers {error.response.status_code}: {ADVICE.get(error.response.status_code, SET_URL)}"
        )
    except httpx.HTTPError as error:
        return _fail(f"{address} does not answer ({error}): start `baton serve`, or set --url")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _fail(f"{address} is no Baton gateway ({type(error).__name__}: {error}): set --url")
    if as_json:
        print(json.dumps(answer))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        console.print(build_table(workers))
    return 0


def build_table(workers: list[list[str]]) -> Table:
    """One row a worker."""
    table = Table()
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in workers:
        table.add_row(*map(Text, row))  # a str would be read as markup, and [::1] vanish
    return table


def _fail(text: str) -> int:
    print(f"baton status: {text}", file=sys.stderr)
    return 1
