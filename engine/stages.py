"""A model in stages (--pp): each has some of the layers, and hands the rows of a step on to the next.

    first stage: embedding, layers ─► sums [T, H] float32 ─► layers ─► ... ─► last stage: layers, norm, head, tokens

Rank 0 is in the last stage, so that it has the tokens it schedules by. Each stage has as many ranks (--tp), which
exchange among themselves; a rank hands its rows, which its stage's ranks have alike, to the rank of the same number.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import Batch, EmbeddedRows, Prepared
from engine.layers.linear import NO_ADDITIONS, Additions, Embedding, Linear, WidenedLinear
from engine.models.assemble import LayerBuilder, LayerParts, as_stored, find_head
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer, Flow
from engine.models.table import Table, build_table, shard_config
from engine.rank_group import GroupRanks
from engine.ranks import ONE_RANK, Ranks
from engine.runner import Launched, Runner
from engine.weights.formats import PlainFormat
from engine.weights.table import Shard
from wire.kv_layout import layers_of, stage_of

log = structlog.get_logger()

MOST_SENDING = 2  # rows of steps that wait to be taken by the next stage


class StagedRanks(GroupRanks):
    """All ranks of a worker. Exchanges within a step are those of `within`."""

    def __init__(self, num_stages: int, group: dist.ProcessGroup) -> None:
        """Called by all ranks."""
        super().__init__(group)
        self.num_stages = num_stages
        self.stage = stage_of(self.rank, self.size, num_stages)
        self.is_first, self.is_last = self.stage == 0, self.stage == num_stages - 1
        self._tp = self.size // num_stages
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self.within: Ranks = ONE_RANK  # its stage's
        if self._tp > 1:
            groups = [dist.new_group(range(first, first + self._tp)) for first in range(0, self.size, self._tp)]
            own = groups[self.rank // self._tp]
            assert isinstance(own, dist.ProcessGroup)
            self.within = GroupRanks(own)

    def send(self, rows: Tensor) -> None:
        """Hand rows to the next stage, without waiting for it. They must not be written to any more."""
        work = dist.isend(rows, self.rank - self._tp, group=self._group)
        assert work is not None
        self._sending.append((work, rows))
        while len(self._sending) > MOST_SENDING:
            self._sending.popleft()[0].wait()

    def receive(self, rows: Tensor) -> Tensor:
        """Fill `rows` with those of the stage before, of the same step."""
        dist.recv(rows, self.rank + self._tp, group=self._group)
        return rows


class StageDecoder(Decoder):
    """One stage's layers. `forward` of all but the last returns no rows."""

    is_capturable = False  # the host waits for rows

    def __init__(
        self, ranks: StagedRanks, config: ModelConfig, embedding: Embedding, layers: list[DecoderLayer],
        final_norm: Tensor | None, lm_head: Linear, format: PlainFormat, additions: Additions,
    ) -> None:  # fmt: skip
        """See `Decoder`."""
        super().__init__(config, embedding, layers, final_norm, lm_head, format.ops, ranks.within, additions=additions)
        self._stages = ranks

    def embed(
        self, token_ids: Tensor, rope_positions: Tensor, hidden: Tensor | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> Flow:  # fmt: skip
        if self._stages.is_first:
            return super().embed(token_ids, rope_positions, hidden, embedded)
        shape = len(token_ids), self.config.hidden_size
        sums = self._stages.receive(torch.empty(shape, dtype=torch.float32, device=self.device))
        nothing = torch.zeros(shape, dtype=self.dtype, device=self.device)
        normed = self._add(sums, nothing, None, self._layers[0].before_attention)  # as the stage before would
        return Flow(sums, normed, self._rotations(rope_positions), None)

    def finish(self, flow: Flow, attended: Tensor, batch: Batch) -> Tensor:
        if self._stages.is_last:
            return super().finish(flow, attended, batch)
        self.finish_layer(len(self._layers) - 1, flow, attended, None)
        self._stages.send(flow.sums)
        return flow.normed[:0]

    def is_done(self, index: int, batch: Batch) -> bool:
        return self._stages.is_last and super().is_done(index, batch)


class StageRunner(Runner):
    """Runs a stage before the last, which chooses no tokens. The leader sends those that were chosen."""

    def _finish(self, step: Prepared, batch: Batch, hidden: Tensor) -> Launched:
        return Launched(hidden.new_empty(0, dtype=torch.int64), [])


def build_follower(ranks: Ranks, _number: int, *parts: object) -> Runner:
    """See `Place.build_runner`; of a rank that follows."""
    build: Callable[..., Runner] = StageRunner if isinstance(ranks, StagedRanks) and not ranks.is_last else Runner
    return build(*parts)


def check_stages(config: object, num_stages: int) -> None:
    """ValueError names what of a model cannot be divided into stages."""
    if num_stages == 1:
        return
    if not isinstance(config, ModelConfig):
        raise ValueError(f"--pp {num_stages} cannot divide what transformers computes: set --pp 1")
    found = {
        f"its {config.num_layers} layers": config.num_layers < num_stages,
        "its recurrent states": config.recurrent is not None,
        "inputs of each layer": config.token_inputs is not None,
        "layers that read the keys and values of others": any(one.kv_layer is not None for one in config.layers),
        "layers whose pages differ": len(config.kv_parts) > 1,
        "images": config.image_token is not None,
    }
    for name, is_so in found.items():
        if is_so:
            raise ValueError(f"--pp {num_stages} cannot divide this model, for {name}: set --pp 1")


def build_stage(
    ranks: StagedRanks, whole: ModelConfig, format: PlainFormat, parts: LayerParts, within: Ranks,
    additions: Additions = NO_ADDITIONS,
) -> Decoder:  # fmt: skip
    """See `build_decoder`: this rank's part of its stage."""
    own = layers_of(whole.num_layers, ranks.stage, ranks.num_stages)
    log.info("a stage of the model", stage=ranks.stage, stages=ranks.num_stages, layers=f"{own.start}-{own.stop - 1}")
    table = build_table(as_stored(whole, format.reader.checkpoint))
    config = replace(whole, num_layers=len(own), layers=whole.layers[own.start : own.stop])
    config = shard_config(config, Shard(within.rank, within.size))
    embedding, head = _build_ends(ranks, whole, table, format)
    top = LayerBuilder(config, format, within, table, parts)
    layers = [
        LayerBuilder(config, format, within, table.layers[index], parts, additions, index).build_layer(layer)
        for index, layer in zip(own, config.layers, strict=True)
    ]
    final_norm = top.norm("final_norm") if ranks.is_last else None
    format.reader.finish()
    return StageDecoder(ranks, config, top.sum_rows(embedding), layers, final_norm, head, format, additions)


def _build_ends(
    ranks: StagedRanks, whole: ModelConfig, table: Table, format: PlainFormat
) -> tuple[Embedding, Linear]:  # fmt: skip
    """The embedding on the first stage and the head on the last: elsewhere they are empty, or the other one's."""
    reader, words = format.reader, table.products["embedding"]
    head = find_head(whole, table, reader.checkpoint)
    if ranks.is_last or (ranks.is_first and head == words):
        return format.embed(head, head)
    empty = torch.empty(0, whole.hidden_size, dtype=reader.dtype, device=reader.device)
    weight = reader.fuse(words) if ranks.is_first else empty
    return Embedding(weight), WidenedLinear(weight)
