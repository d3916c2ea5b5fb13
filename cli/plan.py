"""Which processes make up a service on one machine, the command line of each, and when one starts again. Pure."""

import signal
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, RolesConfig, ServeConfig
from runtime.config_parts import GPU_SHARE, ROLES
from runtime.events import Ready
from runtime.gpus import VISIBLE
from runtime.settings import ConfigError, Settings, field_names, flag

LOOPBACK = "127.0.0.1"
PLACES = ("host", "port", "ops_host", "ops_port")  # of `baton serve`: where its gateway listens
LEAST_LORAS = 8  # adapters in steps at once where --lora names some: others may be loaded later
HOST_SHARE = 0.5  # of free main memory, for the KV pools of all workers together
# Threads that wait between two products of a step spin for some 0.02 ms before they sleep: longer saves nothing, and
# where others want the same cores, as readers of images do, it costs more than it saves.
SPIN = {"GOMP_SPINCOUNT": "2000"}
PROGRAM = (sys.executable, "-P", "-m", "baton")  # -P: a folder `baton` in the working directory is not ours
ASKED = (0, -signal.SIGTERM, -signal.SIGINT)  # exit statuses after a drain, or a signal during one
FIRST_DELAY_S, MOST_DELAY_S = 0.5, 30.0
MOST_DOUBLINGS = 6  # 0.5 s * 2^6 = 32 s
FEWER_S = 60.0  # for which the load needs fewer workers before one ends
WORTH_S = 5.0  # a worker that served this long starts again as fast as the first time

Command = tuple[str, ...]
SettingsType = TypeVar("SettingsType", bound=Settings)


@dataclass(frozen=True, slots=True)
class ProcessPlan(Generic[SettingsType]):
    """A process to start."""

    name: str  # unique in the service, such as "decode-0"
    role: str
    settings: SettingsType  # without secrets, which travel by environment: command lines are public
    environment: Mapping[str, str]  # added to the supervisor's own, from which BATON_* is removed
    program: Command
    gpus: tuple[int, ...] = ()  # of a worker's ranks, among those given; (0,) without any

    @property
    def command(self) -> Command:
        return (*self.program, self.role, *build_flags(self.settings))


ProcessSpec = ProcessPlan[Any]
WorkerPlan = ProcessPlan[PrefillConfig | DecodeConfig]


def choose_prefill_workers(config: ServeConfig, num_gpus: int) -> tuple[int, str]:
    """How many prefill workers to start for a model that answers, and why. `num_gpus`: that workers may use."""
    if config.prefill_workers is not None:
        return config.prefill_workers, "--prefill-workers"
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        return 1, "on CPUs one is the default"
    if config.prefill_tp > 1 or config.prefill_pp > 1 or config.no_prefill != "fallback":
        return 1, "--prefill-tp, --prefill-pp or --no-prefill asks for one"
    needed = config.decode_workers * config.num_ranks_of("decode") * len(config.model)
    if num_gpus > needed:
        return 1, f"of {num_gpus} GPUs decode workers take {needed}"
    return 0, "decode workers need all GPUs and compute prompts too; another worker would load the weights once more"


