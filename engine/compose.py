"""Completes the core: the one file that names satellites. Each row of a table, and each import, is one of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine import hub, trees
from engine.adapters.ops import AdapterOps
from engine.adapters.peft import PeftReader
from engine.adapters.slots import NO_ADAPTERS, AdapterLimits, AdapterRows, Adapters, HostAdapter
from engine.attention import choose
from engine.attention.base import AttentionBackend
from engine.attention.choose import AttentionChoice, reference_attention
from engine.attention.shape import AttentionShape
from engine.catalogue import CATALOGUE, has_native_code, load_config
from engine.cpu.device import CpuDevice
from engine.cpu.floats import FloatFormat, is_faster
from engine.cpu.format import build_packed, is_packed
from engine.cuda.advice import explain_failed_step, explain_full_gpu
from engine.cuda.device import CudaDevice
from engine.cuda.graphs import OnCaptured
from engine.cuda.largest_step import LargestStep, find_step_bytes, measure_peak
from engine.cuda.sizes import most_logits
from engine.cuda.warm_up import warm_up
from engine.device import Device
from engine.engine import ALONE, Engine, KvDType, Loaded, Place, SizePool, choose_device, name_dtype, resolve_kv_dtype
from engine.experts.build import build_mixture
from engine.fallback.config import FallbackConfig
from engine.fallback.open import open_foreign, probe_foreign
from engine.formats.checks import check_kv_dtype, check_quantization
from engine.formats.gguf import open_gguf
from engine.formats.gguf_file import read_header
from engine.formats.gguf_folder import gguf_cache, make_gguf_folder
from engine.formats.products import Fp8Format, GpuFormat, Int8Format
from engine.formats.quantised import decode
from engine.formats.scheme import read_scheme
from engine.heads import load as heads
from engine.heads.decoder import DraftDecoder
from engine.heads.medusa import load_medusa
from engine.heads.read_head import is_draft_head
from engine.heads.read_medusa import find_weights, is_medusa
from engine.heads.runner import HeadRunner
from engine.hybrids.mixers import build_mixer
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape, PoolShare
from engine.latent.attention import LatentAttention, build_projection
from engine.latent.expand import Expansion, HeadsAttention, PagedExpansion, RaggedExpansion
from engine.layers.linear import NO_ADDITIONS, Additions, Quantization
from engine.models import load
from engine.models.assemble import LayerParts, check_tensors
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import DecoderT, OpenFormat, Parts, Source
from engine.models.table import shard_config
from engine.new_weights import HostFormat, find_copies, take_copies
from engine.ops.base import Ops
from engine.pooling.load import build_forwards, load_encoder, probe_encoder
from engine.rank_group import GroupRanks, OpenRanks
from engine.ranks import ONE_RANK, Ranks
from engine.runner import Runner
from engine.stages import StagedRanks, build_follower, build_stage, check_stages
from engine.varied.token_inputs import build_input_block, build_token_inputs
from engine.vision.attention import WholeImageAttention
from engine.vision.image_rows import ImageRows, ImageRules
from engine.vision.tower import VisionTower, load_tower
from engine.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from engine.weights.fingerprint import weight_fingerprint
from engine.weights.formats import PlainFormat
from engine.weights.reader import OnProgress, ShardReader
from engine.weights.table import Shard
from wire.files import check_folder, named
from wire.kv_layout import KvPart, PagePart, most_layers
from wire.names import MTP
from wire.pooling import read_pooling

DEVICES: Mapping[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}  # torch's name |-> kind; others: Device

TREE_ATTENTION = ("torch_sdpa", "cpu_paged")  # backends that read `Batch.ancestors`


def open_device(device: torch.device) -> Device:
    return DEVICES.get(device.type, Device)(device)


def open_ranks(device: torch.device) -> OpenRanks:
    """How a group of ranks exchanges what is on such a device."""
    opened = open_device(device)
    return opened.open_ranks if isinstance(opened, CudaDevice) else GroupRanks


def choose_format(reader: ShardReader, ops: Ops, quantization: Quantization) -> PlainFormat:
    """The format of weights that are not packed. In float32, a file's codes become floats."""
    if quantization == "int8":
        return Int8Format(reader, ops)
    if quantization == "fp8":
        return Fp8Format(reader, ops)
    if reader.device.type == "cpu" and reader.dtype is torch.float32 and is_faster():
        return FloatFormat(reader, ops)
    is_coded = reader.device.type == "cuda" and reader.dtype is not torch.float32
    return GpuFormat(reader, ops, quantization) if is_coded else PlainFormat(reader, ops)


