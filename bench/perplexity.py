"""The quality cost of quantisation: perplexity of held-out demo dialogues, and how often the likeliest token changes.

python -m bench.perplexity --count 200
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from bench.batches import Part, pack
from demo.evaluate import held_out_cases
from demo.paths import TARGET_DIR
from demo.tokens import render
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.kv.pool import PoolShape
from engine.layers.linear import Quantization
from engine.models.decoder import Decoder
from engine.models.load import load_model

CPU = torch.device("cpu")
PAGE_TOKENS = 16
WAYS: tuple[tuple[str, str, Quantization], ...] = (
    ("float32", "float32", "none"), ("bfloat16", "bfloat16", "none"), ("int8", "bfloat16", "int8"),
    ("fp8", "bfloat16", "fp8"),
)  # fmt: skip


def score(decoder: Decoder, ids: list[int]) -> tuple[float, Tensor]:
    """Sum of negative log-likelihoods of ids[1:], and the likeliest token after each."""
    config, num_pages = decoder.config, -(-len(ids) // PAGE_TOKENS)
    shape = PoolShape(num_pages, config.kv_parts, PAGE_TOKENS, decoder.dtype)
    batch = pack([Part(ids, 0, list(range(num_pages)), len(ids))], PAGE_TOKENS, CPU)
    pool = torch.zeros(shape.sizes, dtype=decoder.dtype)
    logits = decoder.logits(decoder.forward(batch, pool, TorchSdpaAttention(config.attention_shapes[0])))
    return functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum").item(), logits.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    texts = [render(case.dialogue) for case in held_out_cases(options.seed, options.count)]
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    num_tokens = sum(len(ids) - 1 for ids in documents)
    found = {}
    for name, dtype, quantization in WAYS:
        decoder = load_model(TARGET_DIR, dtype, CPU, quantization=quantization)
        scores = [score(decoder, ids) for ids in documents]
        found[name] = sum(loss for loss, _ in scores) / num_tokens, torch.cat([likeliest for _, likeliest in scores])
    print(f"{len(documents)} dialogues, {num_tokens} tokens")
    truth = found["float32"][1]
    for name, (loss, likeliest) in found.items():
        changed = (likeliest != truth).double().mean().item()
        perplexity = torch.tensor(loss).exp().item()
        print(f"{name}: perplexity {perplexity:.4f}, another likeliest token at {100 * changed:.2f} % of places")


if __name__ == "__main__":
    main()
