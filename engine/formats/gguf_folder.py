"""Makes a model's folder of a GGUF file: config, tokenizer and chat template from the file, and links to it.

All else then treats it like any other model. A folder is made once for each file. Needs no torch.
"""

import hashlib
import json
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.catalogue import build_config
from engine.formats.gguf_config import OTHERS, build_config_json, build_generation_json
from engine.formats.gguf_file import GgufHeader, Metadata, Open, list_gguf_shards, open_file, read_gguf
from engine.models.table import check_sizes
from engine.weights.files import TensorEntry
from engine.weights.folders import cache_folder
from wire.files import blamed, check_file, named

VERSION = 1  # of what is written
MAX_VECTOR_BYTES = 1 << 16
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # in transformers |-> in GGUF


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
    return make_folder(cache / hash_name([stats]), shards, shards)


def hash_name(parts: Sequence[object]) -> str:
    """The name of a folder for what differs in one of `parts`."""
    return hashlib.sha256(json.dumps([VERSION, *parts]).encode()).hexdigest()[:32]


def make_folder(folder: Path, shards: Sequence[Path], linked: Sequence[Path], open_: Open = open_file) -> Path:
    """`folder`, made if it is not there: of the heads of `shards`, with links to the files in `linked`."""
    if folder.is_dir():
        return folder
    headers = [read_gguf(shard, open_) for shard in shards]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        draft = Path(name)
        _write(draft, shards[0], headers, open_)
        for number, shard in enumerate(linked, start=1):
            (draft / f"model-{number:05}-of-{len(linked):05}.gguf").symlink_to(shard)
        try:
            draft.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
        else:
            draft.mkdir()  # for the context to remove
    return folder


def _write(folder: Path, first: Path, headers: Sequence[GgufHeader], open_: Open) -> None:
    metadata = headers[0].metadata
    entries = {name: entry for header in headers for name, entry in header.entries.items()}
    rope = {name: read_floats(entries[name], open_) for name in OTHERS if name in entries}
    with named(first):
        config = build_config_json(metadata, entries, rope)
        check_sizes(build_config(config), entries)  # before the tokenizer, which takes seconds
    for name, values in (("config.json", config), ("generation_config.json", build_generation_json(metadata))):
        (folder / name).write_text(json.dumps(values, indent=1), encoding="utf-8")
    with blamed(first):
        _write_tokenizer(folder, metadata)


def _write_tokenizer(folder: Path, metadata: Metadata) -> None:
    """By transformers' converter. `AutoTokenizer` would read the metadata once more, and needs torch for that.

    To load it transformers checks the configuration too: so it does here, where the file can be named.
    """
    from transformers import AutoConfig, TokenizersBackend  # seconds
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    build: Any = TokenizersBackend
    vocabulary, settings = (
        {theirs: metadata[f"tokenizer.{key}"] for key, theirs in keys.items() if f"tokenizer.{key}" in metadata}
        for keys in GGUF_TOKENIZER_MAPPING.values()
    )
    if vocabulary.get("tokenizer_type") == "llama":  # as llama.cpp does where a file does not say
        settings.setdefault("add_bos_token", True)
    for theirs, ours in SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{ours}_token_id")
        settings[f"{theirs}_token"] = None if token_id is None else vocabulary["tokens"][token_id]
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], vocabulary)
    build(tokenizer_object=backend, **settings).save_pretrained(folder)


def read_floats(entry: TensorEntry, open_: Open = open_file) -> list[float]:
    """A short vector of floats. ValueError if it is something else."""
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.num_bytes > MAX_VECTOR_BYTES:
        raise ValueError(f"{entry.path} has factors of its rope as {entry.dtype} {list(entry.shape)}, expected F32")
    with open_(entry.path) as file:
        file.seek(entry.begin_bytes)
        return list(struct.unpack(f"<{entry.shape[0]}f", file.read(entry.num_bytes)))