def build_weights(build: Callable[[OpenFormat], DecoderT], source: Source) -> DecoderT:
    """See `BuildWeights`."""
    if is_packed(source):
        return build_packed(build, source, read_header)
    return build(lambda reader, ops: choose_format(reader, ops, source.quantization))


LAYER_PARTS = LayerParts(build_mixer, build_mixture, build_token_inputs, build_input_block, build_projection)
PARTS = Parts(LAYER_PARTS, build_weights, open_gguf, read_scheme, decode, read_header, CATALOGUE)
open_model = partial(load.open_model, parts=PARTS)
resolve_model_folder = partial(
    hub.resolve_model_folder, make_gguf_folder=lambda path: make_gguf_folder(path, gguf_cache())
)


def choose_attention(
    shape: AttentionShape, windows: Collection[int | None], device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, has_sinks: bool = False,
) -> AttentionChoice:  # fmt: skip
    """See `Device`. kv_dtype: None: `dtype`."""
    opened = open_device(device)
    choice = opened.choose_attention(shape, windows, dtype, kv_dtype or dtype, has_sinks)
    if not shape.value_dim:
        return choice

    def build_expanded(shape: AttentionShape) -> AttentionBackend:
        return opened.choose_attention(shape, windows, dtype, dtype).backend

    expansion: Expansion = PagedExpansion(shape, dtype, build_expanded, opened.pad_head)
    if isinstance(choice.backend, HeadsAttention):
        expansion = RaggedExpansion(shape, dtype, choice.backend)
    return replace(choice, backend=LatentAttention(shape, choice.backend, expansion))


def choose_for_layers(
    shapes: Sequence[AttentionShape], windows: Sequence[int | None], page_tokens: int, device: torch.device,
    dtype: torch.dtype, kv_dtype: torch.dtype | None = None, has_sinks: bool = False,
) -> AttentionChoice:  # fmt: skip
    """For a model with these shapes and windows of layers."""
    pick = partial(choose_attention, device=device, dtype=dtype, kv_dtype=kv_dtype, has_sinks=has_sinks)
    return choose.choose_for_layers(pick, shapes, windows, page_tokens, open_device(device).pad_head)


def pad_parts(parts: Sequence[KvPart], device: torch.device) -> tuple[KvPart, ...]:
    """Parts of pages as a device has them."""
    pad_head = open_device(device).pad_head
    return tuple(part._replace(head_dim=pad_head(part.head_dim)) for part in parts)


def load_any_config(folder: Path) -> ModelConfig | FallbackConfig:
    """`load_config` for any model. Without native code: by transformers on the meta device, in seconds."""
    if has_native_code(folder):
        return load_config(folder)
    return probe_encoder(folder) if read_pooling(folder) else probe_foreign(folder)


def open_any_model(folder: Path) -> tuple[ModelConfig | FallbackConfig, Checkpoint]:
    """`open_model` for any model. Without native code: by transformers on the meta device, in seconds."""
    if has_native_code(folder):
        return open_model(folder)
    checkpoint = SafetensorsCheckpoint(folder)
    if read_pooling(folder):  # encoders have tables of positions, which are whole numbers
        kept = {name: entry for name, entry in checkpoint.entries.items() if entry.dtype in checkpoint.dtypes}
        checkpoint.entries = kept
    return load_any_config(folder), checkpoint


def load_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    on_progress: OnProgress | None = None,
    quantization: Quantization = "none",
    ranks: Ranks = ONE_RANK,
    adapter_limits: AdapterLimits = NO_ADAPTERS,
    max_context_tokens: int = 0,
) -> Decoder:
    """See `models.load.load_model`; any model, in any format.

    Raises ValueError also for a device that does not support such weights.
    """
    check_quantization(quantization, dtype, device)
    check_folder(folder)
    opened = open_device(device)
    if not has_native_code(folder):
        if adapter_limits.num_slots:
            raise ValueError(f"{folder}: models without code of Baton's own take no adapters; set --max-loras 0")
        if (pooling := read_pooling(folder)) is None:
            return open_foreign(folder, dtype, opened, on_progress, quantization, ranks)
        if ranks.size > 1 or quantization != "none":
            raise ValueError(f"{folder}: transformers computes this model: set --tp 1, --pp 1, --quantization none")
        return load_encoder(folder, pooling, dtype, opened, on_progress)

    def add(dtype: torch.dtype) -> Additions:
        if not adapter_limits.num_slots:
            return NO_ADDITIONS
        return Adapters(*adapter_limits, dtype, device, opened.ops.find(AdapterOps))

    parts, own = PARTS, ranks
    if isinstance(ranks, StagedRanks):
        parts, own = _cut_stage(folder, ranks, adapter_limits), ranks.within
    return load.load_model(folder, dtype, opened, parts, on_progress, quantization, own, max_context_tokens, add)


