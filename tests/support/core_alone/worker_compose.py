"""What worker/compose.py is where there are no satellites. Settings name all limits."""

from collections.abc import Callable
from typing import Any, TypeVar

from engine.compose import build_engine
from engine.engine import Engine, Place
from runtime.config import DecodeConfig, PrefillConfig
from worker.features import Features
from worker.interfaces import Adapters, States
from worker.peers.other_ranks import ALONE, OtherRanks
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.table import num_rows_for

ConfigT = TypeVar("ConfigT", PrefillConfig, DecodeConfig)
NUM_PAGES = 64


def start_engine(
    role: str, config: ConfigT, incarnation: str, on_progress: Callable[..., None]
) -> tuple[ConfigT, Engine, OtherRanks]:
    engine = build_engine(
        config.model, "", config.dtype, config.device, 1, config.page_tokens, num_rows_for(config.max_running),
        lambda *_: (NUM_PAGES, 0), on_progress, config.max_context_tokens,
        place=Place(lends=isinstance(config, PrefillConfig)),
    )  # fmt: skip
    return config, engine, ALONE


def run_other_host(*_parts: Any) -> int:
    raise NotImplementedError


def build_cache(engine: Engine) -> PrefixCache:
    return PrefixCache(engine.num_pages, engine.pool.generations)


def build_states(engine: Engine) -> States:
    return States()


def build_adapters(engine: Engine) -> Adapters:
    return Adapters()


def compose_budget(engine: Engine, prompt_tokens: int, setting: str, itl_goal_s: float = 0.0) -> TokenBudget:
    return TokenBudget(prompt_tokens, setting)


def build_features(*_parts: Any) -> Features:
    return Features()
