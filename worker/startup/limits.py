"""Limits of a worker's steps, and the GPU memory that they take. Pure: model, GPU and settings in, ints out.

Workers at start, `baton doctor` and `baton plan` use the same arithmetic; a worker measures its largest step, the
others estimate it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from engine.cuda.graph_shapes import PIECE_TOKENS, choose_shapes
from engine.cuda.modules import pad_head
from engine.cuda.sizes import EXPANDED_BYTES, most_logits
from engine.experts.config import moe_of
from engine.fallback.config import FallbackConfig
from engine.formats.scheme import read_weight_bytes
from engine.layer_config import MAX_LOGITS_AT_ONCE
from engine.models.config import ModelConfig
from engine.models.table import build_table
from engine.weights.table import Vector, Weight
from runtime.config import DecodeConfig, PrefillConfig, RolesConfig
from runtime.config_parts import GPU_SHARE, NO_DRAFT
from runtime.gpus import Card
from runtime.settings import ConfigError
from wire.kv_layout import describe_token
from wire.names import Quantization

MIB = 1 << 20
ITEM_BYTES = 2  # bfloat16

# Limits on a CPU: a chunk of 512 tokens takes a second or so on a few cores, 64 answers read weights once for all.
CPU_CHUNK, CPU_LOCAL_CHUNK, CPU_PROMPTS, CPU_SESSIONS = 512, 256, 16, 64

# Reached shares of a GPU's peaks, for prompts and for weights and KV: assumptions.
FLOPS_SHARE, BANDWIDTH_SHARE = 0.5, 0.8
LAUNCH_S = 150e-6  # of the host for a layer of a step without graphs
LAUNCH_SHARE = 0.1  # of a chunk's time, at most, that the host may take
TILE, WAVES = 128, 4  # of a product's output; its last wave of tiles over all SMs is half empty: 1/8 of 4 waves
LEAST_CHUNK, MOST_CHUNK = 512, 8192
MOST_LOCAL_CHUNK = 2048  # beside answers worker/chunks.py takes less; alone it delays an answer that begins meanwhile
SHORT_PROMPT = 128  # tokens; so many prompts run at once that short ones fill a chunk
SESSION_TOKENS = 512  # of an average answer halfway, with its prompt
LEAST_SESSIONS, MOST_SESSIONS = 16, 1024  # the host plans a step of 1024 in 4 ms (bench/host.py); their KV takes longer
ROWS_SHARE = 1 / 8  # of the room for KV, at most, that rows take

SLOTS_EACH = 4  # slots of state for a sequence: worker/states/slots.py needs 3, the rest are checkpoints
SLOTS_SHARE = 0.5  # of the memory for KV and states, at most

MOST_GRAPH_ROWS = 512  # above, a step's KV takes the GPU longer than the launches take the host
LOGITS_COPIES = 3  # of a step's logits: the product, with penalties and biases, and what sampling keeps of blocks
GRAPH_BYTES = 8 * MIB  # of a size's graphs, the forward's and the sampling's: some 12 kernels a layer
PIECE_BYTES = MIB // 2  # of a layer's graph of prompts
SCRATCH_BYTES = 128 * MIB  # of attention
WORKSPACE_BYTES = SCRATCH_BYTES + 32 * MIB  # that and plans of answers and prompts, with a window and without
OUTSIDE_BYTES = 1024 * MIB  # CUDA's context, modules and libraries, outside torch's: others saw 0.6 to 0.9 GiB
LINKS_BYTES = 512 * MIB  # NCCL's buffers, where ranks exchange sums
MARGIN_BYTES = 128 * MIB  # a step that needs more than the largest one that was run: other lengths, other kernels
STEP_MARGIN = 1 / 8  # of a step, for the same and for fragments

SHRINKS_TO: dict[Quantization, float] = {"none": 1.0, "fp8": 0.55, "int8": 0.5, "int4": 0.35}
"""--quantization |-> what is left of 16-bit weights, roughly: embedding and head may stay as they are"""

ConfigT = TypeVar("ConfigT", bound=PrefillConfig | DecodeConfig)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder in numbers."""

    num_weights: int  # all
    num_whole: int  # of these each rank of a worker has: what takes a model's width to a latent's, or chooses experts
    num_active: int  # used in a step: all but tables of embeddings and idle experts
    num_layers: int
    hidden_size: int
    inner_size: int  # of an MLP, or of the experts that one token takes
    vocab_size: int
    num_kv_heads: int
    query_width: int  # dimensions of all heads of all layers
    kv_width: int  # half of what a GPU's pages keep of a token: dimensions of all KV heads of all layers with their own
    context_tokens: int
    divisible: tuple[int, ...]  # sizes that the ranks of a worker must divide
    weight_bytes: float = ITEM_BYTES  # of one weight, on average
    kv_item_bytes: int = ITEM_BYTES
    expert_rows: int = 0  # experts that a token takes
    slot_bytes: int = 0  # of the states of a sequence, over all heads; 0: layers keep none
    full_kv_width: int = 0  # kv_width if pages kept the heads that they stand for; 0: they do

    @property
    def kv_token_bytes(self) -> int:
        """KV of a token, over all heads."""
        return 2 * self.kv_width * self.kv_item_bytes

    def describe_kv(self) -> str:
        """A token's bytes in pages, hand-offs and files, in words."""
        return describe_token(self.kv_token_bytes, 2 * self.full_kv_width * self.kv_item_bytes)

    def kv_token_bytes_of(self, tp: int) -> int:
        """KV of a token on each of `tp` ranks. With more ranks than KV heads, several hold the same ones."""
        return self.kv_token_bytes // min(tp, self.num_kv_heads)

    def weight_bytes_of(self, tp: int) -> int:
        """The weights of each of `tp` ranks."""
        return int((self.num_whole + (self.num_weights - self.num_whole) / tp) * self.weight_bytes)

    def of_stage(self, pp: int) -> "ModelShape":
        """Of one of `pp` stages, roughly: what is looked up or made of rows once is divided, too."""
        names = ("num_weights", "num_whole", "num_active", "num_layers", "query_width", "kv_width", "full_kv_width")
        return replace(self, **{name: -(-getattr(self, name) // pp) for name in names})

    def slot_bytes_of(self, tp: int) -> int:
        """The states of a sequence on each of `tp` ranks."""
        return self.slot_bytes // tp


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a worker takes into a step."""

    max_running: int
    chunk_tokens: int  # of prompts
    graph_rows: int = 0  # sequences in the largest CUDA graph of decode steps; 0: no such graphs
    max_drafts: int = 0  # of a sequence in a graph
    piece_tokens: tuple[int, ...] = ()  # of captured steps with prompts (engine/cuda/pieces.py)
    num_captured: int = 1  # models with graphs: two with a draft model
    lora_rows: int = 0  # slots for adapters, times their largest rank
    max_logits: int = MAX_LOGITS_AT_ONCE  # of a step, computed at once

    @property
    def num_rows(self) -> int:
        """worker/scheduler.py: num_rows_for"""
        return 2 * self.max_running


class GpuRoom(NamedTuple):
    """The GPU of a rank. What other processes use of it does not count: shares that fit fit in any order of start."""

    total_bytes: int
    taken_bytes: int  # by what the rank holds already: weights, rows, workspaces
    reserve_bytes: int  # for computing and graphs

    def left_bytes(self, share: float) -> int:
        """For pages, within a share of the GPU."""
        return max(0, int(self.total_bytes * share) - self.taken_bytes - self.reserve_bytes)


def shape_of(config: ModelConfig | FallbackConfig, file_bytes: int = 0) -> ModelShape:
    """`file_bytes`: of all weights on the device; without native code they are all that is known.

    0: as the config says, embeddings and the head in 16 bits, of MXFP4 all but the experts.
    """
    slot_bytes = 4 * sum(part.num_layers * part.num_heads * math.prod(part.sizes) for part in config.state_parts)
    if isinstance(config, FallbackConfig):
        shapes = config.attention_shapes
        width = max(shape.num_heads * shape.head_dim for shape in shapes)
        num_weights = file_bytes // ITEM_BYTES
        return ModelShape(
            num_weights, 0, num_weights, config.num_layers, width, 4 * width, config.vocab_size,
            shapes[0].num_kv_heads, sum(shape.num_heads * shape.head_dim for shape in shapes),
            sum(shape.num_kv_heads * pad_head(shape.head_dim) for shape in shapes), config.context_tokens, (),
            slot_bytes=slot_bytes,
        )  # fmt: skip
    table, shapes = build_table(config), tuple(map(config.shape_of, config.layers))
    sizes = {stored.name: math.prod(stored.shape) for stored in table.stored()}
    embedding, head = (sizes[next(table.products[name].stored()).name] for name in ("embedding", "lm_head"))
    looked_up = 0 if config.is_tied else embedding
    if token_embedding := table.products.get("token_embedding"):
        looked_up += sizes[next(token_embedding.stored()).name]
    num_weights = sum(sizes.values()) - (head if config.is_tied else 0)
    num_idle, num_experts, inner_size, expert_rows = 0, 0, config.intermediate_size, 0
    if (moe := moe_of(config)) is not None:
        expert = 3 * config.hidden_size * moe.inner_size
        num_moe = sum(layer.is_moe for layer in config.layers)
        expert_rows = moe.routing.top_k
        num_experts = num_moe * expert * moe.routing.num_experts
        num_idle = num_moe * expert * (moe.routing.num_experts - expert_rows)
        inner_size = max(inner_size, expert_rows * moe.inner_size + moe.shared_size)
    if not file_bytes and config.quantization is not None:
        is_of_experts = config.quantization.get("quant_method") == "mxfp4"
        num_coded = num_experts if is_of_experts else num_weights - embedding - (0 if config.is_tied else head)
        file_bytes = int(num_coded * read_weight_bytes(config.quantization) + (num_weights - num_coded) * ITEM_BYTES)
    in_pages = [replace(shape, head_dim=pad_head(shape.head_dim)) for shape in config.attention_shapes]
    return ModelShape(
        num_weights=num_weights,
        num_whole=sum(map(_count_whole, table.weights())),
        num_active=num_weights - num_idle - looked_up,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        inner_size=inner_size,
        vocab_size=config.vocab_size,
        num_kv_heads=config.num_kv_heads,
        query_width=sum(shape.num_heads * (shape.expanded[0] or shape.head_dim) for shape in shapes),
        kv_width=sum(shape.kept_numbers for shape in in_pages) // 2,
        context_tokens=config.context_tokens,
        divisible=tuple(config.divisible.values()),
        weight_bytes=_find_weight_bytes(config, file_bytes / num_weights, num_experts / num_weights),
        expert_rows=expert_rows,
        slot_bytes=slot_bytes,
        full_kv_width=sum(shape.num_heads * sum(shape.expanded) for shape in config.attention_shapes) // 2,
    )


def _count_whole(weight: Weight) -> int:
    """How many weights of a product, or a norm, each rank has: none if it is divided."""
    if isinstance(weight, Vector):
        return 0 if weight.axis.is_divided else weight.axis.size
    is_divided = weight.inputs.is_divided or any(part.rows.is_divided for part in weight.parts)
    return 0 if is_divided else sum(part.rows.size for part in weight.parts) * weight.inputs.size


def resolve_context(max_context_tokens: int, model_tokens: int) -> int:
    """The context limit in tokens: the model's, or the requested smaller one. Raises ConfigError."""
    if max_context_tokens > model_tokens:
        raise ConfigError(
            f"max_context_tokens={max_context_tokens} is more than the model's {model_tokens}: "
            f"set --max-context-tokens {model_tokens} or less, or 0"
        )
    return max_context_tokens or model_tokens


def with_context(shape: ModelShape, config: PrefillConfig | DecodeConfig) -> ModelShape:
    """`shape` with the context limit of the settings. Raises ConfigError."""
    return replace(shape, context_tokens=resolve_context(config.max_context_tokens, shape.context_tokens))


def complete(config: ConfigT, shape: ModelShape | None, card: Card | None, memory_bytes: int = 0) -> ConfigT:
    """`config` with numbers for the limits that are 0, by device.

    `shape`, `card`, `memory_bytes`: of the GPU of a rank; None, None and 0 on a CPU. Limits that are set stay.
    """
    is_prefill = isinstance(config, PrefillConfig)
    takes_prompts = is_prefill or isinstance(config, RolesConfig)
    name = "chunk_tokens" if is_prefill else "local_prefill_chunk_tokens"
    chunk: int = getattr(config, name)
    running = config.max_running
    if shape is None or card is None:
        chunk = chunk or (CPU_CHUNK if takes_prompts else CPU_LOCAL_CHUNK)
        running = running or (CPU_PROMPTS if is_prefill else CPU_SESSIONS)
    else:
        shape = with_context(shape, config)
        most = MOST_CHUNK if takes_prompts else MOST_LOCAL_CHUNK
        chunk = chunk or min(choose_chunk(shape, card, memory_bytes, config.tp), most)
        if isinstance(config, DecodeConfig):
            running = running or choose_sessions(config, chunk, shape, memory_bytes)
        running = running or max(CPU_PROMPTS, chunk // SHORT_PROMPT)
    given: dict[str, Any] = {"max_running": running, name: max(chunk, config.page_tokens)}
    return replace(config, **given)


def choose_chunk(shape: ModelShape, card: Card, memory_bytes: int, tp: int) -> int:
    """Prompt tokens in a step: the power of two nearest to what all of these need, and that memory allows.

    weights   twice the tokens that take as long to compute as the weights take to read
    launches  so many that the host's launches are a tenth of the time
    tiles     so many that products with H outputs fill all SMs four times: the last, partly empty time is an eighth
    memory    a step takes a sixteenth of the GPU or less
    """
    token_s = 2 * shape.num_active / (tp * card.flops * FLOPS_SHARE)
    weights = 2 * shape.num_active * shape.weight_bytes / (tp * card.bytes_per_s * BANDWIDTH_SHARE) / token_s
    launches = shape.num_layers * LAUNCH_S / LAUNCH_SHARE / token_s
    tiles = WAVES * card.num_sms * TILE * TILE / shape.hidden_size
    wanted = 1 << round(math.log2(max(weights, launches, tiles)))
    chunk = min(max(wanted, LEAST_CHUNK), MOST_CHUNK)
    while chunk > LEAST_CHUNK and estimate_step_bytes(shape, Limits(1, chunk), tp) > memory_bytes / 16:
        chunk //= 2
    return chunk


def choose_sessions(config: DecodeConfig, chunk: int, shape: ModelShape, memory_bytes: int) -> int:
    """Sessions at once: the largest power of two for which there are 512 tokens and slots each, and rows take little.

    Fewer if a whole context fits only so.
    """
    token_bytes, states_bytes = shape.kv_token_bytes_of(config.tp), SLOTS_EACH * shape.slot_bytes_of(config.tp)

    def left_bytes(sessions: int) -> int:
        given = replace(config, max_running=sessions, local_prefill_chunk_tokens=chunk)
        room = estimate_room(
            shape, limits_of(given, shape.vocab_size, most_logits(memory_bytes)), memory_bytes, config.tp
        )
        left = room.left_bytes(config.gpu_memory_share or GPU_SHARE)
        return min(left, config.kv_memory_mib * MIB // config.num_ranks) if config.kv_memory_mib else left

    def is_filled(sessions: int) -> bool:
        left, row_bytes = left_bytes(sessions), estimate_row_bytes(shape, Limits(sessions, chunk))
        taken = sessions * max(SESSION_TOKENS * token_bytes + states_bytes, states_bytes / SLOTS_SHARE)
        return left >= taken and row_bytes <= ROWS_SHARE * left

    sizes = [MOST_SESSIONS >> power for power in range((MOST_SESSIONS // LEAST_SESSIONS).bit_length())]
    wanted = next(filter(is_filled, sizes), LEAST_SESSIONS)
    fewer = (size for size in sizes if size <= wanted)
    context_bytes = shape.context_tokens * token_bytes
    return next((size for size in fewer if left_bytes(size) >= context_bytes + size * states_bytes), wanted)


def limits_of(config: PrefillConfig | DecodeConfig, vocab_size: int, max_logits: int) -> Limits:
    """The limits that completed settings set. max_logits: see `most_logits`."""
    pieces = PIECE_TOKENS if config.cuda_graphs else ()
    num_captured = 1 if config.draft_model in ("auto", NO_DRAFT) else 2  # auto: the demo's tiny one, or none
    lora_rows = config.max_loras * config.max_lora_rank
    if isinstance(config, PrefillConfig):
        return Limits(config.max_running, config.chunk_tokens, 0, 0, pieces, num_captured, lora_rows, max_logits)
    most = min(MOST_GRAPH_ROWS, 1 << (max(1, max_logits // vocab_size).bit_length() - 1))
    graph_rows = min(config.max_running, most) if config.cuda_graphs else 0
    max_drafts = config.max_draft_tokens if config.cuda_graphs and config.speculate != "off" else 0
    return Limits(
        config.max_running, config.local_prefill_chunk_tokens, graph_rows, max_drafts, pieces, num_captured, lora_rows,
        max_logits,
    )  # fmt: skip


def _find_weight_bytes(config: ModelConfig, stored: float, expert_share: float) -> float:
    """On average, where a file has `stored`, or what is rounded would have; 0: unknown.

    Experts keep a quantised file's bits, and are not rounded (engine/formats/products.py: stack).
    """
    if config.quantization is not None or not stored:
        return stored or ITEM_BYTES
    return stored + expert_share * max(ITEM_BYTES - stored, 0)


def estimate_token_bytes(shape: ModelShape, tp: int) -> float:
    """Bytes of a step's token within one layer: a float32 sum, its norm and the layer's delta (8 H bytes), and the
    widest products: query, keys and values, rotated queries and attended ones, or gate, up and their product, and
    each expert's result in float32.
    """
    attention = 2 * (3 * shape.query_width + 2 * shape.kv_width) / shape.num_layers / tp
    products = 2 * 3 * shape.inner_size / tp + 4 * shape.expert_rows * shape.hidden_size
    return 8 * shape.hidden_size + max(attention, products)


def estimate_step_bytes(shape: ModelShape, limits: Limits, tp: int) -> int:
    """Bytes of the largest step while it runs, on each rank: activations of one layer, and logits."""
    num_logits = min(limits.max_running, max(1, limits.max_logits // shape.vocab_size))
    num_tokens = limits.chunk_tokens + limits.max_running
    logits_bytes = num_logits * shape.vocab_size * 4 * LOGITS_COPIES
    expanded_bytes = EXPANDED_BYTES if shape.full_kv_width else 0
    return int(num_tokens * estimate_token_bytes(shape, tp)) + logits_bytes + expanded_bytes


def estimate_row_bytes(shape: ModelShape, limits: Limits) -> int:
    """Bytes that rows hold as long as the worker runs: their tokens (engine/input_batch.py)."""
    return (limits.num_rows + 1) * shape.context_tokens * 4


def estimate_adapter_bytes(shape: ModelShape, limits: Limits, tp: int) -> int:
    """Bytes of slots for adapters: a row of A and a column of B of each product, for q, k, v, o, gate, up and down."""
    widths = 7 * shape.hidden_size + 3 * shape.inner_size
    row_size = shape.num_layers * widths + 2 * (shape.query_width + shape.kv_width)
    return limits.lora_rows * row_size * ITEM_BYTES // tp


def estimate_graph_bytes(shape: ModelShape, limits: Limits, tp: int, page_tokens: int = 16) -> int:
    """Bytes that captured graphs hold as long as the worker runs. The model has each twice where it takes adapters.

    A graph has page ids twice per sequence (our table, FlashInfer's) and a mask per row. One model's graphs share
    memory for the logits of the largest, its pieces for the tokens of the largest.
    """
    max_rows = max(1, limits.max_logits // shape.vocab_size)
    shapes = choose_shapes(limits.graph_rows, limits.max_drafts, max_rows)
    page_ids_bytes = 2 * 4 * -(-shape.context_tokens // page_tokens)
    own_bytes = sum(
        GRAPH_BYTES + one.num_sequences * page_ids_bytes + one.num_rows * shape.vocab_size // 8 for one in shapes
    )
    logits_bytes = max((one.num_rows for one in shapes), default=0) * shape.vocab_size * 4 * LOGITS_COPIES
    piece_bytes = len(limits.piece_tokens) * shape.num_layers * PIECE_BYTES
    token_bytes = int(max(limits.piece_tokens, default=0) * estimate_token_bytes(shape, tp))
    num_sets = limits.num_captured + (limits.lora_rows > 0)
    scratch_bytes = 4 * limits.graph_rows * (16 * shape.kv_width + shape.query_width) // shape.num_layers // tp
    # engine/cuda/splits.py; graphs that need more have it to themselves, but steps with latents need little
    if scratch_bytes <= SCRATCH_BYTES or shape.full_kv_width:
        scratch_bytes = 0
    return num_sets * own_bytes + limits.num_captured * (logits_bytes + piece_bytes + token_bytes + scratch_bytes)


def reserve_bytes(shape: ModelShape, limits: Limits, tp: int, step_bytes: int) -> int:
    """GPU bytes that a rank needs besides weights, rows and pages. `step_bytes`: of its largest step, measured or not.

    Counts of tokens for penalties come in all rows once a graph is captured, or so many requests ask for them.
    """
    outside_bytes = OUTSIDE_BYTES + (LINKS_BYTES if tp > 1 else 0)
    counts_bytes = limits.num_rows * shape.vocab_size * 4
    margin_bytes = MARGIN_BYTES + int(STEP_MARGIN * step_bytes)
    return outside_bytes + estimate_graph_bytes(shape, limits, tp) + counts_bytes + step_bytes + margin_bytes


def estimate_room(shape: ModelShape, limits: Limits, memory_bytes: float, tp: int) -> GpuRoom:
    """A rank's GPU before anything is started there."""
    taken_bytes = shape.weight_bytes_of(tp) + estimate_row_bytes(shape, limits) + WORKSPACE_BYTES
    taken_bytes += estimate_adapter_bytes(shape, limits, tp)
    step_bytes = estimate_step_bytes(shape, limits, tp)
    return GpuRoom(int(memory_bytes), int(taken_bytes), reserve_bytes(shape, limits, tp, step_bytes))
