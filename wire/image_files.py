"""Reads image files that clients send, in the same way in every process.

A file has one of four formats, and is not a document, archive or program as well. Its text may be anything: no file
is ever shown or run. Its header is read before its pixels, by the decoder of its own format alone.
"""

import re
from io import BytesIO

from PIL import Image, ImageOps

from wire.image_formats import FORMATS, TAKEN, find_type

MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # Pillow itself refuses more
_OBJECT = re.compile(r" ?<[^<>]* at 0x[0-9a-f]+>")  # as Python shows one: its address is none of a client's business
# What the files of other formats have in them: of those that are read from their end, or wherever they begin.
_OTHERS = {
    b"%PDF-1.": "PDF",
    b"PK\x05\x06\0\0\0\0": "ZIP",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "RAR",
    b"\x7fELF\x02\x01\x01": "ELF",
}


def read_image(file: bytes, max_pixels: int = MOST_PIXELS) -> Image.Image:
    """RGB and upright, as transformers loads files. Raises ValueError saying what is wrong with it."""
    kind = find_type(file)
    if kind is None:
        raise ValueError(f"it is no {TAKEN} file")
    for mark, other in _OTHERS.items():
        if mark in file:
            raise ValueError(f"it is a {other} file as well")
    try:
        image = Image.open(BytesIO(file), formats=[FORMATS[kind]])
        is_small = image.width * image.height <= max_pixels
        is_single = image.format == "MPO" or not getattr(image, "is_animated", False)  # MPO: a photo and its previews
        if is_small and is_single:
            ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == "RGB" else image.convert("RGB")  # a copy of 200 MB, for large ones
    except (MemoryError, Image.DecompressionBombError) as error:
        raise ValueError("it has too many pixels") from error
    except Exception as error:  # decoders raise whatever a damaged file makes them
        reason = _OBJECT.sub("", str(error))[:100] or type(error).__name__
        raise ValueError(f"it is damaged: {reason}") from error
    if is_small:
        raise ValueError("it is animated; send one frame")
    raise ValueError(f"it has {image.width} x {image.height} pixels; at most {max_pixels} are read")
