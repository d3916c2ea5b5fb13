"""The quality cost of rounding: perplexity, and how often the likeliest token is still float32's.

    python -m bench.perplexity --model smollm2 --count 50

Of the demo model on held-out dialogues; of other models on float32's own greedy answers. With a quantised checkpoint
float32 is its exact dequantisation, and "none" its own codes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from demo.evaluate import held_out_cases
from demo.tokens import render
from engine.compose import choose_for_layers, load_model
from engine.kv.pool import PoolShape
from engine.layers.linear import Quantization
from engine.llm import LLM
from engine.models.decoder import Decoder
from runtime.config_parts import DEMO_MODEL
from tests.support.batches import Part, pack
from worker.startup.models import locate_model

CPU = torch.device("cpu")
PAGE_TOKENS = 16
WAYS: tuple[tuple[str, Quantization], ...] = (
    ("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("bfloat16", "fp8"),
)  # fmt: skip
SUBJECTS = [
    "the sea",
    "winter",
    "bread",
    "the moon",
    "a library",
    "honey bees",
    "old maps",
    "glass",
    "a violin",
    "coffee",
]
FORMS = (
    "What is {}?", "Write one sentence about {}.", "Tell me a short story about {}.",
    "Name three things that go with {}.", "Why do people like {}?",
)  # fmt: skip

app = App(help=__doc__)


class Document(NamedTuple):
    token_ids: list[int]
    begin: int  # of what is scored


def read_dialogues(folder: Path, count: int) -> list[Document]:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts = [render(case.dialogue) for case in held_out_cases(1, count)]
    return [Document(tokenizer(text, add_special_tokens=False)["input_ids"], 1) for text in texts]


def ask_questions(folder: Path, count: int, num_tokens: int) -> list[Document]:
    """Float32's answers."""
    model = LLM(str(folder), dtype="float32")
    prompts = []
    for question in [form.format(subject) for subject in SUBJECTS for form in FORMS][:count]:
        told = [{"role": "user", "content": question}]
        text = model.tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        prompts.append(model.tokenizer.encode(text, add_special_tokens=False))
    answers = (
        model.tokenizer.encode(one, add_special_tokens=False) for one in model.generate(prompts, max_tokens=num_tokens)
    )
    return [
        Document([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True) if answer
    ]


def score(decoder: Decoder, document: Document) -> tuple[float, Tensor]:
    """Sum of the negative log-likelihoods of what is scored, and the likeliest token at each place of it."""
    ids, config = document.token_ids, decoder.config
    num_pages, num_scored = -(-len(ids) // PAGE_TOKENS), len(ids) - document.begin
    shape = PoolShape(num_pages, config.kv_parts, PAGE_TOKENS, decoder.dtype)
    batch = pack([Part(ids[:-1], 0, list(range(num_pages)), num_scored)], PAGE_TOKENS, CPU)
    attention = choose_for_layers(
        config.attention_shapes, config.windows, PAGE_TOKENS, CPU, decoder.dtype, has_sinks=config.has_sinks
    ).backend
    pool = torch.zeros(shape.sizes, dtype=decoder.dtype)
    logits = decoder.logits(decoder.forward(batch, pool, attention)).float()
    loss = functional.cross_entropy(logits, torch.tensor(ids[document.begin :]), reduction="sum")
    return loss.item(), logits.argmax(-1)


def compare(folder: Path, documents: Sequence[Document]) -> Table:
    num_tokens = sum(len(ids) - begin for ids, begin in documents)
    table = Table("", "perplexity", "float32's token, %", title=f"{len(documents)} documents, {num_tokens} tokens")
    truth = torch.empty(0)
    for dtype, quantization in WAYS:
        decoder = load_model(folder, dtype, CPU, quantization=quantization)
        losses, likeliest = zip(*(score(decoder, one) for one in documents), strict=True)
        chosen = torch.cat(likeliest)
        truth = chosen if dtype == "float32" else truth
        same = f"{100 * (chosen == truth).double().mean().item():.2f}"
        name = dtype if quantization == "none" else quantization
        table.add_row(name, f"{torch.tensor(sum(losses) / num_tokens).exp().item():.4f}", same)
    return table


@app.default
def run(
    *,
    model: Annotated[str, Parameter(help="as of `baton serve`")] = DEMO_MODEL,
    count: Annotated[int, Parameter(help="of documents")] = 200,
    tokens: Annotated[int, Parameter(help="of each answer")] = 40,
) -> None:
    """Print the table."""
    folder = Path(locate_model(model))
    documents = read_dialogues(folder, count) if model == DEMO_MODEL else ask_questions(folder, count, tokens)
    Console().print(compare(folder, documents))


if __name__ == "__main__":
    app()
