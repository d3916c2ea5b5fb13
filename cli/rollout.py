"""`baton rollout NEW=0.1`: what share of new requests the workers of a revision get."""

import json
from contextlib import closing
from typing import Any

from rich.table import Table
from rich.text import Text

from cli.screen import open_console
from cli.service import URL, ApiKey, CommandError, Service, Url
from runtime.config_parts import parse_share

PATH = "/v1/revisions"


def rollout(*shares: str, end: bool = False, url: Url = URL, api_key: ApiKey = "") -> int:
    """Show the revisions of a running service, or share out new requests among them.

    Args:
        shares: REVISION=SHARE, such as new=0.1; other revisions share what is left. They replace the shares before, and
            need the admin key.
        end: Drop all shares: new requests go to every complete revision, by load.
    """
    if end and shares:
        raise CommandError("--end drops all shares: give it alone")
    body = dict(map(_parse, shares)) if shares or end else None
    method = "GET" if body is None else "POST"
    with closing(Service(url, api_key)) as service, service.call(method, PATH, body) as response:
        answer = response.read()
    try:
        open_console().print(build_table(json.loads(answer)["revisions"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(f"{url} answers {PATH} without revisions: set --url to a Baton gateway") from error
    return 0


def _parse(text: str) -> tuple[str, float]:
    try:
        return parse_share(text)
    except ValueError as error:
        raise CommandError(f"{text!r} is no share: give REVISION=SHARE, such as new=0.1") from error


def build_table(revisions: dict[str, dict[str, Any]]) -> Table:
    """A line for each revision."""
    table = Table()
    for column in ("revision", "share of new requests", "prefill workers", "decode workers", "running"):
        table.add_column(column)
    for name, one in revisions.items():
        share = one.get("share")
        said = "what is left" if share is None else f"{share:.4g}"
        table.add_row(Text(name), said, *(str(one.get(column)) for column in ("prefill", "decode", "running")))
    return table
