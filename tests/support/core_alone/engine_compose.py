"""What engine/compose.py is where there are no satellites: plain models of the core's families, by torch alone."""

from functools import partial
from pathlib import Path

import torch

from engine.attention.choose import choose_for_layers
from engine.device import Device
from engine.engine import ALONE, Engine, Place, SizePool, choose_device, name_dtype
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.models.load import Parts, load_model
from engine.runner import Runner
from engine.weights.fingerprint import weight_fingerprint
from engine.weights.reader import OnProgress

FullEngine = Engine


def build_engine(
    model: str, draft_model: str, dtype: str, device_name: str, threads: int, page_tokens: int, num_rows: int,
    size_pool: SizePool, on_progress: OnProgress, max_context_tokens: int = 0, place: Place = ALONE,
) -> Engine:  # fmt: skip
    """See the whole one."""
    torch.set_num_threads(threads)
    folder, device = Path(model), Device(choose_device(device_name))
    decoder = load_model(folder, dtype, device, Parts(), on_progress, max_context_tokens=max_context_tokens)
    config, shape = decoder.config, PoolShape(1, decoder.config.kv_parts, page_tokens, decoder.dtype)
    choose = partial(device.choose_attention, dtype=decoder.dtype, kv_dtype=decoder.dtype)
    attention = choose_for_layers(choose, config.attention_shapes, config.windows, page_tokens)
    num_pages, _ = size_pool(config.context_tokens, shape.page_bytes, 1, None, 0, 0)
    pool = device.build_pool(shape.with_pages(num_pages), lends=place.lends)
    rows = InputBatch(num_rows, config.context_tokens, page_tokens, config.vocab_size, device.torch)
    return Engine(
        folder, config, weight_fingerprint(folder), name_dtype(decoder.dtype), device.torch, attention, pool,
        padding_page=None, rows=rows, runner=Runner(decoder, attention.backend, pool.tensor, rows), draft_weights="",
        draft_runner=None,
    )  # fmt: skip
