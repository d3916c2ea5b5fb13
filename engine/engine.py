"""A model ready to compute, with its pool. A worker builds it once, at start."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from engine.adapters.peft import PeftReader
from engine.adapters.slots import NO_ADAPTERS, AdapterLimits, Adapters, HostAdapter
from engine.attention.choose import AttentionChoice
from engine.compose import choose_for_layers, load_head, load_model, open_device, resolve_model_folder
from engine.cuda.graph_shapes import CHUNK_VALUES, choose_shapes
from engine.cuda.graphs import CudaCapture, OnCaptured
from engine.cuda.largest_step import LargestStep, find_step_bytes, measure_peak
from engine.formats.fp8 import check_fp8
from engine.heads.decoder import HeadDecoder
from engine.heads.read_head import is_draft_head
from engine.input_batch import InputBatch
from engine.kv.pool import Pool, PoolShape, PoolShare
from engine.layers.linear import Quantization
from engine.models.config import FallbackConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.models.read_config import load_config
from engine.out_of_memory import explain_failed_step, explain_failed_warm_up, explain_full_gpu
from engine.ranks import ONE_RANK, Ranks
from engine.runner import HeadRunner, Runner
from engine.vision.image_rows import ImageRules
from engine.vision.tower import VisionTower, load_tower
from engine.weights.fingerprint import weight_fingerprint
from engine.weights.reader import OnProgress
from engine.weights.table import Shard
from wire.kv_layout import KvPart, PagePart, StatePart
from wire.names import MTP
from wire.names import KvDType as KvDType

NO_STEPS_AHEAD = "no step is launched ahead"


@dataclass(frozen=True, slots=True)
class Engine:
    """Owns everything large: weights, pages, rows."""

    folder: Path  # of the checkpoint
    config: ModelConfig  # as this rank computes it
    weights: str  # fingerprint
    dtype: str  # "float32", "bfloat16" or "float16"
    device: torch.device
    attention: AttentionChoice
    pool: Pool
    padding_page: int | None  # the pool's last page on a GPU: used by captured steps, never by sequences
    rows: InputBatch  # of both models
    runner: Runner
    draft_weights: str  # fingerprint of the draft model; empty without one
    draft_runner: Runner | None  # the draft model over the second part of the same pages
    quantization: Quantization = "none"  # of both models
    why_unshared: str | None = None  # see Decoder
    states: Pool | None = None  # slots of a model whose layers keep some; on a GPU the last is like the padding page
    adapters: Adapters | None = None  # slots for adapters; None: none are taken
    read_adapter: Callable[[Path], HostAdapter] | None = None  # this rank's part of a PEFT folder, for `adapters`
    vision: VisionTower | None = None  # None: this process encodes no images
    why_blind: str | None = None  # why it does not, though the model has a part for them
    trouble: dict[str, str] = field(default_factory=dict)  # what the warm-up found to be wrong |-> how

    @property
    def sees_whole_images(self) -> bool:
        """See `ImageRules.sees_whole`."""
        return self.rows.image_rules is not None and self.rows.image_rules.sees_whole

    @property
    def has_head(self) -> bool:
        """Whether what drafts is a head, which each step of the model leads."""
        return isinstance(self.draft_runner, HeadRunner)

    @property
    def num_pages(self) -> int:
        """Pages of the pool that are available to sequences."""
        return self.pool.num_pages if self.padding_page is None else self.padding_page

    @property
    def num_slots(self) -> int:
        """Slots of state that are available to sequences."""
        return 0 if self.states is None else self.states.num_pages - (self.padding_page is not None)

    @property
    def kv_dtype(self) -> str:
        """Dtype of the pages: like `dtype`, or "float8_e4m3fn"."""
        return _name(self.pool.shape.dtype)

    @property
    def steps_ahead(self) -> int:
        """How many steps to launch before the last one is collected. 0 on a CPU, which computes at launch."""
        return 1 if self.device.type == "cuda" and NO_STEPS_AHEAD not in self.trouble else 0

    def warm_up(
        self, graph_rows: int, max_drafts: int = 0, piece_tokens: tuple[int, ...] = (),
        on_captured: OnCaptured = lambda done, total: None,
    ) -> None:  # fmt: skip
        """On a GPU: build and load all kernels before the first request, and capture graphs. Does nothing on a CPU.

        graph_rows: decode steps of up to this many sequences run as graphs, if attention can be captured; steps of few
        sequences also with up to `max_drafts` drafts. 0: no such graphs. piece_tokens: see engine/cuda/pieces.py.
        ValueError says what cannot be built.
        """
        if self.padding_page is None:
            return
        runners = [runner for runner in (self.runner, self.draft_runner) if runner is not None]
        max_rows = max(1, CHUNK_VALUES // self.rows.vocab_size)  # logits of more are computed in parts
        max_drafts = 0 if self.states else max_drafts
        shapes = choose_shapes(graph_rows, max_drafts, max_rows)
        done = count(1)
        try:
            for runner in runners:
                runner.warm_up(self.padding_page)
            wanted = [
                (one, one.choose_shapes(shapes if one.is_capturable else []), piece_tokens if one.has_pieces else ())
                for one in runners
            ]
            total = sum(len(own) + len(sizes) for _, own, sizes in wanted)
            gc.collect()
            gc.disable()  # freeing GPU memory during a capture would spoil it
            for runner, own, sizes in wanted:
                capture = CudaCapture()
                if own:
                    runner.capture_graphs(own, capture, self.padding_page, lambda *_: on_captured(next(done), total))
                if sizes:
                    runner.capture_pieces(sizes, capture, lambda: on_captured(next(done), total))
                if max_drafts and (error := runner.find_lag_error()):
                    self.trouble[NO_STEPS_AHEAD] = f"{error}: run `make gpu-check`, or set --speculate off"
        except Exception as error:
            raise explain_failed_warm_up(error) from error
        finally:
            gc.enable()

    def describe(self) -> dict[str, str]:
        """What the log shows at start."""
        shape = self.pool.shape
        return {
            "device": str(self.device),
            "dtype": self.dtype,
            "quantization": self.quantization,
            "attention": self.attention.backend.name,
            "attention_reason": self.attention.reason,
            "pool": f"{shape.num_pages} pages of {shape.page_tokens} tokens, {self.pool.all_page_bytes} bytes each",
            **({"states": f"{self.num_slots} slots, {self.states.all_page_bytes} bytes each"} if self.states else {}),
            "draft_model": self.draft_weights[:12] or "none",
            **({"ranks": str(self.pool.num_ranks)} if self.pool.num_ranks > 1 else {}),
        }

    def find_weaknesses(self) -> dict[str, str]:
        """What works worse than it could on this machine |-> why, and what to change."""
        found = dict(self.trouble)
        if self.attention.is_fallback:
            found["slow attention"] = self.attention.reason
        if self.device.type == "cuda" and not self.attention.backend.is_capturable:
            found["no CUDA graphs"] = f"{self.attention.backend.name} cannot be captured: {self.attention.reason}"
        if isinstance(self.config, FallbackConfig):
            found["slow model"] = f"Baton has no code for {self.config.family}: transformers' runs, without CUDA graphs"
        elif stretched := [rope for rope in self.config.ropes if rope.factors != rope.short_factors]:
            original = stretched[0].original_context
            found["rope's long factors, for short prompts too"] = (
                f"contexts here may be of {self.config.context_tokens} tokens, more than the original {original}: "
                f"set --max-context-tokens {original} if that is enough"
            )
        if self.pool.why_private is not None:
            found["pages go over gRPC even on this host"] = self.pool.why_private
        if self.why_blind is not None:
            found["no images"] = self.why_blind
        if self.why_unshared is not None:
            found["each worker has its own copy of the weights"] = self.why_unshared
        return found


SizePool = Callable[[int, int, int, tuple[int, int, int] | None, int, int], tuple[int, int]]
"""(model's context in tokens, bytes of a page of one rank, ranks, (all, held, needed by the largest step) bytes of the
GPU or None, bytes of weights mapped from a file, bytes of a slot of one rank) |-> pages, slots"""


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's position among the ranks of its worker, and how its rows and runners are built."""

    ranks: Ranks = ONE_RANK
    pool_fds: tuple[int, int] = (-1, -1)  # empty memory files shared by all ranks, for pages and for slots; -1 with one
    build_rows: Callable[..., InputBatch] = InputBatch
    build_runner: Callable[..., Runner] = lambda number, *parts: Runner(*parts)
    """(0: the model, 1: the draft model; Runner's arguments)"""
    build_head_runner: Callable[..., HeadRunner] = HeadRunner
    lends: bool = True  # peers read its pages and slots


