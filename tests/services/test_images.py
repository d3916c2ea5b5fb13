"""Images through the whole service: greedy float32 tokens equal transformers', whoever computes and whoever dies."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from gateway.images.families import find_family
from gateway.images.processor_process import load_processor
from tests.support.checkpoints_vision import VISIONS, leave_out_torchvision, write_vlm_checkpoint
from tests.support.command_line import run
from tests.support.families import IMAGE
from tests.support.live import WAIT_S, Live, serve_calmly, wait_until
from tests.support.vision import data_uri, picture

COUNT, LONG = 10, 200  # tokens of an answer, and of one that a worker does not live to end
# M-RoPE with deepstack; TEST_FAMILIES=1: all (`make families`)
SMALL = "--kv-memory-mib=1"  # one context fits
WAYS: dict[str, tuple[str, ...]] = {"qwen3_vl": ("--decode-tp=2", SMALL)}
if os.environ.get("TEST_FAMILIES") == "1":
    WAYS = dict.fromkeys(VISIONS, ())
elif os.environ.get("TEST_FAMILIES") == "tp":
    WAYS = dict.fromkeys(VISIONS, ("--prefill-tp=2", "--decode-tp=2"))


def noise(seed: int, width: int, height: int) -> bytes:
    """A PNG."""
    file = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


class Answer(NamedTuple):
    """Of a chat."""

    tokens: list[int]
    cached: int


class Oracle:
    """transformers, from messages on."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        leave_out_torchvision()
        (architecture,) = config["architectures"]
        self._model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = load_processor(folder, find_family(config) or "")

    def answer(self, parts: Sequence[str | bytes], guess: Sequence[int]) -> list[int]:
        """As many tokens as are guessed, which are checked by one step."""
        content = [{"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in parts]
        text = self._processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = [Image.open(BytesIO(part)).convert("RGB") for part in parts if isinstance(part, bytes)]
        given = self._processor(images=[images], text=[text], return_tensors="pt", add_special_tokens=False)
        if self._chooses(given, guess):
            return list(guess)
        found = self._model.generate(
            **given, max_new_tokens=len(guess), do_sample=False, eos_token_id=None, pad_token_id=0,
            suppress_tokens=[IMAGE],
        )  # fmt: skip
        tokens: list[int] = found[0, given["input_ids"].shape[1] :].tolist()
        return tokens

    @torch.no_grad()
    def _chooses(self, given: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> bool:
        """True if each token is the likeliest after those before it, which are all text."""
        size = given["input_ids"].shape
        rests = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens), dtype=torch.long)}
        text = torch.zeros(1, len(tokens), dtype=torch.long)  # the type of its tokens
        whole = {
            name: torch.cat([values, rests.get(name, text).to(values.dtype)], 1) if values.shape == size else values
            for name, values in given.items()
        }
        logits = self._model(**whole, use_cache=False).logits[0, size[1] - 1 : -1]
        logits[:, IMAGE] = -torch.inf
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen == list(tokens)


class Service(NamedTuple):
    """One model, and what transformers answers."""

    live: Live
    oracle: Oracle
    is_small: bool

    def ask(self, *parts: str | bytes, count: int = COUNT, begun: threading.Event | None = None) -> Answer:
        """Whose tokens are the right ones. begun: set after the first ones."""
        content = [
            {"type": "image_url", "image_url": {"url": data_uri(part)}} if isinstance(part, bytes)
            else {"type": "text", "text": part}
            for part in parts
        ]  # fmt: skip
        body = {
            "model": "x", "messages": [{"role": "user", "content": content}], "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
            "logit_bias": {IMAGE: -100},
        }  # fmt: skip
        tokens, cached = list[int](), -1
        url = f"{self.live.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as answered:
            for line in answered.iter_lines():
                assert answered.status_code == 200 and "error" not in line, line
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                if tokens and begun is not None:
                    begun.set()
                if (usage := event.get("usage")) is not None:
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert len(tokens) == count and tokens == self.oracle.answer(parts, tokens)
        return Answer(tokens, cached)

    def ask_all(self, prompts: Sequence[Sequence[str | bytes]], count: int = COUNT) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda parts: self.ask(*parts, count=count), prompts))

    def num_encoded(self) -> float:
        return sum(self.live.metric(role, "images_encoded_total") for role in ("prefill-0", "decode-0"))


