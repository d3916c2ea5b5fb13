"""The actor on a node of a Ray cluster, which has one process of Baton's as its child. See ray_fleet.py."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import httpx
import msgspec
import ray
from prometheus_client.parser import text_string_to_metric_families

from cli.plan import ProcessSpec
from cli.process import Process
from cli.supervisor import KILL_S
from runtime.addresses import bracketed, is_any
from runtime.events import Ready
from runtime.rpc import listen_tcp

Role = Literal["prefill", "decode"]
Addresses = Mapping[Role, Sequence[str]]
ASK_S = 10.0  # for an answer that needs no time


def find_node() -> str:
    """Address of this node."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


class Holder:
    """An actor: starts one process on its node, which ends with it."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None  # of a gateway: the files with the workers' addresses
        self._process: Process | None = None

    async def find_rendezvous(self) -> str:
        """host:port of this node at which nothing listens."""
        with listen_tcp(find_node(), 0, "--rendezvous") as listener:
            return f"{bracketed(find_node())}:{listener.getsockname()[1]}"

    async def start(self, spec: ProcessSpec, addresses: Addresses) -> Ready | int:
        """Start it. Returns its report, or its exit status if it never was ready, as hosts other than the first.

        `addresses`: see `name_workers`.
        """
        node = find_node()
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: a process decides by its own settings
        if spec.role == "gateway":
            self._folder = TemporaryDirectory(prefix="baton-ray-")  # of this user alone
            self.name_workers(addresses)
            files = {role: (f"file:{self._folder.name}/{role}",) for role in addresses}
            spec = replace(spec, settings=replace(spec.settings, **files))
        else:
            spec = replace(spec, environment={**spec.environment, "BATON_HOST": node, "BATON_ADVERTISE_HOST": node})
        spec = replace(spec, program=(sys.executable, *spec.program[1:]))
        self._process = Process(spec, lambda process, event: None, lambda name, line: print(line, file=sys.stderr))
        ready = await asyncio.shield(self._process.ready)
        if ready is None:
            return await asyncio.shield(self._process.end)
        host, _, port = ready.address.rpartition(":")
        return msgspec.structs.replace(ready, address=f"{bracketed(node)}:{port}") if is_any(host) else ready

    async def wait(self) -> int:
        """Wait for the process's exit status."""
        assert self._process is not None
        return await asyncio.shield(self._process.end)

    def name_workers(self, addresses: Addresses) -> None:
        """Write the workers' addresses for the gateway: one file for each role."""
        assert self._folder is not None
        for role, named in addresses.items():
            new = Path(self._folder.name, f"{role}.new")
            new.write_text("".join(f"{address}\n" for address in named))
            new.replace(new.with_name(role))

    async def read_needed(self, ops_address: str) -> dict[str, int]:
        """How many workers of each role the gateway's load needs."""
        async with httpx.AsyncClient(timeout=ASK_S, trust_env=False) as client:
            families = text_string_to_metric_families((await client.get(f"http://{ops_address}/metrics")).text)
        samples = [one for family in families for one in family.samples if one.name == "baton:desired_workers"]
        return {one.labels["role"]: int(one.value) for one in samples}

    async def end(self, stop_s: float) -> None:
        """Let the process drain, and kill it after `stop_s`."""
        if self._process is not None and not self._process.end.done():
            self._process.terminate()
            if not (await asyncio.wait([self._process.end], timeout=stop_s))[0]:
                self._process.kill()
                await asyncio.wait([self._process.end], timeout=KILL_S)
        if self._folder is not None:
            self._folder.cleanup()
