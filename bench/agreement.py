"""How often a model whose weights or products are rounded chooses the token that float32 chooses.

    python -m bench.agreement --model smollm2

float32 answers questions greedily. Each contender then reads the same prompts and answers, and its choice at every
position of an answer is compared; perplexity is that of the answers. With the checkpoint's own codes float32 is their
exact dequantisation.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.batches import Part, pack
from cli.models import locate_model
from engine.attention.choose import choose_for_layers
from engine.kv.pool import PoolShape
from engine.layers.linear import Quantization
from engine.llm import LLM
from engine.models.load import load_model

CPU = torch.device("cpu")
PAGE_TOKENS = 16
CONTENDERS: dict[str, tuple[str, Quantization]] = {
    "bfloat16 or the file's bits": ("bfloat16", "none"), "int8": ("auto", "int8"), "int4": ("auto", "int4"),
}  # fmt: skip
SUBJECTS = (
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
)
FORMS = (
    "What is {}?", "Write one sentence about {}.", "Tell me a short story about {}.", "Name three things that go with {}.",
    "Why do people like {}?",
)  # fmt: skip

app = App(help=__doc__)


def ask(model: LLM, num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Each question's prompt and float32's answer."""
    prompts = []
    for subject in SUBJECTS:
        for form in FORMS:
            told = [{"role": "user", "content": form.format(subject)}]
            text = model.tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
            prompts.append(model.tokenizer.encode(text, add_special_tokens=False))
    answers = model.generate(prompts, max_tokens=num_tokens)
    ids = [model.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    return [(prompt, answer) for prompt, answer in zip(prompts, ids, strict=True) if answer]


def read(
    folder: Path, dtype: str, quantization: Quantization, asked: Sequence[tuple[list[int], list[int]]]
) -> list[Tensor]:
    """Of each answer's positions: log-probabilities [n, V]."""
    decoder = load_model(folder, dtype, CPU, quantization=quantization)
    config = decoder.config
    longest = max(len(prompt) + len(answer) for prompt, answer in asked)
    num_pages = -(-longest // PAGE_TOKENS)
    shape = PoolShape(num_pages, config.kv_parts, PAGE_TOKENS, decoder.dtype)
    attention = choose_for_layers(
        config.attention_shapes, config.windows, PAGE_TOKENS, CPU, decoder.dtype, has_sinks=config.has_sinks
    ).backend
    pool = torch.zeros(shape.sizes, dtype=shape.dtype)
    found = []
    for prompt, answer in asked:
        tokens = [*prompt, *answer[:-1]]
        batch = pack([Part(tokens, 0, list(range(num_pages)), len(answer))], PAGE_TOKENS, CPU)
        found.append(decoder.logits(decoder.forward(batch, pool, attention)).float().log_softmax(-1))
    return found


@app.default
def compare(
    *,
    model: Annotated[str, Parameter(help="as of `baton serve`")] = "smollm2",
    tokens: Annotated[int, Parameter(help="of each answer")] = 40,
) -> None:
    """Print the table."""
    folder = Path(locate_model(model))
    asked = ask(LLM(str(folder), dtype="float32"), tokens)
    truth = read(folder, "float32", "none", asked)
    chosen = [logprobs.argmax(-1) for logprobs in truth]
    total = sum(map(len, chosen))
    table = Table("", "same token, %", "perplexity", title=f"{model}: {len(asked)} answers, {total} tokens")
    contenders = {"float32": truth} | {name: read(folder, *how, asked) for name, how in CONTENDERS.items()}
    for name, found in contenders.items():
        same = sum(int((own.argmax(-1) == right).sum()) for own, right in zip(found, chosen, strict=True))
        losses = [
            -logprobs.gather(1, torch.tensor(answer)[:, None]).sum()
            for logprobs, (_, answer) in zip(found, asked, strict=True)
        ]
        table.add_row(name, f"{100 * same / total:.1f}", f"{(sum(losses) / total).exp():.3f}")  # type: ignore[union-attr]
    Console().print(table)


if __name__ == "__main__":
    app()
