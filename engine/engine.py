"""A model ready to compute, with its pool: what a worker builds once at start."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.choose import AttentionChoice, choose_attention
from engine.kvcache.allocator import PageAllocator
from engine.kvcache.pool import Pool, PoolShape
from engine.model.assemble import OnProgress
from engine.model.config import ModelConfig
from engine.model.weights import load_model, resolve_model_folder, weight_fingerprint
from engine.runner import Runner


@dataclass(frozen=True, slots=True)
class Engine:
    """Owns everything large."""

    config: ModelConfig
    weights: str  # fingerprint
    dtype: str  # "float32", "bfloat16" or "float16"
    device: torch.device
    attention: AttentionChoice
    pool: Pool
    allocator: PageAllocator
    runner: Runner

    def describe(self) -> dict[str, str]:
        """What people want to know at start."""
        shape = self.pool.shape
        return {
            "device": str(self.device),
            "dtype": self.dtype,
            "attention": self.attention.backend.name,
            "attention_reason": self.attention.reason,
            "pool": f"{shape.num_pages} pages of {shape.page_tokens} tokens, {shape.page_bytes} bytes each",
        }


SizePool = Callable[[int, int, int | None], int]
"""(model's context in tokens, bytes of a page, free bytes of the GPU or None) |-> pages"""


def build_engine(
    model: str,
    dtype: str,
    device_name: str,
    threads: int,
    page_tokens: int,
    size_pool: SizePool,
    on_progress: OnProgress,
) -> Engine:
    """Load a model by folder or hub id and allocate its pool.

    Raises FileNotFoundError or ValueError that say what is wrong with the checkpoint or the device.
    """
    torch.set_num_threads(threads)
    device = choose_device(device_name)
    folder = resolve_model_folder(model)
    weights = weight_fingerprint(folder)
    decoder = load_model(folder, dtype, device, on_progress)
    config = decoder.config
    attention = choose_attention(config.attention_shape, device, decoder.dtype)
    shape = PoolShape(1, config.num_layers, config.num_kv_heads, page_tokens, config.head_dim, decoder.dtype)
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    pool = Pool(shape.with_pages(size_pool(config.context_length, shape.page_bytes, free_bytes)), device)
    return Engine(
        config=config,
        weights=weights,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=device,
        attention=attention,
        pool=pool,
        allocator=PageAllocator(pool.num_pages, pool.generations),
        runner=Runner(decoder, attention.backend, pool),
    )


def choose_device(wanted: str) -> torch.device:
    """Turn a name into a device: "auto" is cuda when there is one. Raises ValueError without a GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu, or install torch with CUDA")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