@pytest.fixture(scope="module", params=WAYS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_vlm_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    flags = (
        "--dtype=float32", "--page-tokens=8", "--chunk-tokens=16", "--draft-model=none", "--served-name=x",
        "--max-context-tokens=600", *WAYS[request.param],
    )  # fmt: skip
    with serve_calmly(model, *flags) as live:
        yield Service(live, Oracle(model), SMALL in WAYS[request.param])
        live.wait_until_unused()


def test_answers_about_several_images_are_those_of_transformers(service: Service) -> None:
    first, second = noise(1, 56, 40), noise(2, 40, 56)
    parts = ("What is ", first, "this, and ", second, " that?")
    asked = service.ask(*parts)
    num_encoded = service.num_encoded()
    assert num_encoded == 2
    again = service.ask(*parts)
    assert again.tokens == asked.tokens and again.cached > asked.cached
    service.ask("Once more: ", second, first, "?")  # their encodings are still there
    assert service.num_encoded() == num_encoded
    service.ask_all([(noise(seed, 56, 40), f"and {seed}", noise(seed + 10, 40, 40), "?") for seed in range(3, 8)])


def test_equal_texts_with_other_images_share_no_kv(service: Service) -> None:
    """On warm caches of both roles."""
    red, blue = picture("red", (56, 40)), picture("blue", (56, 40))
    lead = "This text comes before all images, and is shared by all of them. "
    answers = {name: service.ask(lead, file, " Which colour?") for name, file in (("red", red), ("blue", blue))}
    assert answers["red"].tokens != answers["blue"].tokens
    for name, file in (("red", red), ("blue", blue)):
        again = service.ask(lead, file, " Which colour?")
        assert again.tokens == answers[name].tokens and again.cached > len(lead) > answers["blue"].cached - 16


def test_answers_that_have_to_make_room(service: Service) -> None:
    """A decode worker has neither the images nor their encodings: others compute the prompt again."""
    num_preempted = 0.0
    for first in range(100, 200, 20):  # a busy machine may answer the first ones one after the other
        service.ask_all([(f"{seed} is ", noise(seed, 56, 40), "?") for seed in range(first, first + 5)], count=150)
        num_preempted = service.live.metric("decode-0", "num_preemptions_total")
        if num_preempted or not service.is_small:
            break
    assert num_preempted or not service.is_small


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_worker_dies_in_mid_answer(service: Service, name: str) -> None:
    if not service.is_small:
        pytest.skip("starts take long, and the models do not differ in this")
    seed, begun = 30 + len(name), threading.Event()
    pid = service.live.find(name)["pid"]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(service.ask, "First ", noise(seed, 56, 40), "?", count=LONG, begun=begun)
        assert begun.wait(WAIT_S)
        second = pool.submit(service.ask, "Second ", noise(seed + 1, 56, 40), noise(seed + 2, 40, 56), "?")
        service.live.send(name, signal.SIGKILL)
        first.result()
        second.result()
    if name == "prefill-0":  # until it is back, decode workers compute prompts by themselves
        wait_until(lambda: not service.live.is_alive(name) or service.live.find(name)["pid"] != pid)
        service.ask("Third ", noise(seed + 3, 40, 56), "?")
    service.live.wait_until_whole()
    service.ask("Fourth ", noise(seed + 4, 56, 40), "?")


@pytest.mark.nightly
def test_stutter_beside_images_is_measured(service: Service, tmp_path: Path) -> None:
    """The second half of each round has texts of as many tokens."""
    if not service.is_small:
        pytest.skip("once is enough")
    saved = tmp_path / "figures.json"
    flags = (
        "--images=2", "--image-size=56", "--streams=1", "--prompts=1", "--stream-tokens=300", "--quiet-chunks=4",
        "--rounds=2",
    )  # fmt: skip
    done = run("bench", "interference", f"--url={service.live.url}", *flags, f"--save={saved}")
    assert "medians of rounds: p99 " in done.stdout, done.stdout + done.stderr
    figures = json.loads(saved.read_text())
    assert len(figures["p99_by_text"]) == len(figures["max_by_text"]) == 2
    lengths = figures["long_input_lens"]
    assert lengths[0] == lengths[1] > 2 * 16
    assert figures["text"]["long_input_lens"] == pytest.approx(lengths, rel=0.2)  # words, where ids are not known