def _cut_stage(folder: Path, ranks: StagedRanks, adapter_limits: AdapterLimits) -> Parts:
    """Those that load a stage. ValueError if the model cannot be divided."""
    with named(folder):
        check_stages(load_config(folder), ranks.num_stages)
    if adapter_limits.num_slots or read_pooling(folder):
        what = "takes no adapters: set --max-loras 0" if adapter_limits.num_slots else "makes no vectors of texts"
        raise ValueError(f"{folder}: a model in stages (--pp) {what}")

    def build(build: Callable[[OpenFormat], DecoderT], source: Source) -> DecoderT:
        return build_weights(build, replace(source, part=f"stage {ranks.stage} of {ranks.num_stages}"))

    return replace(PARTS, build=build, assemble=partial(build_stage, ranks))


def load_head(
    folder: Path, model: Decoder, quantization: Quantization, *, is_mtp: bool
) -> tuple[DraftDecoder, tuple[KvPart, ...]]:
    """See `heads.load.load_head`. Medusa heads have no KV."""
    device = open_device(model.device)
    if not is_mtp and is_medusa(folder):
        return load_medusa(folder, model, device, quantization, PARTS), ()
    return heads.load_head(folder, model, device, quantization, PARTS, is_mtp=is_mtp)


@dataclass(frozen=True, slots=True)
class FullEngine(Engine):
    """An engine with what satellites add."""

    adapters: Adapters | None = None  # slots for adapters; None: none are taken
    read_adapter: Callable[[Path], HostAdapter] | None = None  # this rank's part of a PEFT folder, for `adapters`
    vision: VisionTower | None = None  # None: this process encodes no images
    why_blind: str | None = None  # why it does not, though the model has a part for them

    @property
    def sees_whole_images(self) -> bool:
        """See `ImageRules.sees_whole`."""
        images = self.rows.images
        return isinstance(images, ImageRows) and images.rules.sees_whole

    def warm_up(
        self, graph_rows: int, max_drafts: int = 0, piece_tokens: tuple[int, ...] = (),
        on_captured: OnCaptured = lambda done, total: None,
    ) -> None:  # fmt: skip
        """See `cuda.warm_up`. Does nothing on a CPU."""
        if self.padding_page is not None and self.pooled is None:
            warm_up(self, graph_rows, max_drafts, piece_tokens, on_captured)

    def find_weaknesses(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.attention.is_fallback:
            found["slow attention"] = self.attention.reason
        if self.device.type == "cuda" and not self.attention.backend.is_capturable:
            found["no CUDA graphs"] = f"{self.attention.backend.name} cannot be captured: {self.attention.reason}"
        if isinstance(self.config, FallbackConfig):
            if self.pooled is None:  # others have no faster code
                name = self.config.family
                found["slow model"] = f"Baton has no code for {name}: transformers' runs, without CUDA graphs"
        elif stretched := [rope for rope in self.config.ropes if rope.factors != rope.short_factors]:
            original = stretched[0].original_context
            found["rope's long factors, for short prompts too"] = (
                f"contexts here may be of {self.config.context_tokens} tokens, more than the original {original}: "
                f"set --max-context-tokens {original} if that is enough"
            )
        if self.pool.why_private is not None:
            found["pages go over gRPC even on this host"] = self.pool.why_private
        if self.why_unshared is not None:
            found["each worker has its own copy of the weights"] = self.why_unshared
        if self.why_blind is not None:
            found["no images"] = self.why_blind
        return found


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
) -> FullEngine:
    """Load a model by folder or hub id, a draft model too unless `draft_model` is empty, and allocate their pool.

    `num_rows`: sequences in steps at once. `max_context_tokens`: upper limit of a sequence; 0: the model's own limit.
    `largest_step`: is run on a GPU before the pool is sized, to measure what it needs; None: nothing is measured.
    `has_vision`: rank 0 loads the part that encodes images, if it can.
    FileNotFoundError or ValueError say what is wrong with the checkpoint or the device.
    """
    torch.set_num_threads(threads)
    ranks = place.ranks
    device = choose_device(device_name, ranks.rank, ranks.size, place.num_hosts)
    if ranks.num_stages > 1 and draft_model:
        raise ValueError("a model in stages (--pp) takes no draft model: set --draft-model none, on both sides")
    check_kv_dtype(kv_dtype, device)
    folder = resolve_model_folder(model)
    with explain_full_gpu(device, folder):
        loaded = _load(folder, dtype, device, quantization, ranks, max_context_tokens, on_progress, adapter_limits)
        context_tokens = _resolve_context(loaded.decoder, max_context_tokens)
        draft = None
        if draft_model and read_pooling(folder):
            raise ValueError(f"{folder} makes vectors of texts, without drafts: set --draft-model none")
        if draft_model:
            draft = _load_draft(draft_model, folder, loaded.decoder, context_tokens, quantization, ranks)
        vision, why_blind = None, None
        if has_vision and ranks.rank == 0 and ranks.num_stages == 1:
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
) -> FullEngine:
    """Build pages, rows and attention for loaded models. Parameters: see `build_engine`."""
    decoder, config, device, ranks = model.decoder, model.decoder.config, model.decoder.device, place.ranks
    models = [model] if draft is None else [model, draft]
    decoders = [one.decoder for one in models]
    if draft is not None and isinstance(draft.decoder, DraftDecoder) and draft.decoder.reads:
        decoder.tap(draft.decoder.reads)
    pool_dtype = resolve_kv_dtype(kv_dtype, decoder.dtype)
    in_pages = [_find_parts(one, ranks.num_stages, device) for one in models]
    shapes = [PoolShape(1, own, page_tokens, pool_dtype) for own in in_pages]
    slots = PoolShape(1, config.state_parts, 1, torch.float32)
    attention = [_choose_attention((one if one.kv_parts else model).decoder, page_tokens, pool_dtype) for one in models]
    context_tokens = _resolve_context(decoder, max_context_tokens)
    rows = place.build_rows(num_rows, context_tokens, page_tokens, config.vocab_size, device)
    rows.max_logits = most_logits(ranks.all_reduce_min(open_device(device).memory_bytes, device))
    if isinstance(config, ModelConfig) and config.image_token is not None:
        rules = ImageRules(config.image_token, config.image_attention, config.counts_rows)
        rows.images = ImageRows(rules)
        if rules.sees_whole:
            reference = reference_attention(config.attention_shapes, page_tokens, open_device(device).pad_head)
            attention[0] = replace(attention[0], backend=WholeImageAttention(attention[0].backend, reference))
    gpu_memory, opened = _gpu_memory(device), open_device(device)
    has_steps = isinstance(config, ModelConfig) or read_pooling(model.folder) is None  # that can be run with any tokens
    if gpu_memory is not None and largest_step is not None and has_steps:
        measured = [*zip(decoders, attention, shapes, strict=True)]
        beside = 0 if vision is None else measure_peak(vision.encode_largest, device)
        gpu_memory = (*gpu_memory[:2], beside + _measure_step(largest_step, measured, rows, ranks))
    sizes = size_pool(
        config.context_tokens, sum(shape.page_bytes for shape in shapes), ranks.size, gpu_memory,
        sum(one.decoder.mapped_bytes for one in models), slots.page_bytes,
    )  # fmt: skip
    num_pages, num_slots = (ranks.all_reduce_min(count, device) for count in sizes)
    has_padding = device.type == "cuda"

    def share(fd: int, parts: tuple[PagePart, ...]) -> PoolShare | None:
        barrier = partial(ranks.all_reduce_min, 0, device)
        return PoolShare(ranks.rank, ranks.size, parts, fd, barrier, ranks.num_stages) if ranks.size > 1 else None

    whole = [pad_parts(one.kv_parts, device) for one in models]
    parts = tuple(part for kv, own in zip(whole, shapes, strict=True) for part in own.page_parts(kv))
    draft_shape = shapes[1] if draft is not None and draft.kv_parts else None
    pages = shapes[0].with_pages(num_pages + has_padding)
    pool = opened.build_pool(pages, draft_shape, share(place.pool_fds[0], parts), place.lends)
    states = None
    if config.state_parts:
        whole_states = share(place.pool_fds[1], slots.page_parts(model.state_parts))
        states = opened.build_pool(slots.with_pages(num_slots + has_padding), share=whole_states, lends=place.lends)
        rows.states = states.shape.split(states.pages)
    additions, read_adapter = decoder.additions, None
    adapters = additions if isinstance(additions, Adapters) else None
    if adapters is not None:
        rows.adapters = AdapterRows(adapters, num_rows)
        reader = PeftReader(load_config(model.folder), Shard(ranks.rank, ranks.size), decoder.dtype, adapters.max_rank)
        read_adapter = partial(reader.read, sites=adapters.sites)
    why_chains = find_why_chains(config, attention[0].backend.name, ranks.num_stages)
    if why_chains is None:
        rows.lay_out_trees = trees.lay_out
    tensors = [pool.tensor, pool.tensor if pool.draft_tensor is None else pool.draft_tensor]
    runner, draft_runner = _build_runners(place, decoders, attention, tensors, rows)
    if (pooled := build_forwards(model.folder, decoder)) is not None:
        runner.forwards = pooled
    return FullEngine(
        folder=model.folder,
        config=config,
        weights=model.weights,
        dtype=name_dtype(decoder.dtype),
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
        why_chains=why_chains,
        adapters=adapters,
        read_adapter=read_adapter,
        vision=vision,
        pooled=pooled,
    )


