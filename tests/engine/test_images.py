"""Every family that takes images, over pages in chunks, against transformers' own generation on tiny checkpoints."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from engine.attention.choose import choose_for_layers
from engine.batch import ForwardRow
from engine.image_rows import Encoding, ImageRules
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.models.load import load_model
from engine.runner import Runner
from engine.vision import VisionTower, load_tower
from tests.support.checkpoints_vision import VISIONS, write_vlm_checkpoint
from tests.support.families import FAMILIES, IMAGE
from wire.images import ImageSpan
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
PAGE_TOKENS, NUM_PAGES, NUM_NEW = 8, 40, 6
GREEDY = SamplingParams(temperature=0.0)
SINGLE_SIZE = ("mistral3", "pixtral")  # transformers pads images of different sizes
OTHER = 263  # a token among those of an image


def draw(seed: int, width: int, height: int) -> bytes:
    """A PNG."""
    file = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@dataclass
class Case:
    """A prompt with two images, and what transformers answers."""

    folder: Path
    tower: VisionTower
    token_ids: list[int]
    images: list[tuple[ImageSpan, Encoding]]
    tokens: list[int]
    logprobs: Tensor  # [NUM_NEW] of these tokens


@pytest.fixture(scope="module", params=VISIONS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build_case(request.param, tmp_path_factory.mktemp("model"))


def build_case(family: str, folder: Path) -> Case:
    write_vlm_checkpoint(folder, family)
    tower = load_tower(folder, torch.float32, CPU)
    assert tower is not None
    pixels = [tower.read(draw(0, 56, 40)), tower.read(draw(1, *((56, 40) if family in SINGLE_SIZE else (40, 48))))]
    encodings = tower.encode(pixels)
    dice = np.random.default_rng(5)
    ids: list[int] = dice.integers(2, 260, 11).tolist()
    images = []
    for seed, (inputs, encoding) in enumerate(zip(pixels, encodings, strict=True)):
        own = spell(family, len(encoding.rows))
        grid = inputs["image_grid_thw"][0, 1:].tolist() if "image_grid_thw" in inputs else [0, 0]
        span = ImageSpan(len(ids), len(ids) + len(own), bytes([seed]) * 32, *(side // 2 for side in grid))
        images.append((span, encoding))
        ids += own + dice.integers(2, 260, 9).tolist()
    joined = {
        name: torch.cat([one[name] for one in pixels], 1 if "pixel_attention_mask" in pixels[0] else 0)
        for name in pixels[0]
    }
    tokens, logits = generate(family, folder, ids, joined)
    return Case(folder, tower, ids, images, tokens, logits.log_softmax(-1)[range(NUM_NEW), tokens])


def spell(family: str, count: int) -> list[int]:
    """The tokens of an image; others are among them where the model neither counts rows nor sees images as wholes."""
    if family.startswith(("qwen", "gemma")):
        return [IMAGE] * count
    return [token for at in range(count) for token in ([OTHER, IMAGE] if at and at % 4 == 0 else [IMAGE])]


def generate(family: str, folder: Path, ids: Sequence[int], pixels: dict[str, Tensor]) -> tuple[list[int], Tensor]:
    """By transformers alone |-> tokens, logits [NUM_NEW, V]"""
    model_class: Any = getattr(transformers, FAMILIES[family].model)
    model = model_class.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([ids])
    kinds = {"mm_token_type_ids", "token_type_ids"} & set(inspect.signature(model.forward).parameters)
    found = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), **pixels, max_new_tokens=NUM_NEW, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **dict.fromkeys(kinds, (prompt == IMAGE).long()),
    )  # fmt: skip
    return found.sequences[0, len(ids) :].tolist(), torch.cat(found.logits)


class Ours:
    """A model over pages; the case's prompt is in row 1, a text without images in row 0."""

    def __init__(self, case: Case) -> None:
        self.decoder = load_model(case.folder, "float32", CPU)
        config = self.decoder.config
        self.config, self.case = config, case
        self.rows = InputBatch(2, PAGE_TOKENS * NUM_PAGES, PAGE_TOKENS, config.vocab_size, CPU)
        assert config.image_token is not None
        self.rows.image_rules = ImageRules(config.image_token, config.image_attention)
        shape = PoolShape(2 * NUM_PAGES + 1, config.kv_parts, PAGE_TOKENS, torch.float32)
        attention = choose_for_layers(config.attention_shapes, config.windows, PAGE_TOKENS, CPU, torch.float32).backend
        self.runner = Runner(self.decoder, attention, torch.zeros(shape.sizes), self.rows)
        self.text = np.arange(5, 42, dtype=np.int32)
        self.open(0, self.text, ())
        self.open(1, np.array(case.token_ids, np.int32), case.images)

    def open(self, row: int, ids: Any, images: Sequence[tuple[ImageSpan, Encoding | None]]) -> None:
        self.rows.open(row, ids, GREEDY, len(ids), images=images)
        self.rows.write_pages(row, 0, range(row * NUM_PAGES, (row + 1) * NUM_PAGES))

    def prefill(self, ends: Sequence[int]) -> tuple[int, float]:
        """The prompt in chunks up to each end, beside the text |-> the first token, its log-probability."""
        begin = 0
        for at, end in enumerate(ends):
            is_last = end == len(self.case.token_ids)
            own = ForwardRow(1, begin, end - begin, int(is_last), chosen_logprobs=0 if is_last else None)
            beside = ForwardRow(0, 2 * at, 2)
            output = self.runner.launch([beside, own] if at % 2 else [own, beside]).collect()
            begin = end
        assert output.logprobs[0] is not None
        return output.tokens[0], output.logprobs[0].logprob

    def decode(self, position: int) -> tuple[int, float]:
        output = self.runner.launch([ForwardRow(1, position, 1, 1, chosen_logprobs=0)]).collect()
        assert output.logprobs[0] is not None
        return output.tokens[0], output.logprobs[0].logprob


def cut(case: Case, sees_whole_images: bool) -> list[int]:
    """Ends of chunks: each image is cut twice, or not at all."""
    ends = [4]
    for span, _ in case.images:
        third = (span.end - span.begin) // 3
        inside = [] if sees_whole_images else [span.begin + third, span.end - third]
        ends += [span.begin - 1, *inside, span.end + 1]
    return [*ends, len(case.token_ids)]


def test_tokens_are_those_of_transformers(case: Case) -> None:
    ours = Ours(case)
    num_prompt = len(case.token_ids)
    found = [ours.prefill(cut(case, ours.config.sees_whole_images))]
    found += [ours.decode(position) for position in range(num_prompt, num_prompt + NUM_NEW - 1)]
    tokens, logprobs = zip(*found, strict=True)
    assert list(tokens) == case.tokens
    torch.testing.assert_close(torch.tensor(logprobs), case.logprobs, rtol=1e-4, atol=2e-3)
