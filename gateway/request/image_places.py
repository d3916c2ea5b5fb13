"""Where a prompt's images are: their text in a rendered chat, and their spans among its tokens. Pure."""

from collections.abc import Sequence

from gateway.errors import ApiError, bad_request
from gateway.images.reader import FoundImage
from gateway.router.engine_client import PromptImage
from wire.images import ImageSpan


def put_images(text: str, placeholder: str, images: Sequence[FoundImage], param: str) -> str:
    """The rendered chat with what the processor writes for each image. Raises ApiError naming `param`."""
    pieces = text.split(placeholder)
    if len(pieces) - 1 > len(images):
        raise spelled(placeholder, param)
    if len(pieces) - 1 < len(images):
        why = f"the model's chat template leaves out images of {param}: it takes none in such messages"
        raise bad_request(why, param, "invalid_image")
    filled = [f"{piece}{image.read.text}" for piece, image in zip(pieces[:-1], images, strict=True)]
    return "".join([*filled, pieces[-1]])


def find_images(
    ids: Sequence[int], token_id: int, token: str, images: Sequence[FoundImage], param: str
) -> tuple[PromptImage, ...]:
    """Each image's span, from its first image token to its last. Raises ApiError naming `param`."""
    places = [place for place, one in enumerate(ids) if one == token_id]
    counts = [image.read.text.count(token) for image in images]
    if len(places) != sum(counts):
        raise spelled(token, param)
    found: list[PromptImage] = []
    begin = 0
    for image, count in zip(images, counts, strict=True):
        first, last = places[begin], places[begin + count - 1]
        span = ImageSpan(first, last + 1, image.digest, image.read.rows, image.read.columns)
        found.append(PromptImage(span, image.file))
        begin += count
    return tuple(found)


def spelled(token: str, param: str) -> ApiError:
    """400: a prompt has what stands for an image, and no image for it."""
    return bad_request(f"{param} has the text {token!r}, which stands for an image; leave it out", param)
