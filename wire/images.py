"""Images in prompts: where they are, and what they are known by. Pure.

An image is a run of tokens of the prompt, of which most are the model's image token and stand for one row of its
encoding each; others, such as ends of lines, are text. Equal tokens with different images have different KV, so what
depends on tokens names the images as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

DIGEST_BYTES = 32
MAX_IMAGES = 64  # of one prompt


class ImageSpan(NamedTuple):
    """The tokens [begin, end) of a prompt that stand for an image, from its first image token to its last."""

    begin: int
    end: int
    digest: bytes  # SHA-256 of the file and of how the model's processor reads it
    rows: int = 0  # of image tokens, where the model counts positions by rows and columns; 0: it counts tokens
    columns: int = 0


def check_images(images: Sequence[ImageSpan], num_tokens: int) -> None:
    """ValueError unless a prompt of so many tokens can have these images, by position."""
    if len(images) > MAX_IMAGES:
        raise ValueError(f"{len(images)} images; a prompt has at most {MAX_IMAGES}")
    end = 0
    for image in images:
        if not end <= image.begin < image.end <= num_tokens:
            raise ValueError(f"images {[one[:2] for one in images]} must be apart, in {num_tokens} tokens")
        if len(image.digest) != DIGEST_BYTES:
            raise ValueError(f"the digest of an image has {len(image.digest)} bytes, expected {DIGEST_BYTES}")
        end = image.end


def name_images(images: Sequence[ImageSpan], begin: int, end: int) -> bytes:
    """Bytes that identify the images among the tokens [begin, end); empty if there are none."""
    return b"".join(
        [
            b"%b%d:%d;" % (image.digest, image.begin, image.end)
            for image in images
            if image.begin < end and begin < image.end
        ]
    )
