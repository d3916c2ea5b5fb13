"""Makes a model's folder of a GGUF file: config, tokenizer and chat template from the file, and links to it.

All else then treats it like any other model. A folder is made once for each file.
"""

import hashlib
import json
import struct
import tempfile
from pathlib import Path

from engine.formats.gguf_config import OTHERS, build_config_json, build_generation_json
from engine.formats.gguf_file import GgufHeader, list_gguf_shards, read_gguf
from engine.models.read_config import build_config
from engine.models.sizes import check_sizes
from engine.weights.entry import TensorEntry
from engine.weights.folders import cache_folder
from wire.files import blamed, check_file, named

VERSION = 1  # of what is written
MAX_VECTOR_BYTES = 1 << 16


def gguf_cache() -> Path:
    """Where the folders are kept. OSError if there is no place for them."""
    return cache_folder() / "models"


def make_gguf_folder(path: Path, cache: Path) -> Path:
    """The folder in `cache` for the model whose first file is `path`. ValueError if it cannot be used, OSError."""
    found = list_gguf_shards(path)
    for shard in found:
        check_file(shard, None)
    shards = [shard.resolve() for shard in found]
    stats = [(str(shard), (status := shard.stat()).st_size, status.st_mtime_ns) for shard in shards]
    folder = cache / hashlib.sha256(json.dumps([VERSION, stats]).encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    headers = [read_gguf(shard) for shard in shards]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        draft = Path(name)
        _write(draft, shards, headers)
        try:
            draft.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
        else:
            draft.mkdir()  # for the context to remove
    return folder


def _write(folder: Path, shards: list[Path], headers: list[GgufHeader]) -> None:
    metadata = headers[0].metadata
    entries = {name: entry for header in headers for name, entry in header.entries.items()}
    rope = {name: read_floats(entries[name]) for name in OTHERS if name in entries}
    with named(shards[0]):
        config = build_config_json(metadata, entries, rope)
        check_sizes(build_config(config), entries)  # before the tokenizer, which takes seconds
    for name, values in (("config.json", config), ("generation_config.json", build_generation_json(metadata))):
        (folder / name).write_text(json.dumps(values, indent=1), encoding="utf-8")
    links = [folder / f"model-{number:05}-of-{len(shards):05}.gguf" for number in range(1, len(shards) + 1)]
    for link, shard in zip(links, shards, strict=True):
        link.symlink_to(shard)
    _write_tokenizer(folder, links[0])


def _write_tokenizer(folder: Path, link: Path) -> None:
    from transformers import AutoTokenizer  # seconds

    with blamed(link.resolve()):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=link.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)


def read_floats(entry: TensorEntry) -> list[float]:
    """A short vector of floats. ValueError if it is something else."""
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.num_bytes > MAX_VECTOR_BYTES:
        raise ValueError(f"{entry.path} has factors of its rope as {entry.dtype} {list(entry.shape)}, expected F32")
    with entry.path.open("rb") as file:
        file.seek(entry.begin_bytes)
        return list(struct.unpack(f"<{entry.shape[0]}f", file.read(entry.num_bytes)))