ALONE = Place()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights on the device."""

    folder: Path  # of the checkpoint
    weights: str  # fingerprint
    decoder: Decoder
    kv_parts: tuple[KvPart, ...]  # over all ranks
    state_parts: tuple[StatePart, ...] = ()  # the same


def build_engine(
    model: str,
    draft_model: str,
    dtype: str,
    device_name: str,
    threads: int,
    page_tokens: int,
    num_rows: int,
    size_pool: SizePool,
    on_progress: OnProgress,
    max_context_tokens: int = 0,
    quantization: Quantization = "none",
    kv_dtype: KvDType = "auto",
    place: Place = ALONE,
    largest_step: LargestStep | None = None,
    adapter_limits: AdapterLimits = NO_ADAPTERS,
    has_vision: bool = True,
) -> Engine:
    """Load a model by folder or hub id, a draft model too unless `draft_model` is empty, and allocate their pool.

    `num_rows`: sequences in steps at once. `max_context_tokens`: upper limit of a sequence; 0: the model's own limit.
    `largest_step`: is run on a GPU before the pool is sized, to measure what it needs; None: nothing is measured.
    `has_vision`: rank 0 loads the part that encodes images, if it can.
    FileNotFoundError or ValueError say what is wrong with the checkpoint or the device.
    """
    torch.set_num_threads(threads)
    ranks = place.ranks
    device = choose_device(device_name, ranks.rank, ranks.size)
    check_kv_dtype(kv_dtype, device)
    folder = resolve_model_folder(model)
    with explain_full_gpu(device, folder):
        has_mtp = draft_model == MTP
        loaded = _load(
            folder, dtype, device, quantization, ranks, max_context_tokens, on_progress, adapter_limits, has_mtp
        )
        context_tokens = _resolve_context(loaded.decoder, max_context_tokens)
        draft = None
        if draft_model:
            draft = _load_draft(draft_model, folder, loaded.decoder, context_tokens, quantization, ranks)
        vision, why_blind = None, None
        if has_vision and ranks.rank == 0:
            try:
                vision = load_tower(folder, loaded.decoder.dtype, device)
            except ValueError as error:
                why_blind = str(error)
    engine = assemble_engine(
        loaded, draft, page_tokens, num_rows, size_pool, max_context_tokens, quantization, kv_dtype, place,
        largest_step, vision,
    )  # fmt: skip
    return replace(engine, why_blind=why_blind)


def assemble_engine(
    model: Loaded,
    draft: Loaded | None,
    page_tokens: int,
    num_rows: int,
    size_pool: SizePool,
    max_context_tokens: int = 0,
    quantization: Quantization = "none",
    kv_dtype: KvDType = "auto",
    place: Place = ALONE,
    largest_step: LargestStep | None = None,
    vision: VisionTower | None = None,
) -> Engine:
    """Build pages, rows and attention for loaded models. Parameters: see `build_engine`."""
    decoder, config, device, ranks = model.decoder, model.decoder.config, model.decoder.device, place.ranks
    models = [model] if draft is None else [model, draft]
    decoders = [one.decoder for one in models]
    if draft is not None and isinstance(draft.decoder, HeadDecoder):
        decoder.tap(draft.decoder.head.taps)
    pool_dtype = resolve_kv_dtype(kv_dtype, decoder.dtype)
    shapes = [PoolShape(1, one.decoder.config.kv_parts, page_tokens, pool_dtype) for one in models]
    slots = PoolShape(1, config.state_parts, 1, torch.float32)
    attention = [_choose_attention(one.decoder, page_tokens, pool_dtype) for one in models]
    context_tokens = _resolve_context(decoder, max_context_tokens)
    rows = place.build_rows(num_rows, context_tokens, page_tokens, config.vocab_size, device)
    if isinstance(config, ModelConfig) and config.image_token is not None:
        rows.image_rules = ImageRules(config.image_token, config.image_attention, config.counts_rows)
    gpu_memory = _gpu_memory(device)
    if gpu_memory is not None and largest_step is not None:
        measured = [*zip(decoders, attention, shapes, strict=True)]
        beside = 0 if vision is None else measure_peak(vision.encode_largest, device)
        gpu_memory = (*gpu_memory[:2], beside + _measure_step(largest_step, measured, rows))
    sizes = size_pool(
        config.context_tokens, sum(shape.page_bytes for shape in shapes), ranks.size, gpu_memory,
        sum(one.decoder.mapped_bytes for one in models), slots.page_bytes,
    )  # fmt: skip
    num_pages, num_slots = (ranks.all_reduce_min(count, device) for count in sizes)
    has_padding = device.type == "cuda"

    def share(fd: int, parts: tuple[PagePart, ...]) -> PoolShare | None:
        barrier = partial(ranks.all_reduce_min, 0, device)
        return PoolShare(ranks.rank, ranks.size, parts, fd, barrier) if ranks.size > 1 else None

    parts = tuple(part for one, own in zip(models, shapes, strict=True) for part in own.page_parts(one.kv_parts))
    draft_shape = None if draft is None else shapes[1]
    pool = Pool(
        shapes[0].with_pages(num_pages + has_padding), device, draft_shape, open_device(device).open_memory(),
        share(place.pool_fds[0], parts), place.lends,
    )  # fmt: skip
    states = None
    if config.state_parts:
        whole = slots.page_parts(model.state_parts)
        states = Pool(
            slots.with_pages(num_slots + has_padding), device, gpu=open_device(device).open_memory(),
            share=share(place.pool_fds[1], whole), lends=place.lends,
        )  # fmt: skip
        rows.states = states.shape.split(states.pages)
    additions, read_adapter = decoder.additions, None
    adapters = additions if isinstance(additions, Adapters) else None
    if adapters is not None:
        rows.put_adapter, rows.forget_adapter = adapters.fill, adapters.forget
        reader = PeftReader(load_config(model.folder), Shard(ranks.rank, ranks.size), decoder.dtype, adapters.max_rank)
        read_adapter = partial(reader.read, sites=adapters.sites)
    runner, draft_runner = _build_runners(place, decoders, attention, [pool.tensor, pool.draft_tensor], rows)
    return Engine(
        folder=model.folder,
        config=config,
        weights=model.weights,
        dtype=_name(decoder.dtype),
        device=device,
        attention=attention[0],
        pool=pool,
        states=states,
        padding_page=num_pages if has_padding else None,
        rows=rows,
        runner=runner,
        draft_weights=draft.weights if draft else "",
        draft_runner=draft_runner,
        quantization=quantization,
        why_unshared=decoder.why_unshared,
        adapters=adapters,
        read_adapter=read_adapter,
        vision=vision,
    )


def _build_runners(
    place: Place, decoders: Sequence[Decoder], attention: Sequence[AttentionChoice], pages: Sequence[Tensor | None],
    rows: InputBatch,
) -> tuple[Runner, Runner | None]:  # fmt: skip
    """Of the model and, if there are two, of what drafts for it. pages: of each."""
    backends = [one.backend for one in attention]
    if len(decoders) == 1:
        return place.build_runner(0, decoders[0], backends[0], pages[0], rows), None
    if isinstance(decoders[1], HeadDecoder):
        head = place.build_head_runner(decoders[1], backends[1], pages[1], rows)
        return place.build_runner(0, decoders[0], backends[0], pages[0], rows, False, head.follower), head
    return (
        place.build_runner(0, decoders[0], backends[0], pages[0], rows),
        place.build_runner(1, decoders[1], backends[1], pages[1], rows, True),
    )


def check_kv_dtype(kv_dtype: KvDType, device: torch.device) -> None:
    """Raises ValueError if the device has no such numbers."""
    if kv_dtype == "fp8":
        check_fp8(device, "--kv-dtype fp8", "--kv-dtype auto")


def resolve_kv_dtype(kv_dtype: KvDType, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the pages: the model's, unless fp8 is requested."""
    return torch.float8_e4m3fn if kv_dtype == "fp8" else model_dtype