def _find_parts(model: Loaded, num_stages: int, device: torch.device) -> tuple[KvPart, ...]:
    """This rank's parts of pages, with room for the layers of the largest stage."""
    pairs = zip(pad_parts(model.decoder.config.kv_parts, device), model.kv_parts, strict=True)
    return tuple(own._replace(num_layers=most_layers(whole.num_layers, num_stages)) for own, whole in pairs)


def find_why_chains(config: ModelConfig | FallbackConfig, attention: str, num_stages: int) -> str | None:
    """The first reason why drafts are chains; None if they may be trees."""
    if isinstance(config, FallbackConfig):
        return "a model that transformers runs"
    found = {
        "recurrent states": config.state_parts,
        "layers with a sliding window": any(layer.window is not None for layer in config.layers),
        "layers that differ in their heads": len(set(config.attention_shapes)) > 1,
        "latents": config.token_kv is not None,
        attention: attention not in TREE_ATTENTION,
        "stages": num_stages > 1,
    }
    return next((name for name, is_so in found.items() if is_so), None)


def _build_runners(
    place: Place, decoders: Sequence[Decoder], attention: Sequence[AttentionChoice], pages: Sequence[Tensor],
    rows: InputBatch,
) -> tuple[Runner, Runner | None]:  # fmt: skip
    """Runners of the model and, if there are two decoders, of the one that drafts for it. pages: of each."""
    backends = [one.backend for one in attention]
    if len(decoders) == 1:
        return place.build_runner(0, decoders[0], backends[0], pages[0], rows), None
    if isinstance(decoders[1], DraftDecoder):
        build_head: Callable[..., Runner] = place.build_head_runner or HeadRunner
        head = build_head(decoders[1], backends[1], pages[1], rows, decoders[0])
        assert isinstance(head, HeadRunner)
        return place.build_runner(0, decoders[0], backends[0], pages[0], rows, False, head.as_follower), head
    return (
        place.build_runner(0, decoders[0], backends[0], pages[0], rows),
        place.build_runner(1, decoders[1], backends[1], pages[1], rows, True),
    )


