"""A model in one process, without a service: `LLM(path).generate(prompts)`. The file to step through first.

A worker does the same with a table of sequences, a prefix cache and prompts in chunks beside answers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoTokenizer

from engine.batch import ForwardRow, take_turns
from engine.compose import build_engine
from engine.engine import Place
from wire.files import blamed_tokenizer, read_json_object
from wire.sampling import SamplingParams

POOL_BYTES = 4 << 30  # at most, for KV
GREEDY = SamplingParams(temperature=0)


@dataclass(slots=True, eq=False)
class Running:
    """A prompt and its answer. Has a row of the engine and pages from `_start` to `_end`."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    row: int = -1
    pages: list[int] = field(default_factory=list)

    def ask(self) -> ForwardRow:
        """A forward over what has no KV yet: the prompt, later the last token. It samples the next token."""
        num_tokens = len(self.prompt) + len(self.answer)
        begin = num_tokens - 1 if self.answer else 0
        source, target = take_turns(self.row, len(self.answer))
        return ForwardRow(self.row, begin, num_tokens - begin, num_logits=1, state_from=source, state_to=target)


class LLM:
    """Owns an engine. One caller at a time."""

    def __init__(
        self, model: str, *, dtype: str = "auto", device: str = "auto", context_tokens: int = 0,
        max_running: int = 16, page_tokens: int = 16,
    ) -> None:  # fmt: skip
        """model: a folder or hub id. context_tokens: of a prompt with its answer; 0: the model's own.

        FileNotFoundError or ValueError say what is wrong with the model or the device.
        """

        def size_pool(context: int, page_bytes: int, *_: object) -> tuple[int, int]:
            most = max_running * -(-min(context, context_tokens or context) // page_tokens)
            return max(min(most, POOL_BYTES // page_bytes), 1), 2 * max_running  # slots: see `take_turns`

        self.engine = build_engine(
            model, "", dtype, device, torch.get_num_threads(), page_tokens, max_running, size_pool,
            lambda done, total: None, context_tokens, place=Place(lends=False),
        )  # fmt: skip
        folder = self.engine.folder
        with blamed_tokenizer(folder):
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._page_tokens = page_tokens
        self._free_pages, self._free_rows = list(range(self.engine.num_pages)), list(range(max_running))
        ends = {self.tokenizer.eos_token_id}
        if (path := folder / "generation_config.json").exists():
            more = read_json_object(path).get("eos_token_id")
            ends |= {one for one in (more if isinstance(more, list) else [more]) if isinstance(one, int)}
        self._ends = ends - {None}

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams = GREEDY, max_tokens: int = 128
    ) -> list[str]:
        """The answers, in order. A prompt is text or token ids. ValueError if one is empty or too long."""
        answers = self.generate_ids(prompts, sampling, max_tokens)
        return [str(self.tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]

    def generate_ids(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams, max_tokens: int
    ) -> list[list[int]]:
        """As `generate`, but token ids, with the one that ended an answer."""
        all_ = [Running(self._tokenise(prompt, max_tokens)) for prompt in prompts]
        waiting, running = deque(all_), list[Running]()
        while waiting or running:
            while waiting and self._start(waiting[0], sampling, max_tokens):
                running.append(waiting.popleft())
            tokens = self.engine.runner.launch([one.ask() for one in running]).collect().tokens
            for one, token in zip(running, tokens, strict=True):
                one.answer.append(token)
                if token in self._ends or len(one.answer) == max_tokens:
                    self._end(one)
            running = [one for one in running if one.row >= 0]
        return [one.answer for one in all_]

    def _tokenise(self, prompt: str | Sequence[int], max_tokens: int) -> list[int]:
        ids = list(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        most = min(self.engine.rows.context_tokens, self.engine.num_pages * self._page_tokens)
        if not ids or len(ids) + max_tokens > most:
            raise ValueError(f"a prompt of {len(ids)} tokens and {max_tokens} of the answer: expected 2 to {most}")
        return ids

    def _start(self, one: Running, sampling: SamplingParams, max_tokens: int) -> bool:
        """Give it a row, and pages for its whole answer. False: there are not enough now."""
        num_pages = -(-(len(one.prompt) + max_tokens) // self._page_tokens)
        if not self._free_rows or len(self._free_pages) < num_pages:
            return False
        one.row, one.pages = self._free_rows.pop(), [self._free_pages.pop() for _ in range(num_pages)]
        self.engine.rows.open(one.row, np.array(one.prompt, np.int32), sampling, len(one.prompt))
        self.engine.rows.write_pages(one.row, 0, one.pages)
        return True

    def _end(self, one: Running) -> None:
        self.engine.rows.close(one.row)
        self._free_rows.append(one.row)
        self._free_pages += one.pages
        one.row = -1