def _resolve_context(decoder: Decoder, max_context_tokens: int) -> int:
    return min(decoder.config.context_tokens, max_context_tokens or decoder.config.context_tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(
    folder: Path, dtype: str, device: torch.device, quantization: Quantization, ranks: Ranks, max_context_tokens: int,
    on_progress: OnProgress | None = None, adapter_limits: AdapterLimits = NO_ADAPTERS, has_mtp: bool = False,
) -> Loaded:  # fmt: skip
    """This rank's part of a model."""
    decoder = load_model(
        folder, dtype, device, on_progress, quantization, ranks, adapter_limits, has_mtp, max_context_tokens
    )
    whole, weights = decoder.config, weight_fingerprint(folder, quantization)
    if not isinstance(whole, ModelConfig):
        weights += f":transformers-{version('transformers')}"
    elif (whole := load_config(folder)).ropes != decoder.config.ropes:
        weights += ":short-rope"
    return Loaded(folder, weights, decoder, whole.kv_parts, whole.state_parts)


def _load_draft(
    draft_model: str, model_folder: Path, target: Decoder, context_tokens: int, quantization: Quantization, ranks: Ranks
) -> Loaded:  # fmt: skip
    """The draft model or head, with the dtype, device and quantization of `target`.

    ValueError if it does not fit the model, or takes fewer than `context_tokens`, the longest sequence.
    """
    is_mtp = draft_model == MTP
    folder = model_folder if is_mtp else resolve_model_folder(draft_model)
    if is_mtp or is_draft_head(folder):
        return _load_head(folder, target, quantization, is_mtp=is_mtp)
    loaded = _load(folder, _name(target.dtype), target.device, quantization, ranks, context_tokens)
    decoder = loaded.decoder
    if decoder.config.state_parts:
        raise ValueError(
            f"draft model {draft_model}: its layers keep recurrent state, which cannot be taken back after a draft; "
            "choose another --draft-model, or none"
        )
    here, there = target.config.vocab_size, decoder.config.vocab_size
    if here != there:
        raise ValueError(
            f"draft model {draft_model} does not fit the model: its vocab_size is {there}, the model's {here}; "
            "choose another --draft-model, or none"
        )
    if decoder.config.context_tokens < context_tokens:
        raise ValueError(
            f"draft model {draft_model} takes {decoder.config.context_tokens} tokens, less than a context of "
            f"{context_tokens}: set --max-context-tokens {decoder.config.context_tokens} or less, or choose another "
            "--draft-model, or none"
        )
    return loaded


def _load_head(folder: Path, target: Decoder, quantization: Quantization, *, is_mtp: bool) -> Loaded:
    try:
        decoder, kv_parts = load_head(folder, target, quantization, is_mtp=is_mtp)
    except ValueError as error:
        raise ValueError(
            f"draft head {folder} does not fit the model: {error}; choose another --draft-model"
        ) from error
    prefix = f"{MTP}:" if is_mtp else ""
    return Loaded(folder, prefix + weight_fingerprint(folder, quantization), decoder, kv_parts)


def _choose_attention(decoder: Decoder, page_tokens: int, kv_dtype: torch.dtype) -> AttentionChoice:
    config = decoder.config
    return choose_for_layers(
        config.attention_shapes, config.windows, page_tokens, decoder.device, decoder.dtype, kv_dtype, config.has_sinks
    )


def _gpu_memory(device: torch.device) -> tuple[int, int, int] | None:
    """(bytes of the GPU, bytes that torch holds in this process, 0: no step was measured); None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # memory that loading freed
    return torch.cuda.mem_get_info(device)[1], torch.cuda.memory_reserved(device), 0


def _measure_step(
    step: LargestStep, models: Sequence[tuple[Decoder, AttentionChoice, PoolShape]], rows: InputBatch
) -> int:
    """Bytes that it takes beyond what torch holds. ValueError if it cannot be run."""
    try:
        if states := models[0][0].config.state_parts:  # one slot, which all sequences write
            slot = PoolShape(1, states, 1, torch.float32)
            rows.states = slot.split(torch.zeros(1, slot.page_elements, device=rows.device))
        decoders, attention, shapes = zip(*models, strict=True)
        pages = [torch.zeros(shape.sizes, dtype=shape.dtype, device=rows.device) for shape in shapes]
        runner, draft_runner = _build_runners(ALONE, decoders, attention, pages, rows)
        drafting = [] if draft_runner is None or isinstance(draft_runner, HeadRunner) else [draft_runner]
        return find_step_bytes(step, [runner, *drafting], rows)
    except Exception as error:
        raise explain_failed_step(error, step.setting, step.chunk_tokens) from error


def choose_device(wanted: str, rank: int = 0, size: int = 1) -> torch.device:
    """The device of a rank: "auto" is cuda if there is one; rank n has the n-th GPU.

    ValueError if there are fewer GPUs than ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or install torch with CUDA")
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    if size == 1:
        return torch.device("cuda")
    if size > count:
        raise ValueError(f"{size} ranks need as many GPUs, and torch sees {count}: set --tp {count} or less")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
