"""Images of all APIs on their way into prompts: what stands for them, where they are, and what they cost."""

import asyncio
import base64
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest
from PIL import Image

from gateway.images import reader
from gateway.images.families import find_family
from gateway.images.fetch import ImageFetcher
from gateway.images.parts import ImagePart, read_data_uri
from gateway.images.processor_process import ReaderReady, ReaderStart, ReadFile, ReadImage, load_processor
from gateway.images.reader import FoundImage, Images
from gateway.request.image_places import find_images, put_images
from gateway.text.offload import Offload
from gateway.text.segments import SegmentEncoder
from gateway.text.tokenizer import Tokenizer
from protos import inference_pb2, inference_pb2_grpc
from tests.gateway.images.conftest import Vision
from tests.support.api_server import SERVED, WAIT_S
from tests.support.checkpoints import write_config
from tests.support.checkpoints_vision import VISIONS, leave_out_torchvision, write_reading
from tests.support.combinations import others
from tests.support.vision import data_uri, picture, write_vision
from wire.image_files import read_image

RED, BLUE = picture("red"), picture("blue", (100, 60), "JPEG")
TOKENS = {RED: (2, 3), BLUE: (2, 4)}  # rows and columns of each
CHAT = [{"role": "user", "content": [
    {"type": "text", "text": "First "}, {"type": "image_url", "image_url": {"url": data_uri(RED), "detail": "low"}},
    {"type": "text", "text": "then "},
    {"type": "image_url", "image_url": {"url": data_uri(BLUE, "image/jpeg")}}, {"type": "text", "text": "?"},
]}]  # fmt: skip


def test_data_uris_may_have_parameters() -> None:
    data = base64.b64encode(RED).decode()
    assert read_data_uri(f"data:image/png;name=a.png;charset=utf-8;base64,{data}") == RED


def sources() -> list[dict[str, Any]]:
    """Of both, as Anthropic has them; in lines, as MIME has base64."""
    kinds = {RED: "image/png", BLUE: "image/jpeg"}
    return [
        {"type": "base64", "media_type": kind, "data": base64.encodebytes(file).decode()}
        for file, kind in kinds.items()
    ]


def chat(vision: Vision) -> Any:
    client: Any = openai.OpenAI(base_url=f"{vision.served.url}/v1", api_key="x", max_retries=0, timeout=WAIT_S)
    return client.chat.completions.create(model=SERVED, messages=CHAT).usage.prompt_tokens


def responses(vision: Vision) -> Any:
    client: Any = openai.OpenAI(base_url=f"{vision.served.url}/v1", api_key="x", max_retries=0, timeout=WAIT_S)
    names = {"text": "input_text", "image_url": "input_image"}
    content = [{"type": names[part["type"]], "text": part.get("text")} for part in CHAT[0]["content"]]  # type: ignore[index, attr-defined]
    for part, url in zip((content[1], content[3]), (data_uri(RED), data_uri(BLUE, "image/jpeg")), strict=True):
        part |= {"image_url": url, "detail": "auto"}
        del part["text"]
    asked = {"model": SERVED, "input": [{"role": "user", "content": content}]}
    counted = vision.served.http.post("/v1/responses/input_tokens", json=asked).json()["input_tokens"]
    usage = client.responses.create(**asked).usage.input_tokens
    assert counted == usage
    return usage


def messages(vision: Vision) -> Any:
    client: Any = anthropic.Anthropic(base_url=vision.served.url, api_key="x", max_retries=0, timeout=WAIT_S)
    red, blue = ({"type": "image", "source": source} for source in sources())
    texts = [{"type": "text", "text": text} for text in ("First ", "then ", "?")]
    asked = {"model": SERVED, "messages": [{"role": "user", "content": [texts[0], red, texts[1], blue, texts[2]]}]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=9).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    return counted


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_official_clients_send_images(vision: Vision, ask: Callable[[Vision], int]) -> None:
    usage = ask(vision)
    (sent,) = vision.served.engine.generations
    assert usage == len(sent.prompt_ids)
    assert [image.data for image in sent.images] == [RED, BLUE]
    token_id = vision.images.token_id
    for image in sent.images:
        span, (rows, columns) = image.span, TOKENS[image.data]
        assert (span.rows, span.columns, span.end - span.begin) == (rows, columns, rows * columns)
        assert set(sent.prompt_ids[span.begin : span.end]) == {token_id}
    assert sent.prompt_ids.count(token_id) == 14
    texts = vision.served.tokenizer.decode(sent.prompt_ids, with_control_tokens=True)
    marks = {
        file: "<|vision_start|>" + "<|image_pad|>" * (rows * columns) + "<|vision_end|>"
        for file, (rows, columns) in TOKENS.items()
    }
    assert texts == f"<|user|>First {marks[RED]}then {marks[BLUE]}?<|end|><|assistant|>"


