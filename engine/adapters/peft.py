"""Adapters (LoRA) as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

What would be computed differently, and what no product of the model can take, is refused by name.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import regex  # type: ignore[import-untyped]  # transformers needs it; unlike re, it can be stopped
import torch
from safetensors import safe_open
from torch import Tensor

from engine.adapters.slots import HostAdapter, SiteAdapter
from engine.json_values import Json, collection, flag, integer, number
from engine.layers.linear import ProductKey
from engine.models.config import ModelConfig
from engine.models.table import build_table
from engine.weights.checkpoint import FLOATS
from engine.weights.files import read_safetensors
from engine.weights.reader import cut_rows
from engine.weights.table import Part, Product, Shard
from wire.files import blamed, check_access, check_file, named, read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_FILE_BYTES = 8 << 30
MOST_PATTERN_CHARS = 200
MATCH_S = 5.0  # of the CPU, for all patterns of an adapter
NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)")  # of the text part
INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva")  # those that leave the base's weights alone
CHECKED = {"peft_type": ("LORA",), "bias": (None, "none"), "init_lora_weights": INITIALISATIONS}
IGNORED = {  # of training, or read below
    "alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip


def find_digest(folder: Path) -> str:
    """32 hex digits over everything that changes what the adapter computes. Reads it all."""
    config = _read_config(folder)
    used = {key: config.get(key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
    hasher = hashlib.sha256(json.dumps(used, sort_keys=True).encode())
    with (folder / WEIGHTS).open("rb") as file:
        hasher.update(hashlib.file_digest(file, "sha256").digest())
    return hasher.hexdigest()[:32]


class PeftReader:
    """Reads one rank's part of adapters for one model. Any thread may call it."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, max_rank: int) -> None:
        """config: of the whole model, as its config.json has it: adapters go by those names and orders of rows."""
        self._products = [table.products for table in build_table(config).layers]
        self._shard = shard
        self._dtype = dtype
        self._max_rank = max_rank

    def read(self, folder: Path, sites: Mapping[ProductKey, object]) -> HostAdapter:
        """sites: the products that can have adapters. FileNotFoundError or ValueError say what is wrong."""
        with named(folder / WEIGHTS):
            return self._read(folder, sites)

    def _read(self, folder: Path, sites: Mapping[ProductKey, object]) -> HostAdapter:
        config = _read_config(folder)
        modules = self._load(folder, config)
        found, used = dict[ProductKey, SiteAdapter](), set[str]()
        for layer, products in enumerate(self._products):
            for name, product in products.items():
                own = {part: modules.get(_module_of(part)) for part in product.parts}
                if (layer, name) in sites and any(own.values()):
                    used |= {_module_of(part) for part in product.parts}
                    found[layer, name] = self._cut(config, product, own)
        if unused := sorted(set(modules) - used):
            raise ValueError(
                f"{folder} adapts {unused[0]}, which Baton does not: only products of layers take adapters"
            )
        if not found:
            raise ValueError(f"{folder / WEIGHTS} adapts no product of this model")
        return found

    def _load(self, folder: Path, config: Json) -> dict[str, tuple[Tensor, Tensor, float]]:
        """Module, from "layers." on |-> A [r, K], B [N, r], alpha."""
        path, names = folder / WEIGHTS, dict[str, str]()  # module |-> the whole name
        halves: dict[str, dict[str, Tensor]] = {}
        entries = read_safetensors(path)  # checks sizes
        with blamed(path), safe_open(path, framework="pt", device="cpu") as file:
            for name, entry in entries.items():
                parsed = NAME.fullmatch(name)
                place = parsed and LAYER.fullmatch(parsed["module"])
                if not parsed or not place or entry.dtype not in FLOATS or len(entry.shape) != 2:
                    raise ValueError(f"{path} has {name} {entry.dtype} {entry.shape}, not a LoRA matrix of a layer")
                module = f"layers.{int(place[1])}.{place[2]}"
                names[module] = parsed["module"]
                halves.setdefault(module, {})[parsed["side"]] = file.get_tensor(name)
        if half := next((module for module, sides in halves.items() if len(sides) < 2), None):
            raise ValueError(f"{path} has only one of lora_A and lora_B for {half}")
        with named(folder / CONFIG):
            alphas = find_alphas(config, names.values())
        return {module: (sides["A"], sides["B"], alphas[names[module]]) for module, sides in halves.items()}

    def _cut(
        self, config: Json, product: Product, own: Mapping[Part, tuple[Tensor, Tensor, float] | None]
    ) -> SiteAdapter:
        rank = max(len(pair[0]) for pair in own.values() if pair)
        if rank > self._max_rank:
            raise ValueError(f"the adapter has rank {rank}: set --max-lora-rank {rank} or more")
        columns = product.inputs.of(self._shard)
        a_parts, b_parts = [], []
        for part, pair in own.items():
            if pair is None:
                b_parts.append(torch.zeros(part.rows.num_read(self._shard), rank, dtype=self._dtype))
                a_parts.append(torch.zeros(rank, len(columns), dtype=self._dtype))
                continue
            module, (a, b, alpha) = _module_of(part), pair
            expected = (len(a), product.inputs.size), part.stored_shape(len(a))
            if (a.shape, b.shape) != expected:
                raise ValueError(
                    f"{module} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, expected {expected[0]} and "
                    f"{expected[1]}: an adapter of another model?"
                )
            scaled = b.float() * (alpha / (math.sqrt(len(a)) if flag(config, "use_rslora") else len(a)))
            padding = (0, rank - len(a))
            b_parts.append(torch.nn.functional.pad(cut_rows(scaled, part, self._shard), padding).to(self._dtype))
            own_a = a.narrow(1, columns.start, len(columns))
            a_parts.append(torch.nn.functional.pad(own_a, (0, 0, *padding)).to(self._dtype))
        return SiteAdapter(torch.cat(a_parts), tuple(b_parts))