def plan_workers(
    config: ServeConfig, gpus: Sequence[str] = (), program: Command = PROGRAM, embedding: Collection[str] = ()
) -> list[WorkerPlan]:
    """The workers, prefill first, and their shares of the machine.

    `gpus`: what processes started here see, by names of CUDA_VISIBLE_DEVICES. Workers take them in turn, so that none
    has two more than another, and no prefill worker shares with a decode worker while a GPU is free. Each sees all,
    its own first: CUDA IPC needs the peer's. Several models, in `config` as NAME=MODEL, follow each other and divide
    memory by as many as are awake at once. `embedding`: names of models that make vectors of texts ("" where there is
    one model), which have prefill workers alone. Raises ConfigError when workers on one GPU want more than all of it.
    """
    models = [text.partition("=")[::2] for text in config.model] if len(config.model) > 1 else [("", config.model[0])]
    gpus = () if config.device == "cpu" else tuple(gpus)
    num_prefill, _ = choose_prefill_workers(config, len(gpus))
    usual = ["prefill"] * num_prefill + ["decode"] * config.decode_workers
    roles_of = [["prefill"] * max(num_prefill, 1) if name in embedding else usual for name, _ in models]
    roles = [(at, number, role) for at, own in enumerate(roles_of) for number, role in enumerate(own)]
    places = place_ranks(config, [role for *_, role in roles], len(gpus))
    num_awake = config.max_awake or len(models)
    num_sharing = count_sharing(places, [len(own) for own in roles_of], num_awake)
    # No other worker uses the decode worker's cores: on a CPU it prefills by itself, unless told to hand prompts off.
    is_handed = num_prefill and config.local_prefill_max_tokens is not None
    num_decode_ranks = config.decode_workers * config.num_ranks_of("decode")
    has_all_cores = not embedding and num_decode_ranks == len(models) == 1 and not is_handed
    plans: list[WorkerPlan] = []
    for (at, own_number, role), own in zip(roles, places, strict=True):
        (model_name, model), own_roles = models[at], roles_of[at]
        given = {name: getattr(config, f"{role}_{name}") for name in ("max_running", "tp", "pp")}
        given |= {"model": model, "model_name": model_name}
        if config.lora and not config.max_loras:
            given["max_loras"] = max(len(config.lora), LEAST_LORAS)
        given["kv_memory_share"] = HOST_SHARE / (len(own_roles) * min(num_awake, len(models)))
        if gpus or config.device == "cuda":
            given["gpu_memory_share"] = share_gpu(config, max(num_sharing[gpu] for gpu in own), num_prefill, len(gpus))
        target: type[PrefillConfig | DecodeConfig] = PrefillConfig if role == "prefill" else DecodeConfig
        command, name = role, f"{role}-{own_number if role == 'prefill' else own_number - num_prefill}"
        if config.roles != "fixed" and own_roles is usual:
            target, command, name = RolesConfig, "worker", f"worker-{own_number}"
            given |= {"role": role, "local_prefill_chunk_tokens": config.chunk_tokens}
            given["max_running"] = config.decode_max_running
        environment = secrets_of(target, config)
        if len(gpus) > 1:
            others = (gpu for gpu in range(len(gpus)) if gpu not in own)
            environment[VISIBLE] = ",".join(gpus[gpu] for gpu in (*own, *others))
        if target is DecodeConfig and has_all_cores:
            environment |= SPIN
        name = f"{model_name} {name}".strip()
        plans.append(ProcessPlan(name, command, derive(target, config, **given), environment, program, own))
    return plans


def place_ranks(config: ServeConfig, roles: Sequence[str], num_gpus: int) -> list[tuple[int, ...]]:
    """The GPUs of each worker's ranks: in turn. Where the driver could not be asked, all are taken to share one."""
    places: list[tuple[int, ...]] = []
    begin = 0
    for role in roles:
        size = config.num_ranks_of(role)
        if num_gpus:
            tp = getattr(config, f"{role}_tp")
            name = f"{role}_tp" if tp > num_gpus or tp == size else f"{role}_pp"
            config.require(name, size <= num_gpus, f"{num_gpus} or less: each rank has a GPU of its own")
        places.append(tuple((begin + rank) % num_gpus for rank in range(size)) if num_gpus else (0,))
        begin += size
    return places


def count_sharing(places: Sequence[tuple[int, ...]], num_workers: Sequence[int], num_awake: int) -> dict[int, int]:
    """GPU |-> the most ranks that share it at once, when `num_awake` models are awake. num_workers: of each model."""
    counts: dict[int, list[int]] = {}
    for end, num_own in zip(accumulate(num_workers), num_workers, strict=True):
        begin = end - num_own
        for gpu, count in Counter(gpu for own in places[begin : begin + num_own] for gpu in own).items():
            counts.setdefault(gpu, []).append(count)
    return {gpu: sum(sorted(found, reverse=True)[:num_awake]) for gpu, found in counts.items()}


