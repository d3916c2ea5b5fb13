"""Log-probabilities of tokens from the raw logits: before penalties, temperature and filters.

Computed on the device without waiting; read on the host later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.staging import download
from wire.logprobs import TokenLogprobs

Likeliest = tuple[tuple[int, ...], tuple[float, ...]]  # ids and their log-probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """Log-probabilities of R rows, on their way to the host."""

    logprobs: Tensor  # [R, V] on the device, to resolve ties
    num_top: list[int]  # top tokens to return for each row, at most V
    own: Tensor  # [R] on the host, of the requested tokens
    values: Tensor  # [R, 1 + max(num_top)] on the host, of the likeliest; [R, 0] if none are requested
    ids: Tensor  # the same, their ids

    def read(self) -> list[TokenLogprobs]:
        """Call once the device is done."""
        own, values, ids = self.own.tolist(), self.values.tolist(), self.ids.tolist()
        return [TokenLogprobs(own[row], *self._top(row, values[row], ids[row])) for row in range(len(own))]

    def _top(self, row: int, values: list[float], ids: list[int]) -> Likeliest:
        """Among ties the lower id comes first."""
        count = self.num_top[row]
        if 0 < count < len(values) and values[count - 1] == values[count]:
            return _find_top_slowly(self.logprobs[row], count)
        return _sort(ids[:count], values[:count])


def find_logprobs(logprobs: Tensor, tokens: Tensor, num_top: Sequence[int]) -> FoundLogprobs:
    """[R, V] log_softmax of logits, [R] int64 tokens, R numbers of top tokens to return (at most V).

    Token 0 counts in place of NO_TOKEN and NOT_A_NUMBER.
    """
    counts = [min(count, logprobs.shape[1]) for count in num_top]
    most = max(counts, default=0)
    num_found = min(1 + most, logprobs.shape[1]) if most else 0  # one more shows whether the last is tied
    values = ids = tokens.new_empty((len(counts), 0))
    if num_found:
        values, ids = logprobs.topk(num_found)
    own = logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return FoundLogprobs(logprobs, counts, download(own), download(values), download(ids))


def _sort(ids: list[int], values: list[float]) -> Likeliest:
    pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(token for token, _ in pairs), tuple(value for _, value in pairs)


def _find_top_slowly(row: Tensor, count: int) -> Likeliest:
    """[V] -> the top `count`, with ties resolved: looks at all tokens as likely as the last."""
    ids = (row >= row.topk(count).values[-1]).nonzero()[:, 0]
    ids = ids[row[ids].sort(descending=True, stable=True).indices[:count]]
    return tuple(ids.tolist()), tuple(row[ids].tolist())
