"""`baton role WORKER prefill|decode|both`: what a worker of both roles takes from now on."""

import asyncio
from typing import Annotated

import grpc
from cyclopts import Parameter

from cli.drain import TIMEOUT_S, Peers, explain
from cli.service import URL, ApiKey, CommandError, Url
from protos import worker_pb2, worker_pb2_grpc
from runtime.config_parts import ROLES, ProcessConfig, WorkerRoles, roles_of
from runtime.malformed import ask_twice
from runtime.trust import load_trust

CALLER = "baton role"


def role(
    worker: str,
    role: WorkerRoles,
    /,
    *,
    force: Annotated[bool, Parameter(negative="")] = False,
    tls_dir: Annotated[str, Parameter(env_var="BATON_TLS_DIR")] = "",
    fleet_secret: Annotated[str, Parameter(env_var="BATON_FLEET_SECRET", show=False)] = "",
    url: Url = URL,
    api_key: ApiKey = "",
) -> int:
    """Change what a worker takes, of those that `baton serve --roles manual` or `baton worker` started.

    It keeps its model, pages and prefix cache. What it has in a closed role goes on to its end. A gateway with --roles
    auto leaves it so for a minute.

    Args:
        worker: host:port of a worker, as `baton status` shows it.
        role: prefill, decode or both.
        force: Do it even if no other worker is left with the role that it loses.
        tls_dir: Folder with ca.pem, cert.pem and key.pem, where the fleet uses TLS.
        fleet_secret: Secret of the fleet; pass it by BATON_FLEET_SECRET, never by flag. One that this user's `baton
            serve` drew is found without.
    """
    wanted, peers = roles_of(role), Peers.read(worker, url, api_key)
    for lost in set(ROLES) - set(wanted) if not force else ():
        if peers.is_only(lost):
            raise CommandError(f"no other worker takes {lost} requests: open that elsewhere first, or add --force")
    return asyncio.run(_set_roles(worker, wanted, peers.find_trust(tls_dir, fleet_secret)))


async def _set_roles(address: str, roles: tuple[str, ...], config: ProcessConfig) -> int:
    request = worker_pb2.SetRolesRequest(roles=roles, caller=CALLER)
    async with load_trust(config).open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            answer = await ask_twice(lambda: stub.SetRoles(request, timeout=TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise CommandError(f"{address}: {error.details()}") from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                advice = "start it by `baton worker`, or the service by `baton serve --roles manual`"
                raise CommandError(f"{address} has one role: {advice}") from error
            raise explain(address, error) from error
    print(f"{address} takes {' and '.join(roles)} requests; {answer.num_left} of others go on to their end")
    return 0