def _resolve_context(decoder: Decoder, max_context_tokens: int) -> int:
    return min(decoder.config.context_tokens, max_context_tokens or decoder.config.context_tokens)


def _load(
    folder: Path, dtype: str, device: torch.device, quantization: Quantization, ranks: Ranks, max_context_tokens: int,
    on_progress: OnProgress | None = None, adapter_limits: AdapterLimits = NO_ADAPTERS,
) -> Loaded:  # fmt: skip
    """This rank's part of a model."""
    decoder = load_model(folder, dtype, device, on_progress, quantization, ranks, adapter_limits, max_context_tokens)
    whole = load_config(folder) if isinstance(decoder.config, ModelConfig) else decoder.config
    return Loaded(
        folder, _find_fingerprint(folder, quantization, decoder.config), decoder, whole.kv_parts, whole.state_parts
    )


def _find_fingerprint(folder: Path, quantization: Quantization, config: ModelConfig) -> str:
    """`config`: as the decoder computes it."""
    weights = weight_fingerprint(folder, quantization, read_header)
    if not isinstance(config, ModelConfig):
        return f"{weights}:transformers-{version('transformers')}"
    return weights if load_config(folder).ropes == config.ropes else f"{weights}:short-rope"


def check_new_weights(engine: FullEngine, folder: Path) -> str:
    """The fingerprint of other weights that the engine could take. ValueError or FileNotFoundError says why not."""
    here, ranks = engine.config, engine.runner.model.ranks
    if engine.has_head or engine.adapters is not None or engine.vision is not None:
        why = "what depends on its weights: set --draft-model none or to a model, --max-loras 0 and --no-vision"
        raise ValueError(f"this worker has a draft head, adapters or a part for images, {why}")
    if engine.pool.num_stages > 1:
        raise ValueError("a model in stages keeps its weights: set --pp 1")
    if not isinstance(here, ModelConfig):
        raise ValueError("models without code of Baton's own keep their weights")
    check_folder(folder)
    config, checkpoint = open_model(folder)
    check_tensors(config, checkpoint)
    there = shard_config(config.within(here.context_tokens), Shard(ranks.rank, ranks.size))
    for name in (field.name for field in fields(here)):
        if (old := getattr(here, name)) != (new := getattr(there, name)):
            raise ValueError(f"{folder} is another model: {name} is {new}, here it is {old}")
    return _find_fingerprint(folder, engine.quantization, here)


