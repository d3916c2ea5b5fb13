"""One rank of several models: runs all samplings step by step, with and without graphs, and prints the tokens.

python -m tests.support.rank_process RENDEZVOUS_FILE RANK SIZE STAGES MODEL...
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.attention.base import AttentionBackend
from engine.attention.layered import LayeredAttention, as_is
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import ForwardRow, take_turns
from engine.compose import load_model
from engine.cuda.captured import capture_graphs
from engine.cuda.graph_shapes import choose_shapes
from engine.cuda.graphs import Compute
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.latent.attention import LatentAttention
from engine.latent.expand import PagedExpansion
from engine.rank_group import GroupRanks, join_group
from engine.ranks import Ranks, end_group_member
from engine.stages import StagedRanks, build_follower
from engine.vision.image_rows import Encoding, ImageRows, ImageRules
from tests.support.batches import SAMPLINGS
from tests.support.steps import Unwatched
from wire.images import ImageSpan

PAGE_TOKENS, ROW_PAGES, NUM_TOKENS = 16, 4, 4
CPU = torch.device("cpu")


def build_backend(shape: AttentionShape) -> AttentionBackend:
    own = Unwatched(shape)
    if not shape.value_dim:
        return own
    return LatentAttention(shape, own, PagedExpansion(shape, torch.float32, TorchSdpaAttention, as_is))


def run(model: Path, ranks: Ranks, has_graphs: bool = False) -> list[list[int]]:
    """Prompts of several lengths in one batch, then their answers."""
    decoder = load_model(model, "float32", CPU, ranks=ranks)
    config, count = decoder.config, len(SAMPLINGS)
    rows = InputBatch(count, ROW_PAGES * PAGE_TOKENS - 16, PAGE_TOKENS, config.vocab_size, CPU)
    shape = PoolShape(count * ROW_PAGES + 1, config.kv_parts, PAGE_TOKENS, torch.float32)
    backends = [build_backend(shape) for shape in dict.fromkeys(config.attention_shapes)]
    attention = LayeredAttention(config.attention_shapes, backends, PAGE_TOKENS) if len(backends) > 1 else backends[0]
    if config.state_parts:  # two slots a row, and a padding slot
        slots = PoolShape(2 * count + 1, config.state_parts, PAGE_TOKENS, torch.float32)
        rows.states = slots.split(torch.zeros(slots.num_pages, slots.page_elements))
    runner = build_follower(ranks, 0, decoder, attention, torch.zeros(shape.sizes), rows)
    replays: list[Compute] = []

    def capture(compute: Compute) -> Compute:
        def replay() -> None:
            replays.append(compute)
            compute()

        return replay

    if has_graphs:
        capture_graphs(runner, choose_shapes(count, 0, count)[-1:], capture, count * ROW_PAGES)
    if config.image_token is not None:
        rows.images = ImageRows(ImageRules(config.image_token, config.image_attention, config.counts_rows))
    lengths = [3 + 2 * row for row in range(count)]
    for row, length in enumerate(lengths):
        prompt = torch.arange(2, 2 + length, dtype=torch.int32).mul_(row + 3).remainder_(config.vocab_size)
        images = []
        if config.image_token is not None and length > 10:  # an image of 2 x 3 tokens
            prompt[3:9] = config.image_token
            dice = torch.Generator().manual_seed(row)
            sizes = (6, config.hidden_size), (2, 6, config.hidden_size)
            encoding = Encoding(*(torch.randn(*size, generator=dice) for size in sizes))
            images = [(ImageSpan(3, 9, b"", *((2, 3) if config.counts_rows else ())), encoding)]
        rows.open(row, prompt.numpy(), SAMPLINGS[row], length, images=images)
        rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))
    told = []
    for step in range(NUM_TOKENS):
        requests = []
        for row, length in enumerate(lengths):
            begin, num_new = (length + step - 1, 1) if step else (0, length)
            source, target = take_turns(row, step)
            requests.append(ForwardRow(row, begin, num_new, 1, state_from=source, state_to=target))
        chosen = [runner.launch(requests).collect().tokens]
        if isinstance(ranks, StagedRanks):  # the last stage has chosen them
            dist.broadcast_object_list(chosen, 0)
            ends = [(row, length + step) for row, length in enumerate(lengths)]
            rows.write_tokens([(*at, np.array([token], np.int32)) for at, token in zip(ends, *chosen, strict=True)])
        told += chosen
    assert len(replays) == 2 * has_graphs * (NUM_TOKENS - 1)  # forwards and choices of tokens
    return [list(answer) for answer in zip(*told, strict=True)]


def main(rendezvous: str, rank: str, size: str, stages: str, *models: str) -> None:
    torch.set_num_threads(1)
    open_ranks = GroupRanks if stages == "1" else partial(StagedRanks, int(stages))
    ranks = join_group(rendezvous, int(rank), int(size), CPU, timeout_s=60, open_ranks=open_ranks)
    ways = (False, True) if stages == "1" else (False,)
    print(json.dumps([[run(Path(model), ranks, has_graphs) for model in models] for has_graphs in ways]))
    dist.destroy_process_group()
    end_group_member(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
