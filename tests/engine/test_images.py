"""Every family that takes images, over pages in chunks, against transformers' own generation on tiny checkpoints."""

import inspect
import json
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.attention.choose import reference_attention
from engine.batch import ForwardRow, take_turns
from engine.compose import FullEngine, build_engine, choose_for_layers, load_model
from engine.cuda.captured import capture_graphs
from engine.cuda.graph_shapes import choose_shapes
from engine.cuda.graphs import Compute
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.ops.base import HALVES
from engine.prepared import lay_out
from engine.runner import Runner
from engine.vision.attention import WholeImageAttention
from engine.vision.image_rows import Encoding, ImageRows, ImageRules, StepImages, gather
from engine.vision.tower import VisionTower, load_tower
from tests.support.checkpoints_vision import VISIONS, write_vlm_checkpoint
from tests.support.combinations import others
from tests.support.families import FAMILIES, IMAGE
from wire.images import ImageSpan
from wire.sampling import SamplingParams
from worker.ranks.leader import Leader, LedInputBatch, follow
from worker.ranks.links import StepReceiver, StepSender, open_links

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


@pytest.fixture(scope="module", params=others(VISIONS, "qwen3_vl", "gemma3", "pixtral", "llava"))
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

    def __init__(self, case: Case, *, reference: bool = False) -> None:
        self.decoder = load_model(case.folder, "float32", CPU)
        config = self.decoder.config
        self.config, self.case = config, case
        self.rows = InputBatch(2, PAGE_TOKENS * NUM_PAGES, PAGE_TOKENS, config.vocab_size, CPU)
        assert config.image_token is not None
        self.rows.images = ImageRows(ImageRules(config.image_token, config.image_attention, config.counts_rows))
        self.sees_whole = self.rows.images.rules.sees_whole
        shape = PoolShape(2 * NUM_PAGES + 1, config.kv_parts, PAGE_TOKENS, torch.float32)
        shapes = config.attention_shapes
        fast = choose_for_layers(shapes, config.windows, PAGE_TOKENS, CPU, torch.float32).backend
        slow = reference_attention(shapes, PAGE_TOKENS)
        attention = slow if reference else WholeImageAttention(fast, slow)
        if config.state_parts:
            slots = PoolShape(5, config.state_parts, PAGE_TOKENS, torch.float32)
            self.rows.states = slots.split(torch.zeros(slots.num_pages, slots.page_elements))
        self.num_steps = [0, 0]
        self.runner = Runner(self.decoder, attention, torch.zeros(shape.sizes), self.rows)
        self.text = np.arange(5, 42, dtype=np.int32)
        self.open(0, self.text, ())
        self.open(1, np.array(case.token_ids, np.int32), case.images)

    def open(self, row: int, ids: Any, images: Sequence[tuple[ImageSpan, Encoding | None]]) -> None:
        self.rows.open(row, ids, GREEDY, len(ids), images=images)
        self.rows.write_pages(row, 0, range(row * NUM_PAGES, (row + 1) * NUM_PAGES))

    def ask(self, row: int, begin: int, count: int, num_logits: int) -> ForwardRow:
        source, target = take_turns(row, self.num_steps[row])
        self.num_steps[row] += 1
        logprobs = 0 if num_logits else None
        return ForwardRow(row, begin, count, num_logits, chosen_logprobs=logprobs, state_from=source, state_to=target)

    def prefill(self, ends: Sequence[int]) -> tuple[int, float]:
        """The prompt in chunks up to each end, beside the text |-> the first token, its log-probability."""
        begin = 0
        for at, end in enumerate(ends):
            is_last = end == len(self.case.token_ids)
            own = self.ask(1, begin, end - begin, int(is_last))
            beside = self.ask(0, 2 * at, 2, 0)
            output = self.runner.launch([beside, own] if at % 2 else [own, beside]).collect()
            begin = end
        assert output.logprobs[0] is not None
        return output.tokens[0], output.logprobs[0].logprob

    def decode(self, position: int) -> tuple[int, float]:
        output = self.runner.launch([self.ask(1, position, 1, 1)]).collect()
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
    found = [ours.prefill(cut(case, ours.sees_whole))]
    found += [ours.decode(position) for position in range(num_prompt, num_prompt + NUM_NEW - 1)]
    tokens, logprobs = zip(*found, strict=True)
    assert list(tokens) == case.tokens
    torch.testing.assert_close(torch.tensor(logprobs), case.logprobs, rtol=1e-4, atol=2e-3)