def share_gpu(config: ServeConfig, num_sharing: int, num_prefill: int, num_gpus: int) -> float:
    """The share of a GPU that each of its `num_sharing` workers may take. Raises ConfigError if they need more."""
    most = 1 / num_sharing
    if config.gpu_memory_share > most:
        fewer = max(1, num_gpus // config.num_ranks_of("decode"))
        advice = "--prefill-workers 0" if num_prefill else f"--decode-workers {fewer}"
        raise ConfigError(
            f"gpu_memory_share={config.gpu_memory_share:g} cannot be used: {num_sharing} workers share a GPU, which "
            f"leaves {most:.3g} for each: set {advice}"
        )
    return config.gpu_memory_share or GPU_SHARE / num_sharing


def find_addresses(ready: Sequence[Ready]) -> tuple[Command, Command]:
    """Addresses of the prefill workers and of the decode workers. A worker of both roles is in both."""
    prefill, decode = (tuple(one.address for one in ready if one.role in (role, "worker")) for role in ROLES)
    return prefill, decode


def plan_gateway(config: ServeConfig, prefill: Command, decode: Command, program: Command = PROGRAM) -> ProcessSpec:
    """The gateway of workers at these addresses."""
    ports = {part: getattr(config, part) for part in PLACES}
    settings = derive(GatewayConfig, config, **ports, api_key=(), prefill=prefill, decode=decode)
    keys = {"BATON_API_KEY": ",".join(config.api_key)} if config.api_key else {}
    return ProcessPlan("gateway", "gateway", settings, keys | secrets_of(GatewayConfig, config), program)


def secrets_of(target: type[Settings], config: ServeConfig) -> dict[str, str]:
    """Environment variables of the settings that are not shown, as far as the service has them."""
    names = [item.name for item in fields(target) if not item.repr]
    return {f"BATON_{name.upper()}": value for name in names if (value := getattr(config, name))}


def pin_ports(spec: ProcessSpec, ready: Ready) -> ProcessSpec:
    """A worker's spec with the ports that it got, which it keeps: gateways and scrapers know them."""
    ports = {"port": ready.address, "ops_port": ready.ops_address}
    pinned = {name: int(address.rpartition(":")[2]) for name, address in ports.items() if address}
    return replace(spec, settings=replace(spec.settings, **pinned))


def derive(target: type[SettingsType], config: ServeConfig, **given: Any) -> SettingsType:
    """Settings of one process: what it shares by name with the service's, and what is given.

    Hosts and ports of the service are the gateway's; workers listen on any free port of the loopback interface. All log
    JSON lines, which `Screen` shows as --log-format says.
    """
    shown = {item.name for item in fields(target) if item.repr}  # the rest: `secrets_of`
    shared = shown & set(field_names(ServeConfig)) - {*PLACES, "log_format"}
    return target(**{name: getattr(config, name) for name in shared} | {"host": LOOPBACK} | given)


def build_flags(settings: Settings) -> list[str]:
    """The flags that make a fresh process build equal settings; defaults are left out."""
    flags = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        if value == item.default:
            continue
        if isinstance(value, tuple):
            flags += [f"{flag(item.name)}={one}" for one in value]
        elif isinstance(value, bool):
            flags.append(flag(item.name) if value else flag(f"no_{item.name}"))
        else:
            flags.append(f"{flag(item.name)}={value}")
    return flags


def plan_restart(code: int, served_s: float, streak: int) -> tuple[float, int] | None:
    """Decide when to start a worker again that ended with `code`, negative for a signal.

    served_s: how long it took requests, 0 when it never did. streak: starts in a row after which it served less than
    WORTH_S. Returns seconds to wait before the next start and the new streak; None when it was asked to end.
    """
    if code in ASKED:
        return None
    streak = 0 if served_s >= WORTH_S else streak
    return min(FIRST_DELAY_S * 2 ** min(streak, MOST_DOUBLINGS), MOST_DELAY_S), streak + 1


@dataclass(slots=True)
class Bounds:
    """How many workers of a role there may be, where that follows the load."""

    least: int
    most: int
    _fewer_since: float | None = None  # when the load first needed fewer than there are

    def choose(self, num_workers: int, num_needed: int, now: float) -> int:
        """How many there are to be: more at once, as they take time to load; one fewer after FEWER_S."""
        wanted = min(max(num_needed, self.least), self.most)
        if wanted >= num_workers:
            self._fewer_since = None
            return wanted
        self._fewer_since = now if self._fewer_since is None else self._fewer_since
        if now - self._fewer_since < FEWER_S:
            return num_workers
        self._fewer_since = now
        return num_workers - 1