@pytest.mark.parametrize("is_chat", [False, True])
def test_ollamas_client_sends_images(vision: Vision, is_chat: bool) -> None:
    client, files = ollama.Client(vision.served.url, timeout=WAIT_S), [RED, BLUE]
    if is_chat:
        client.chat(SERVED, [{"role": "user", "content": "What?", "images": files}])
    else:
        assert client.generate(SERVED, "What?", images=files).context is None  # which cannot have them
    (sent,) = vision.served.engine.generations
    assert [image.data for image in sent.images] == files
    assert vision.served.tokenizer.decode(sent.prompt_ids).endswith("What?")


def test_files_over_grpc(vision: Vision) -> None:
    message = inference_pb2.ChatMessage(role="user", content="What?", images=[RED, BLUE])
    stub = inference_pb2_grpc.InferenceStub(vision.served.channel)
    request = inference_pb2.ChatRequest(messages=[message], max_tokens=2)
    usage = [part.usage.prompt_tokens for part in stub.Chat(request, timeout=WAIT_S)][-1]
    (sent,) = vision.served.engine.generations
    assert [image.data for image in sent.images] == [RED, BLUE] and usage == len(sent.prompt_ids)
    told = stub.Tokenize(inference_pb2.TokenizeRequest(messages=[message]), timeout=WAIT_S)
    assert tuple(told.token_ids) == sent.prompt_ids


def test_images_in_results_of_tools(vision: Vision) -> None:
    look = {"role": "user", "content": "Look"}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    seen = [{"type": "text", "text": "seen: "}, {"type": "image", "source": sources()[0]}]
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": seen}
    asked = [look, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {"model": SERVED, "max_tokens": 5, "messages": asked}
    assert vision.served.http.post("/v1/messages", json=body).status_code == 200
    seen = [{"type": "input_text", "text": "Error: seen: "}, {"type": "input_image", "image_url": data_uri(RED)}]
    output = {"type": "function_call_output", "call_id": "a", "output": seen}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    body = {"model": SERVED, "input": [look, call, output]}
    assert vision.served.http.post("/v1/responses", json=body).status_code == 200
    first, second = vision.served.engine.generations
    assert first.prompt_ids == second.prompt_ids and first.images == second.images and len(first.images) == 1


def test_equal_images_have_equal_digests(vision: Vision) -> None:
    def ask(*files: bytes) -> list[bytes]:
        parts = [{"type": "image_url", "image_url": {"url": data_uri(file)}} for file in files]
        body = {"model": SERVED, "messages": [{"role": "user", "content": parts}]}
        assert vision.served.http.post("/v1/chat/completions", json=body).status_code == 200
        return [image.span.digest for image in vision.served.engine.generations[-1].images]

    first, second, third = ask(RED, picture("green"), RED)
    assert first == third != second and ask(picture("green")) == [second]
    assert len(vision.served.engine.generations[0].prompt_ids) > len(vision.served.engine.generations[1].prompt_ids)


def test_long_files_are_unpacked_beside_the_event_loop(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noted(url: str) -> bytes:
        threads.append(threading.current_thread().name)
        return read_data_uri(url)

    monkeypatch.setattr(reader, "read_data_uri", noted)
    for size in (8, 900):
        part = {"type": "image_url", "image_url": {"url": data_uri(picture("white", (size, size)))}}
        body = {"model": SERVED, "messages": [{"role": "user", "content": [part]}]}
        assert vision.served.http.post("/v1/chat/completions", json=body).status_code == 200
    assert [name.startswith("tokenise") for name in threads] == [False, True]


SPELLED = {"role": "user", "content": "a <|image_pad|>"}
PLACE = "messages[0].content[1].image_url.url"
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {"messages": [SPELLED]}, "messages", "stands for"),
    ("chat/completions", {"messages": [*CHAT, SPELLED]}, "messages", "stands for"),
    ("chat/completions", {"messages": [{**CHAT[0], "role": "system"}]}, PLACE, "role"),
    ("chat/completions", {"messages": [{**CHAT[0], "role": "assistant"}]}, PLACE, "role"),
    ("chat/completions", {"messages": CHAT * 33}, "messages", "at most 64"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
     "messages[0].content[0].image_url", "object"),
    ("completions", {"prompt": "a <|image_pad|>"}, "prompt", "stands for"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
     "input[0].content[0].file_id", "not supported"),
    ("responses", {"input": [{"role": "developer", "content": [{"type": "input_image", "image_url": data_uri(RED)}]}]},
     "input[0].content[0].image_url", "role"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "why"), REFUSED)
