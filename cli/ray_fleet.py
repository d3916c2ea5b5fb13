"""`baton serve --ray ADDRESS`: the gateway and the workers on the nodes of a Ray cluster.

Ray finds room for processes, starts them and says when one is gone; no request passes through it. Each process is the
child of an actor, listens at its node's address, and the gateway reads the workers' addresses from files beside it. A
worker over several hosts is an actor on each of as many nodes; when one is gone, all are placed again.

    placed ──► starting ──► ready: in the files ──► ended, or its node is gone: out of the files ──► placed, elsewhere
                                └── more than the load needs: it drains, and is not placed again
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cli.plan import Bounds, ProcessSpec, choose_prefill_workers, plan_gateway, plan_restart, plan_workers
from cli.ray_holder import ASK_S, Addresses, Holder, Role
from cli.screen import Screen
from cli.supervisor import KILL_S, STOP_MARGIN_S, StartError, describe_failed_start
from runtime.addresses import bare, is_host_port
from runtime.child import describe_exit
from runtime.config import ServeConfig
from runtime.events import Ready
from runtime.gpus import VISIBLE
from runtime.settings import ConfigError

ROLES: tuple[Role, Role] = ("prefill", "decode")
LOOK_S = 5.0  # between two looks at what the load needs
ROOM_S = 60.0  # without a place, after which that is said
NAMED_S = 5.0  # until host 0 has said why its worker ends
LOST = -signal.SIGKILL  # exit status of what ended with its node


class RayFleet:
    """Owns the actors of one service. Lives on the asyncio thread."""

    def __init__(self, config: ServeConfig, screen: Screen, stop_s: float) -> None:
        """Ray is connected. `stop_s`: that processes have to end by themselves."""
        self._config, self._screen, self._stop_s = config, screen, stop_s
        num_gpus = int(ray.cluster_resources().get("GPU", 0)) if config.device != "cpu" else 0  # type: ignore[no-untyped-call]
        self._has_gpus = num_gpus > 0
        num_prefill, _ = choose_prefill_workers(config, num_gpus)
        num_ranks = num_prefill * config.num_ranks_of("prefill") + config.decode_workers * config.num_ranks_of("decode")
        config.require("ray", not num_gpus or num_gpus >= num_ranks, f"a cluster with {num_ranks} GPUs, not {num_gpus}")
        each = [str(gpu) for gpu in range(num_ranks)]  # stand-ins: Ray says which are an actor's
        plans = plan_workers(replace(config, prefill_workers=num_prefill), each)
        self._plans: dict[Role, ProcessSpec] = {role: plan for plan in plans for role in ROLES if plan.role == role}
        self._bounds: dict[Role, Bounds] = {}
        for role in self._plans:
            least = sum(plan.role == role for plan in plans)
            self._bounds[role] = Bounds(least, max(getattr(config, f"max_{role}_workers"), least))
        self._ready: dict[str, Ready] = {}  # process |-> its report
        self._holders: dict[str, Any] = {}  # process |-> its actor
        self._keeping: dict[str, asyncio.Task[None]] = {}  # process |-> what places it, again and again
        self._changed = asyncio.Event()  # one is ready, or has ended
        self._failure = ""  # how the first ended

    async def run(self) -> int:
        """Serve until a signal (returns 0), or until the start fails (1)."""
        serving = asyncio.create_task(self._serve())
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            self._screen.say("stopping")
            return 0
        except TimeoutError:
            late = ", ".join(self._keeping.keys() - self._ready.keys())
            self._screen.fail(f"{late} did not become ready in time: add nodes, or set --start-timeout-s higher")
        except StartError as error:
            self._screen.fail(str(error))
        finally:
            await self._shut_down()
        return 1

    async def _serve(self) -> None:
        async with asyncio.timeout(self._config.start_timeout_s):
            for role, bounds in self._bounds.items():
                for _ in range(bounds.least):
                    self._add(role)
            await self._until_ready()
            self._keep_one(plan_gateway(self._config, (), ("file:workers",)))
            await self._until_ready()
        self._screen.serving(self._ready["gateway"])
        while True:
            await asyncio.sleep(LOOK_S)
            self._check_tasks()
            await self._follow_load()

    async def _until_ready(self) -> None:
        """Raises StartError: at the start a process that ends is not placed again."""
        while len(self._ready) < len(self._keeping):
            self._changed.clear()
            await self._changed.wait()
            self._check_tasks()
            if self._failure:
                raise StartError(self._failure)

    def _add(self, role: Role) -> None:
        """Start one more worker."""
        number = next(number for number in count() if f"{role}-{number}" not in self._keeping)
        self._keep_one(replace(self._plans[role], name=f"{role}-{number}"))

    def _keep_one(self, plan: ProcessSpec) -> None:
        environment = {name: value for name, value in plan.environment.items() if name != VISIBLE}
        self._keeping[plan.name] = task = asyncio.create_task(self._keep(replace(plan, environment=environment)))
        task.add_done_callback(lambda _task: self._changed.set())

    def _check_tasks(self) -> None:
        """Raises what was not foreseen, in place of a service that lacks a process without a word."""
        for task in self._keeping.values():
            if task.done():
                task.result()

    # -- one process -------------------------------------------------------------------------------------------------

    async def _keep(self, plan: ProcessSpec) -> None:
        """Place a process, again whenever it or its node is gone, until it ends as it was asked to."""
        streak, clock = 0, asyncio.get_running_loop().time
        while True:
            began = clock()
            code, why = await self._hold(plan)
            was_ready = self._ready.pop(plan.name, None) is not None
            self._failure = self._failure or why or describe_failed_start(plan, code)
            self._changed.set()
            restart = plan_restart(code, clock() - began if was_ready else 0.0, streak)
            then = f"placed again in {restart[0]:g} s" if restart else "not placed again, as it was asked to end"
            text = f"{why or f'{plan.name} ended with {describe_exit(code)}'}; {then}"
            self._screen.say(text, level="warning" if restart else "info")
            await self._tell_gateway()
            if restart is None:
                del self._keeping[plan.name]
                return
            delay_s, streak = restart
            await asyncio.sleep(delay_s)

    async def _hold(self, plan: ProcessSpec) -> tuple[int, str]:
        """Place it once and follow it. Returns its exit status, and what happened where it could not tell that."""
        room, holders = self._place(plan)
        self._holders[plan.name] = holders[0]
        ends: list[asyncio.Future[int]] = []  # of its processes, host 0's first
        try:
            await self._until_placed(plan, holders)
            ends += [asyncio.ensure_future(one) for one in await self._start(plan, holders)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not ends[0].done():  # it ends with any other, and says why
                await asyncio.wait(ends[:1], timeout=NAMED_S)
            return next(one for one in ends if one.done()).result(), ""
        except RayTaskError as error:  # what `Holder` raised
            return LOST, f"{plan.name} cannot be started: {error.cause}"
        except RayError as error:
            return LOST, f"{plan.name} is gone with its node or its actor ({type(error).__name__})"
        finally:
            del self._holders[plan.name]
            for end in ends:
                end.add_done_callback(lambda one: one.cancelled() or one.exception())  # the first is told
                end.cancel()
            for holder in holders:
                ray.kill(holder)
            if room is not None:
                remove_placement_group(room)

    def _place(self, plan: ProcessSpec) -> tuple[PlacementGroup | None, list[Any]]:
        """An actor on each of its hosts with what its ranks there need; they may be without a place for now."""
        is_gateway, room = plan.role == "gateway", None
        num_hosts: int = 1 if is_gateway else getattr(self._config, f"{plan.role}_hosts")
        num_gpus = len(plan.gpus) // num_hosts if self._has_gpus and not is_gateway else 0
        num_cpus = 0 if is_gateway else plan.settings.threads or 1
        where: list[Any] = ["SPREAD"]
        if is_gateway:  # here, where --host is meant (Ray places soft ones elsewhere, too); it needs no core of its own
            where = [NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)]
        elif num_hosts > 1:
            room = placement_group([{"CPU": num_cpus, "GPU": num_gpus}] * num_hosts, strategy="STRICT_SPREAD")
            where = [PlacementGroupSchedulingStrategy(room, host) for host in range(num_hosts)]
        actor, needs = ray.remote(Holder), {"num_cpus": num_cpus, "num_gpus": num_gpus}
        return room, [
            actor.options(**needs, scheduling_strategy=one, max_restarts=0, max_concurrency=8).remote() for one in where
        ]

    async def _until_placed(self, plan: ProcessSpec, holders: Sequence[Any]) -> None:
        placed = asyncio.gather(*(holder.__ray_ready__.remote() for holder in holders))
        if not (await asyncio.wait([placed], timeout=ROOM_S))[0]:
            nodes = "a node has" if len(holders) == 1 else f"{len(holders)} nodes have"
            self._screen.say(f"{plan.name} waits until {nodes} room for it: `ray status` lists what all have")
        await placed

    async def _start(self, plan: ProcessSpec, holders: Sequence[Any]) -> list[Awaitable[int]]:
        """Start its processes; returns what waits for their exit statuses."""
        leader, *others = holders
        if not others:
            return [self._lead(plan, leader)]
        hosts = {"BATON_NUM_HOSTS": f"{len(holders)}", "BATON_RENDEZVOUS": await leader.find_rendezvous.remote()}
        own = [{**plan.environment, **hosts, "BATON_HOST_RANK": f"{host}"} for host in range(len(holders))]
        first, *rest = [replace(plan, environment=environment) for environment in own]
        return [
            self._lead(first, leader),
            *(one.start.remote(part, {}) for one, part in zip(others, rest, strict=True)),
        ]

    async def _lead(self, plan: ProcessSpec, holder: Any) -> int:
        """Start host 0's process, which serves for all, and follow it to its end."""
        ready: Ready | int = await holder.start.remote(plan, self._find_addresses())
        if isinstance(ready, int):
            return ready
        self._ready[plan.name] = ready
        self._screen.ready(plan.name, ready)
        self._changed.set()
        await self._tell_gateway()
        return int(await holder.wait.remote())

    # -- the gateway and the load ------------------------------------------------------------------------------------

    def _find_addresses(self) -> Addresses:
        return {role: [one.address for one in self._ready.values() if one.role == role] for role in ROLES}

    async def _tell_gateway(self) -> None:
        """Which workers there are. One that cannot be told is about to be placed again, and is told then."""
        if "gateway" in self._ready and "gateway" in self._holders:
            await self._ask(self._holders["gateway"].name_workers.remote(self._find_addresses()))

    async def _ask(self, answer: Any) -> Any:
        with suppress(RayError, TimeoutError):
            return await asyncio.wait_for(answer, ASK_S)

    async def _follow_load(self) -> None:
        """Add workers, or have one drain, as the gateway says that its load needs."""
        if "gateway" not in self._ready or all(one.least == one.most for one in self._bounds.values()):
            return
        needed = await self._ask(self._holders["gateway"].read_needed.remote(self._ready["gateway"].ops_address))
        for role, bounds in self._bounds.items() if needed else ():
            names = [name for name in self._keeping if name.startswith(f"{role}-")]
            wanted = bounds.choose(len(names), needed.get(role, bounds.least), asyncio.get_running_loop().time())
            if wanted > len(names):
                self._screen.say(f"the load needs {wanted} {role} workers; there are {len(names)}")
            for _ in range(wanted - len(names)):
                self._add(role)
            if wanted < len(names) and names[-1] in self._ready:
                self._screen.say(f"the load needs {wanted} {role} workers: {names[-1]} drains")
                self._holders[names[-1]].end.remote(self._stop_s)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """End the gateway, then the workers."""
        for name in self._keeping.keys() - self._ready.keys():
            self._keeping[name].cancel()
        for names in (["gateway"], list(self._ready)):
            holders = [self._holders[name] for name in names if name in self._holders]
            ends = [holder.end.remote(self._stop_s) for holder in holders]
            ended = asyncio.gather(*ends, return_exceptions=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(ended, self._stop_s + KILL_S + ASK_S)
        tasks = list(self._keeping.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def serve_on_ray(config: ServeConfig, screen: Screen) -> int:
    """Run the service of `config` on its Ray cluster until it is stopped; returns the exit code. Raises ConfigError."""
    try:
        if is_host_port(config.ray):  # Ray itself would try for minutes
            host, _, port = config.ray.rpartition(":")
            socket.create_connection((bare(host), int(port)), ASK_S).close()
        ray.init(address=config.ray, namespace="baton", logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray={config.ray!r} cannot be used: {error}; `ray start --head` starts a cluster") from error
    try:
        return asyncio.run(RayFleet(config, screen, config.drain_s + STOP_MARGIN_S).run())
    finally:
        ray.shutdown()
