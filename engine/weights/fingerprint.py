"""The fingerprint of a model: equal for two processes that compute the same KV of the same tokens.

It is over every byte of the weights: two models that differ in a few rows share no KV. A large file is read once; its
digests are kept beside packed weights, under its path, size and time.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from engine.weights.files import ReadHeader, TensorEntry, list_shards, read_safetensors
from engine.weights.folders import SMALLEST_FILE_BYTES, CannotShareError, cache_folder, locked
from wire.files import read_json_object

KV_VERSION = 1  # of how KV is computed from the weights: whatever changes its values, beyond rounding, raises it
UNHASHED_CONFIG_KEYS = {"_name_or_path", "transformers_version"}  # differ between copies of one model
IMAGE_CONFIGS = ("preprocessor_config.json", "processor_config.json")  # how images become what the weights see
READ_BYTES, NUM_READERS = 16 << 20, 8
Digests = dict[str, str]  # tensor name |-> SHA-256 of its dtype, shape and content


def weight_fingerprint(folder: Path, quantization: str = "none", read_header: ReadHeader = read_safetensors) -> str:
    """64 hex digits, after "fp8:", "int8:" or "int4:" if quantised.

    The digits are SHA-256 over KV_VERSION, config.json (without UNHASHED_CONFIG_KEYS), the configurations of image
    processors and each tensor's digest by name. Sharding does not matter. Raises like `load_model` for missing or
    damaged files. folder: or a file in it, see `list_shards`.
    """
    home = folder.parent if folder.is_file() else folder
    names = ["config.json", *(name for name in IMAGE_CONFIGS if (home / name).is_file())]
    configs = [read_json_object(home / name) for name in names]
    kept = [{key: value for key, value in one.items() if key not in UNHASHED_CONFIG_KEYS} for one in configs]
    digests = Digests()
    for path in list_shards(folder):
        digests |= _find_digests(path, read_header)
    described = json.dumps([KV_VERSION, kept, digests], sort_keys=True)
    prefix = "" if quantization == "none" else f"{quantization}:"
    return prefix + hashlib.sha256(described.encode()).hexdigest()


def _find_digests(path: Path, read_header: ReadHeader) -> Digests:
    entries, status = read_header(path), path.stat()
    if status.st_size < SMALLEST_FILE_BYTES:
        return _read_digests(path, entries)
    facts = json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino])
    with suppress(OSError, CannotShareError):
        kept = cache_folder() / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.digests"
        with locked(kept.with_suffix(".lock")):
            with suppress(FileNotFoundError, ValueError, AttributeError):  # there is none, or none that is whole
                if (found := json.loads(kept.read_bytes())).keys() == entries.keys():
                    os.utime(kept)
                    return Digests(found)
            digests, draft = _read_digests(path, entries), kept.with_suffix(".part")
            draft.write_text(json.dumps(digests))
            draft.replace(kept)
            return digests
    return _read_digests(path, entries)


def _read_digests(path: Path, entries: dict[str, TensorEntry]) -> Digests:
    with path.open("rb") as file, ThreadPoolExecutor(NUM_READERS) as readers:
        return dict(readers.map(lambda item: (item[0], _digest(file.fileno(), *item)), entries.items()))


def _digest(file: int, name: str, entry: TensorEntry) -> str:
    hasher, end = hashlib.sha256(json.dumps([name, entry.dtype, entry.shape]).encode()), entry.begin_bytes
    while part := os.pread(file, min(READ_BYTES, entry.begin_bytes + entry.num_bytes - end), end):
        hasher.update(part)
        end += len(part)
    return hasher.hexdigest()