def test_what_no_image_can_be_is_refused(
    vision: Vision, path: str, fields: dict[str, Any], param: str, why: str
) -> None:
    answer = vision.served.http.post(f"/v1/{path}", json={"model": SERVED, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize("source", [
    {"type": "file", "file_id": "x"}, {"type": "base64", "data": "QUFB"}, {"type": "url"},
    {"type": "base64", "url": "x"}, {"type": "url", "url": "https://x.example/", "data": "QUFB"},
    {"type": "base64", "media_type": "text/html", "data": "QUFB"},
])  # fmt: skip
def test_sources_of_another_form_are_refused(vision: Vision, source: dict[str, str]) -> None:
    content = [{"type": "image", "source": source}]
    body = {"model": SERVED, "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    answer = vision.served.http.post("/v1/messages", json=body)
    assert answer.status_code == 400 and "messages[0].content[0].source" in answer.json()["error"]["message"]


def test_a_prompt_of_too_many_image_tokens_is_too_long(vision: Vision) -> None:
    part = {"type": "image_url", "image_url": {"url": data_uri(picture(size=(1000, 1000)))}}
    body = {"model": SERVED, "messages": [{"role": "user", "content": [part] * 4}]}
    error = vision.served.http.post("/v1/chat/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_images_that_are_too_large_together_are_refused(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "image_url", "image_url": {"url": data_uri(RED)}}
    body = {"model": SERVED, "messages": [{"role": "user", "content": [part] * 3}]}
    monkeypatch.setattr(reader, "MAX_ALL_BYTES", 3 * len(RED))
    assert vision.served.http.post("/v1/chat/completions", json=body).status_code == 200
    monkeypatch.setattr(reader, "MAX_ALL_BYTES", 3 * len(RED) - 1)
    answer = vision.served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert f"more than {3 * len(RED) - 1} bytes together" in answer.json()["error"]["message"]


def test_a_cancelled_image_keeps_its_turn_until_the_process_is_done_with_it(
    vision: Vision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that comes and leaves could have any number of forks."""
    running, most, files = 0, 0, [ImagePart(picture("teal", (60, 10 + at)), f"images[{at}]") for at in range(4)]

    async def test() -> None:
        images, may_end = Images(Path(), "", 0, 1, ImageFetcher(()), vision.images._offload), asyncio.Event()

        async def answer(call: ReadFile, timeout_s: float) -> ReadImage:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await may_end.wait()
            running -= 1
            return ReadImage("text", 0, 0)

        monkeypatch.setattr(images._child, "ask", answer)
        monkeypatch.setattr(images._child, "ready", partial(asyncio.sleep, 0, ReaderReady("", "")))
        for _ in range(3):
            reading = asyncio.create_task(images.read(files, "images"))
            async with asyncio.timeout(WAIT_S):
                while running < reader.AT_ONCE or not images._turns._waiting:  # noqa: ASYNC110  no event for it
                    await asyncio.sleep(0.01)
            reading.cancel()
            await asyncio.wait([reading])
        assert running == most == reader.AT_ONCE
        may_end.set()
        found = await asyncio.wait_for(images.read(files, "images"), WAIT_S)
        assert len(found) == 4 and most == reader.AT_ONCE and not running

    asyncio.run(test())


def test_a_process_that_dies_is_replaced(vision: Vision) -> None:
    def ask(color: str) -> int:
        part = {"type": "image_url", "image_url": {"url": data_uri(picture(color))}}
        body = {"model": SERVED, "messages": [{"role": "user", "content": [part]}]}
        return vision.served.http.post("/v1/chat/completions", json=body).status_code

    assert ask("yellow") == 200
    pid = vision.images.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert ask("orange") == 200 and vision.images.pid != pid


@pytest.mark.parametrize(("kind", "mode"), [
    ("PNG", "1"), ("PNG", "L"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "I;16"), ("JPEG", "L"),
    ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA"),
])  # fmt: skip
def test_all_kinds_of_pixels_are_read(kind: str, mode: str) -> None:
    image = read_image(picture("white", kind=kind, mode="L" if mode == "I;16" else mode))
    assert (image.mode, image.size) == ("RGB", (60, 40)) and min(map(min, image.getdata())) > 250


def test_pixels_are_not_copied_but_to_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest image has 200 MB of them."""
    file = picture("red")
    monkeypatch.setattr(Image.Image, "copy", lambda image: pytest.fail("a copy"))
    assert read_image(file).getpixel((0, 0)) == (255, 0, 0)


def test_photos_are_turned_as_cameras_say_and_may_have_previews() -> None:
    photo, exif = Image.new("RGB", (60, 40), "red"), Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    photo.save(file, "JPEG", exif=exif)
    assert read_image(file.getvalue()).size == (40, 60)
    file = BytesIO()
    photo.save(file, "MPO", save_all=True, append_images=[photo.resize((6, 4))])
    assert read_image(file.getvalue()).size == (60, 40)


class Prompt(NamedTuple):
    """A chat about files, and what became of them."""

    folder: Path
    tokenizer: Tokenizer
    images: Images
    chat: list[dict[str, Any]]
    files: list[bytes]
    found: list[FoundImage]


@pytest.fixture(scope="module")
def offload() -> Iterator[Offload]:
    offload = Offload()
    yield offload
    offload.close()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, offload: Offload) -> dict[str, Prompt]:
    """Family |-> two images in a chat, all read by one process, which takes long to start."""
    files = [picture("red", (90, 60)), picture("blue", (60, 120), "WEBP")]
    parts = [ImagePart(data_uri(files[0]), "first"), ImagePart(files[1], "second")]
    content = ["Compare ", parts[0], " and ", parts[1], ", please."]
    chat: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": content}]

    async def read() -> dict[str, Prompt]:
        found, first = dict[str, Prompt](), None
        for name in VISIONS:
            folder = tmp_path_factory.mktemp(name)
            tokenizer = Tokenizer(write_reading(write_config(folder, name), name))
            config, family = tokenizer.config, find_family(tokenizer.config)
            token_id = config.get("image_token_id", config.get("image_token_index"))
            assert family is not None and token_id is not None
            images = Images(folder, family, token_id, 1 << 20, ImageFetcher(()), offload)
            if first is not None:
                images._child = first._child
                started = await images._child.ask(ReaderStart(str(folder), family, 1 << 20), WAIT_S)
                images._child.ready = partial(asyncio.sleep, 0, started)  # type: ignore[method-assign, assignment]
            first = first or images
            found[name] = Prompt(folder, tokenizer, images, chat, files, await images.read(parts, "messages"))
        assert first is not None
        await first.close()
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("name", others(VISIONS, "qwen3_vl", "gemma3", "pixtral", "llava"))
def test_prompts_are_as_transformers_has_them(prompts: dict[str, Prompt], name: str) -> None:
    folder, tokenizer, images, chat, files, found = prompts[name]
    rendered = tokenizer.render_chat(chat)
    assert "Be short." in rendered, "texts are parts where the template wants that"
    ids = SegmentEncoder(tokenizer).encode(put_images(rendered, images.placeholder, found, "messages"))
    leave_out_torchvision()
    processor = load_processor(folder, find_family(tokenizer.config) or "")
    nested = [[read_image(file) for file in files]]
    theirs = processor(images=nested, text=[rendered], add_special_tokens=False)
    assert ids == list(theirs["input_ids"][0])
    token_id = images.token_id
    placed = find_images(ids, token_id, VISIONS[name].tokens[0], found, "messages")
    assert [image.data for image in placed] == files
    assert sum(ids[image.span.begin : image.span.end].count(token_id) for image in placed) == ids.count(token_id)
    for image in placed:
        assert ids[image.span.begin] == ids[image.span.end - 1] == token_id
        if "qwen" in name:
            assert image.span.rows * image.span.columns == image.span.end - image.span.begin


def test_memory_stays_flat(tmp_path: Path, offload: Offload) -> None:
    """In the process that reads images and here: of some turn of 20 images less is left than half of their pixels."""
    token_id = Tokenizer(write_vision(tmp_path)).config["image_token_id"]
    images = Images(tmp_path, "qwen2_5_vl", token_id, 1 << 20, ImageFetcher(()), offload)
    numbers, size = count(), (400, 150)

    async def read() -> list[int]:
        files = [picture(f"#{next(numbers):06x}", size) for _ in range(20)]
        await images.read([ImagePart(data_uri(file), "x") for file in files], "x")
        assert images.pid is not None
        return [_resident_bytes(pid) for pid in (images.pid, os.getpid())]

    async def test() -> None:
        growing, before = {0, 1}, await read()
        for _ in range(6):
            after = await read()
            growing -= {at for at in growing if after[at] - before[at] < 20 * 3 * size[0] * size[1] / 2}
            before = after
            if not growing:
                break
        await images.close()
        assert not growing, "each turn leaves its pixels"

    asyncio.run(test())


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