def read_new_weights(engine: FullEngine, folder: Path, weights: str) -> Callable[[], None]:
    """Read them beside the old ones; the call then puts them in their place, while no step runs.

    `weights`: the fingerprint. ValueError or OSError: they cannot be used, or are others by now.
    """
    old, is_gpu = engine.runner.model, engine.device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(engine.device)  # new threads use GPU 0 by default

    def build_on_host(build: Callable[[OpenFormat], DecoderT], source: Source) -> DecoderT:
        return build(lambda reader, ops: cast(PlainFormat, HostFormat(choose_format(reader, ops, source.quantization))))

    parts = replace(PARTS, build=build_on_host) if is_gpu else PARTS
    new = load.load_model(
        folder, engine.dtype, open_device(engine.device), parts, None, engine.quantization, old.ranks,
        engine.config.context_tokens,
    )  # fmt: skip
    if is_gpu:
        torch.cuda.empty_cache()  # what waits in main memory now
    if (found := check_new_weights(engine, folder)) != weights:
        raise ValueError(f"{folder} has the weights {found}, expected {weights}")
    return partial(take_copies, find_copies(old, new)) if is_gpu else partial(vars(old).update, vars(new))


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
    loaded = _load(folder, name_dtype(target.dtype), target.device, quantization, ranks, context_tokens)
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
    prefix, source = (f"{MTP}:", folder) if is_mtp else ("", find_weights(folder))
    return Loaded(folder, prefix + weight_fingerprint(source, quantization, read_header), decoder, kv_parts)


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
    step: LargestStep,
    models: Sequence[tuple[Decoder, AttentionChoice, PoolShape]],
    rows: InputBatch,
    ranks: Ranks = ONE_RANK,
) -> int:
    """Bytes that it takes beyond what torch holds. ValueError if it cannot be run."""
    try:
        if states := models[0][0].config.state_parts:  # one slot, which all sequences write
            slot = PoolShape(1, states, 1, torch.float32)
            rows.states = slot.split(torch.zeros(1, slot.page_elements, device=rows.device))
        decoders, attention, shapes = zip(*models, strict=True)
        pages = [torch.zeros(shape.sizes, dtype=shape.dtype, device=rows.device) for shape in shapes]
        place = replace(ALONE, build_runner=partial(build_follower, ranks))
        runner, draft_runner = _build_runners(place, decoders, attention, pages, rows)
        drafting = [] if draft_runner is None or isinstance(draft_runner, HeadRunner) else [draft_runner]
        return find_step_bytes(step, [runner, *drafting], rows)
    except Exception as error:
        raise explain_failed_step(error, step.setting, step.chunk_tokens) from error