def _module_of(part: Part) -> str:
    """ "layers.0.self_attn.q_proj" """
    name = part.weight.removesuffix(".weight")
    return name[name.index("layers.") :]


def find_alphas(config: Json, modules: Collection[str]) -> dict[str, float]:
    """Each module |-> its alpha: B is multiplied by alpha / rank. Patterns match as in PEFT."""
    patterns, deadline = collection(config, "alpha_pattern", dict), time.monotonic() + MATCH_S
    alphas = dict.fromkeys(modules, number(config, "lora_alpha", 8))
    for module in modules:
        for pattern, own in patterns.items():
            left_s = max(deadline - time.monotonic(), 1e-3)
            try:
                found = regex.match(rf"(.*\.)?({pattern})$", module, timeout=left_s, concurrent=True)
            except TimeoutError as error:
                raise ValueError(f"alpha_pattern {pattern!r:.80} takes more than {MATCH_S:g} s to match") from error
            if found:
                alphas[module] = number({"alpha_pattern": own}, "alpha_pattern")
                break
    return alphas


def _read_config(folder: Path) -> Json:
    """ValueError names the first setting that would be computed differently."""
    check_access(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"adapter folder {str(folder)!r} does not exist")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} has no {name}: a folder that PEFT's save_pretrained wrote is expected")
    check_file(folder / WEIGHTS, MOST_FILE_BYTES)
    config = read_json_object(folder / CONFIG)
    with named(folder / CONFIG):
        for problem in _find_problems(config):
            raise ValueError(f"has {problem}, which Baton does not support")
        integer(config, "r", 8)
        number(config, "lora_alpha", 8)
        flag(config, "use_rslora")
    return config


def _find_problems(config: Json) -> Iterator[str]:
    for key, supported in CHECKED.items():
        if config.get(key) not in supported:
            yield f"{key} {config.get(key)!r}"
    for key, value in config.items():
        if key not in IGNORED and key not in CHECKED and value:
            yield f"{key} {value!r}"
    for pattern, own in collection(config, "alpha_pattern", dict).items():
        number({"alpha_pattern": own}, "alpha_pattern")
        if len(pattern) > MOST_PATTERN_CHARS or "{" in pattern:  # of which copies are made
            yield f"alpha_pattern {pattern!r:.80}"
        try:
            regex.compile(pattern)
        except regex.error:
            yield f"alpha_pattern {pattern!r:.80}"
