"""Formats of the image files that clients send. Loads no decoder: that is image_files.py."""

MAX_FILE_BYTES = 20 << 20
FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
}  # media type |-> Pillow's
TAKEN = "PNG, JPEG, WebP or GIF"


def find_type(file: bytes) -> str | None:
    """A file's media type, by its first bytes; None if it has none of FORMATS."""
    if file.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if file.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if file.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if file[:4] == b"RIFF" and file[8:12] == b"WEBP" else None
