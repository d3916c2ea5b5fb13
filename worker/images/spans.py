"""Where a step may end, if the model sees all of an image at once. Pure."""

from collections.abc import Sequence as Seq

from wire.images import ImageSpan
from worker.params import SequenceParams


def fit_chunk(params: SequenceParams, begin: int, count: int) -> int:
    """See `TokenBudget.fit`."""
    return fit_images(params.images, begin, count)


def fit_images(images: Seq[ImageSpan], begin: int, count: int) -> int:
    """How many positions from `begin` on are computed, about `count`, so that the last one is not inside an image.

    Fewer, up to the image; or more, to its end, if nothing is before it.
    """
    for image in images:
        if image.begin < begin + count < image.end:
            return (image.begin if image.begin > begin else image.end) - begin
    return count
