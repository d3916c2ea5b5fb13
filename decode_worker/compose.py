"""Names what implements a decode worker's interfaces: drafts and grammars. No other file does."""

from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.constraints import Constraints
from decode_worker.grammar.grammars import Grammars
from decode_worker.interfaces import Drafts, GrammarSource, Masks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.speculator import build_speculator
from engine.engine import Engine
from runtime.config import DecodeConfig


def build_drafts(engine: Engine, config: DecodeConfig) -> Drafts:
    return build_speculator(engine, config)


def build_masks() -> Masks:
    return Constraints()


def build_grammars(engine: Engine, config: DecodeConfig, metrics: DecodeMetrics) -> GrammarSource:
    return Grammars(
        GrammarCompiler(engine.folder, engine.config.vocab_size, config.grammar_cpu_s), config.grammar_cache_mib << 20,
        metrics,
    )  # fmt: skip
