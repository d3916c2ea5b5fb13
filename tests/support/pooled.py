"""Vectors of texts by an engine without a service, and by transformers alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from engine.batch import ForwardRow
from engine.compose import FullEngine, build_engine
from engine.engine import Place
from wire.sampling import SamplingParams

Floats = NDArray[np.float32]
PAGE_TOKENS, PAGES = 16, 64


def open_engine(folder: Path, dtype: str = "float32", quantization: Any = "none") -> FullEngine:
    def size_pool(*_: object) -> tuple[int, int]:
        return PAGES, 0

    return build_engine(
        str(folder), "", dtype, "cpu", 2, PAGE_TOKENS, 8, size_pool, lambda done, total: None, place=Place(lends=False),
        quantization=quantization,
    )  # fmt: skip


def embed(engine: FullEngine, texts: Sequence[Sequence[int]], chunk: int = 0) -> list[Floats]:
    """All texts in one step; chunk: in steps of so many tokens of each."""
    assert engine.pooled is not None
    pages = iter(range(PAGES))
    for row, ids in enumerate(texts):
        engine.rows.open(row, np.array(ids, np.int32), SamplingParams(temperature=0), len(ids))
        engine.rows.write_pages(row, 0, [next(pages) for _ in range(len(ids) // PAGE_TOKENS + 1)])
    found: dict[int, Floats] = {}
    longest = max(map(len, texts))
    for begin in range(0, longest, chunk or longest):
        asked = []
        for row, ids in enumerate(texts):
            count = min(chunk or longest, len(ids) - begin)
            if count > 0:
                asked.append(ForwardRow(row, begin, count, num_logits=int(begin + count == len(ids))))
        engine.runner.launch(asked).collect()
        for one in asked:
            if one.num_logits and (vector := engine.pooled.take(one.row)) is not None:
                found[one.row] = vector
    for row in range(len(texts)):
        engine.rows.close(row)
    return [found[row] for row in range(len(texts))]


def cosine(one: Any, other: Any) -> float:
    a, b = (np.asarray(given, np.float64).ravel() for given in (one, other))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@torch.inference_mode()
def hidden_of(model: Any, ids: Sequence[int], **given: Any) -> torch.Tensor:
    """[T, H] of one text by transformers alone."""
    rows: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), **given).last_hidden_state[0]
    return rows


SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "dim": 64, "intermediate_size": 96, "hidden_dim": 96, "num_hidden_layers": 2,
    "n_layers": 2, "num_attention_heads": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 130, "pad_token_id": 1, "cls_token_id": 0, "bos_token_id": 0, "sep_token_id": 2,
    "eos_token_id": 2, "tie_word_embeddings": True, "use_bidirectional_attention": True, "sliding_window": 8,
    "local_attention": 16,
}  # fmt: skip


def write_pooled(
    folder: Path, kind: str, model: str, pool: str | None = None, dense: Sequence[str] = (), normalizes: bool = False,
    **given: Any,
) -> Any:  # fmt: skip
    """A tiny checkpoint with sentence-transformers' files if it has a `pool`. Returns transformers' model.

    kind: the model_type; model: its class in transformers; dense: activations of products behind it.
    """
    default = CONFIG_MAPPING[kind]()
    known = {*default.to_dict(), *default.attribute_map}
    config = CONFIG_MAPPING[kind](**{**{name: value for name, value in SMALL.items() if name in known}, **given})
    torch.manual_seed(0)
    built = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    built.save_pretrained(folder)
    modules = [("Transformer", "")]
    if pool:
        modules.append(("Pooling", "1_Pooling"))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pool}": True}))
    for number, activation in enumerate(dense, 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"activation_function": f"torch.nn.modules.{activation}"}))
        tensors = {"linear.weight": torch.randn(48 if number == 2 else 32, 64 if number == 2 else 48)}
        save_file(tensors | ({"linear.bias": torch.randn(48)} if number == 2 else {}), place / "model.safetensors")
        modules.append(("Dense", place.name))
    modules += [("Normalize", "9_Normalize")] if normalizes else []
    if pool:
        listed = [{"idx": at, "path": path, "type": f"sentence_transformers.models.{name}"}
                  for at, (name, path) in enumerate(modules)]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(listed))
    return built