def test_images_together_have_the_rows_that_each_has_alone(case: Case) -> None:
    files = [draw(0, 56, 40), draw(2, 30, 60), draw(3, 56, 40), draw(1, 40, 56)]
    pixels = [case.tower.read(file) for file in files]
    alone = case.tower.encode(pixels)
    case.tower.joins = True
    try:
        together = case.tower.encode(pixels)
    finally:
        case.tower.joins = False
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.rows, other.rows, rtol=1e-4, atol=1e-4)
        assert (one.deep is None) == (other.deep is None)
        if one.deep is not None:
            torch.testing.assert_close(one.deep, other.deep, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_positions_of_drafts_after_images(family: str, has_graphs: bool, tmp_path: Path) -> None:
    """The first of two drafts is right."""
    case = build_case(family, tmp_path)
    ours, replays = Ours(case, reference=True), list[int]()

    def capture(compute: Compute) -> Compute:
        def replay() -> None:
            replays.append(1)
            compute()

        return replay

    if has_graphs:
        capture_graphs(ours.runner, choose_shapes(2, 2, 6), capture, 2 * NUM_PAGES)
    num_prompt, tokens = len(case.token_ids), case.tokens
    assert ours.prefill(cut(case, False))[0] == tokens[0]
    assert not replays
    ours.rows.write_tokens([(1, num_prompt + 1, np.array([tokens[1], (tokens[2] + 1) % 200], np.int32))])
    assert ours.runner.launch([ForwardRow(1, num_prompt, 3, 3)]).collect().tokens[:2] == tokens[1:3]
    assert ours.runner.launch([ForwardRow(1, num_prompt + 2, 1, 1)]).collect().tokens == [tokens[3]]
    assert ours.decode(num_prompt + 3)[0] == tokens[4]
    assert len(replays) == 6 * has_graphs


def test_without_encodings_only_what_needs_none_is_computed(case: Case) -> None:
    ours, num_prompt = Ours(case), len(case.token_ids)
    if ours.config.state_parts:
        pytest.skip("its prompt's last state is not kept")
    ours.prefill(cut(case, ours.sees_whole))
    ours.decode(num_prompt)
    assert isinstance(ours.rows.images, ImageRows)
    assert not ours.rows.images.images[1].encodings  # no step needs them any more
    ours.rows.close(1)
    ours.open(1, np.array(case.token_ids, np.int32), [(span, None) for span, _ in case.images])
    assert ours.decode(num_prompt - 1)[0] == case.tokens[0]  # its KV comes from elsewhere
    ours.rows.close(1)
    ours.open(1, np.array(case.token_ids, np.int32), [(span, None) for span, _ in case.images])
    with pytest.raises(ValueError, match="its encoding is not here"):
        ours.runner.launch([ForwardRow(1, 0, num_prompt, 1)])
    ours.rows.close(1)
    small = [(span, Encoding(own.rows[1:], own.deep)) for span, own in case.images]
    ours.open(1, np.array(case.token_ids, np.int32), small)
    with pytest.raises(ValueError, match=r"an encoding of \d+ rows for an image of \d+ tokens"):
        ours.runner.launch([ForwardRow(1, 0, num_prompt, 1)])


def test_an_image_that_is_seen_as_a_whole_is_computed_in_one_step_or_at_its_end(tmp_path: Path) -> None:
    case = build_case("gemma3", tmp_path)
    ours, span = Ours(case), case.images[0][0]
    with pytest.raises(ValueError, match=f"a step ends at {span.end - 2}, inside an image"):
        ours.runner.launch([ForwardRow(1, 0, span.end - 2)])
    ours.prefill(cut(case, True))
    for begin in (span.begin + 5, span.end):  # what is before is cached
        ours.rows.close(1)
        ours.open(1, np.array(case.token_ids, np.int32), case.images)
        output = ours.runner.launch([ForwardRow(1, begin, len(case.token_ids) - begin, 1)]).collect()
        assert output.tokens == case.tokens[:1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_ranks_get_rows_with_their_images(dtype: torch.dtype, tmp_path: Path) -> None:
    case = build_case("qwen3_vl", tmp_path)
    images = [
        (span, Encoding(own.rows.to(dtype), None if own.deep is None else own.deep.to(dtype)))
        for span, own in case.images
    ]
    ours, (theirs,) = open_links(1)
    leader, sizes = Leader(StepSender(ours)), (2, 200, PAGE_TOKENS, 320, CPU)
    leader.is_leading = True
    led, followed = LedInputBatch(leader, *sizes), InputBatch(*sizes)
    rules = ImageRules(IMAGE, "causal", counts_rows=True)
    led.images, followed.images = ImageRows(rules), ImageRows(rules)
    led.open(1, np.array(case.token_ids, np.int32), GREEDY, len(case.token_ids), images=images)
    leader.send(0, [ForwardRow(1, 0, 1)])
    with pytest.raises(IndexError):  # the list of runners is empty
        follow(StepReceiver(theirs), followed, [])
    assert torch.equal(led.tokens, followed.tokens)
    layouts = [lay_out(rows, [ForwardRow(1, 0, len(case.token_ids))]) for rows in (led, followed)]
    first, second = (gather(own, CPU) for layout in layouts for own in layout.features if isinstance(own, StepImages))
    assert first.deep is not None and second.deep is not None and second.rows.dtype is dtype
    for one, other in ((first.at, second.at), (first.rows, second.rows), (first.deep, second.deep)):
        assert torch.equal(one, other)
    assert layouts[0].rope_positions.ndim == 2
    assert np.array_equal(layouts[0].rope_positions, layouts[1].rope_positions)


def test_older_names_of_weights_and_what_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_case("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): own for name, own in tensors.items()}
    save_file(older, file, metadata={"format": "pt"})
    tower = load_tower(tmp_path, torch.float32, CPU)
    assert tower is not None and tower.num_bytes == case.tower.num_bytes
    pixels = tower.read(draw(0, 56, 40))
    assert torch.equal(tower.encode([pixels])[0].rows, case.images[0][1].rows)
    monkeypatch.setitem(HALVES, torch.bfloat16, lambda: False)  # a CPU without instructions for it
    widened = load_tower(tmp_path, torch.bfloat16, CPU)
    assert widened is not None and torch.equal(widened.encode([pixels])[0].rows, case.images[0][1].rows.bfloat16())
    assert load_model(tmp_path, "float32", CPU).config.image_token == IMAGE
    name = "multi_modal_projector.linear_1.weight"
    save_file({**tensors, name: tensors[name].char()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"stored as I8 .{name}"):
        load_tower(tmp_path, torch.float32, CPU)
    save_file({one: own for one, own in tensors.items() if one != name}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks parts of its vision tower.*{name}"):
        load_tower(tmp_path, torch.float32, CPU)


def test_who_has_a_tower(tmp_path: Path) -> None:
    build_case("smolvlm", tmp_path)
    engine = build_tiny(tmp_path)
    assert engine.vision is not None and engine.why_blind is None
    with pytest.raises(ValueError, match="not an image that the model can read"):
        engine.vision.read(b"GIF89a")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gemma3n"}))
    with pytest.raises(ValueError, match="images for model_type 'gemma3n' are not supported; supported: gemma3, "):
        load_tower(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").unlink()
    blind = build_tiny(tmp_path)
    assert blind.vision is None and "cannot load how" in blind.find_weaknesses()["no images"]
    assert build_tiny(tmp_path, has_vision=False).find_weaknesses().keys() == blind.find_weaknesses().keys() - {
        "no images"
    }


def build_tiny(folder: Path, **options: Any) -> FullEngine:
    return build_engine(
        str(folder), "", "float32", "cpu", 1, PAGE_TOKENS, 2, lambda *_: (8, 0), lambda *_: None, **options
    )
