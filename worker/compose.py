"""Names what hangs on a worker's core: how it starts, ranks, tiers, adapters, images and states. No other file does."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.compose import FullEngine
from engine.engine import Engine, Place
from runtime.config import DecodeConfig, PrefillConfig
from worker.adapters.loader import AdapterLoader
from worker.adapters.slots import AdapterSlots
from worker.chunks import TEXTS_S, ChunkSizer, build_budget
from worker.features import Features
from worker.images.encoder import ImageEncoder
from worker.images.spans import fit_chunk
from worker.interfaces import Adapters, States
from worker.itl_goal import choose_sizer
from worker.metrics import WorkerMetrics
from worker.new_weights import NewWeights
from worker.peers.kv_peers import KVPeers
from worker.peers.other_ranks import ALONE, OtherRanks
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.ranks import host_process
from worker.ranks.children import RankChildren
from worker.ranks.leader import LedHeadRunner, LedInputBatch, LedRunner, StagedRunner
from worker.role import Worker
from worker.startup.build import build_rank_engine, choose_rank_device, find_weights, join_rank
from worker.startup.device_limits import complete_here
from worker.startup.limits import ConfigT
from worker.states.metrics import add_gauges
from worker.states.slots import StateSlots, choose_spacing
from worker.thread import EngineThread
from worker.tiers.events import KVEvents
from worker.tiers.files import KVTiers
from worker.tiers.kept_pages import KeptPages


def start_engine(
    role: str, config: ConfigT, incarnation: str, on_progress: Callable[..., None]
) -> tuple[ConfigT, FullEngine, OtherRanks]:
    """Settings without 0 for a limit, this process's engine, and the other ranks of the worker."""
    config = complete_here(config, choose_rank_device(config, 0))
    others, place = join_ranks(role, config, incarnation)
    engine = build_rank_engine(config, place, on_progress)
    others.lead(find_weights(engine))
    return config, engine, others


def join_ranks(role: str, config: PrefillConfig | DecodeConfig, incarnation: str) -> tuple[OtherRanks, Place]:
    """Starts the other ranks of this worker. Returns them, and what this process's engine has of that."""
    if config.num_ranks == 1:
        return ALONE, Place()
    children = RankChildren(role, config, incarnation)
    leader = children.leader
    ranks = join_rank(config, 0, children.rendezvous, children.interface)
    lead = LedRunner if config.pp == 1 else StagedRunner
    place = Place(
        ranks, children.pool_fds, partial(LedInputBatch, leader), partial(lead, leader),
        partial(LedHeadRunner, leader, 1), num_hosts=config.num_hosts,
    )  # fmt: skip
    return children, place


run_other_host = host_process.run  # of a worker's hosts


def build_cache(engine: Engine) -> PrefixCache:
    """The owner of the engine's pages."""
    order = KeptPages(engine.num_pages, engine.pool.shape.page_tokens, time.monotonic)
    return PrefixCache(engine.num_pages, engine.pool.generations, order)


def build_states(engine: Engine) -> States:
    """The owner of the engine's slots."""
    pool, states = engine.pool, engine.states
    if states is None:
        return States()
    page_tokens = pool.shape.page_tokens
    spacing = choose_spacing(states.all_page_bytes, pool.all_page_bytes, page_tokens)
    return StateSlots(PrefixCache(engine.num_slots, states.generations), page_tokens, spacing)


def build_adapters(engine: FullEngine) -> Adapters:
    """The owner of the engine's slots for adapters."""
    return AdapterSlots(engine.adapters.num_slots) if engine.adapters else Adapters()


def compose_budget(engine: FullEngine, prompt_tokens: int, setting: str, itl_goal_s: float = 0.0) -> TokenBudget:
    """`setting`: the flag that sets prompt_tokens; `itl_goal_s`: longest step with answers; 0: no goal."""
    others: dict[str, Any] = {"fit": fit_chunk} if engine.sees_whole_images else {}
    if engine.pooled is not None and engine.pooled.is_whole:
        others = {"fit": lambda params, begin, count: params.num_prompt - begin}  # a text is one step's
    num_stages = engine.pool.num_stages
    sizer = choose_sizer(itl_goal_s) if engine.pooled is None else partial(ChunkSizer, chunk_s=TEXTS_S)
    others |= {"build_sizer": sizer, "num_stages": num_stages}
    most = max(prompt_tokens // num_stages, engine.pool.shape.page_tokens)  # so that a prompt's chunks fill all stages
    return build_budget(most, setting, engine.device.type, **others)


def build_features(
    worker: Worker, config: PrefillConfig | DecodeConfig, peers: KVPeers, thread: EngineThread, metrics: WorkerMetrics
) -> Features:
    """Builds the features of this worker's service. `peers`: closed by the caller, later. Raises OSError."""
    engine, slots = worker.engine, worker.scheduler.kv.states.cache
    parts = config.kv_events, config.kv_events_replay
    events = KVEvents(worker, thread, *parts) if config.kv_events else None
    features = Features(KVTiers(worker, peers, thread, metrics, events))
    features.weights = NewWeights(worker, thread, config.weights_dir)
    thread.on_failure = worker.others.end_process
    if engine.states is not None:
        add_gauges(slots, metrics)
    if engine.vision is not None:
        features.images = ImageEncoder(engine.vision, thread if worker.threads else None, metrics)
    if isinstance(worker.scheduler.adapters, AdapterSlots):
        features.adapters = AdapterLoader(engine, worker.scheduler.adapters, worker.others, thread, metrics)
    return features
