"""Files and URLs that are not what they seem: each is a 400 that names its part and says why, at once.

None ends the process that reads images, and nothing is fetched that may not be.
"""

import http.client
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from gateway.images import fetch, reader
from tests.gateway.images.conftest import OTHER, PUBLIC, Endless, Network, Vision
from tests.support.api_server import SERVED, WAIT_S
from tests.support.vision import data_uri, picture
from wire.image_files import read_image

Make = Callable[[Network], str]  # the URL to send
PNG = picture()
JPEG, GIF, WEBP = picture(kind="JPEG"), picture(kind="GIF"), picture(kind="WEBP")


def of(file: bytes, kind: str = "image/png") -> Make:
    return lambda network: data_uri(file, kind)


def told(url: str) -> Make:
    return lambda network: url


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """200 million pixels of one bit each in 25 kB."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(2501)) for _ in range(10_000)) + rows.flush()
    return png(20_000, 10_000, chunk(b"IDAT", data))


def text_bomb() -> bytes:
    """Text of a gigabyte beside a small image; twice compressed by the test, once by the file."""
    packed = zlib.compressobj(9)
    text = b"".join(packed.compress(bytes(1 << 20)) for _ in range(128)) + packed.flush()
    return PNG[:33] + chunk(b"zTXt", b"x\0\0" + text) + PNG[33:]


def animated(kind: str, **options: Any) -> bytes:
    file = BytesIO()
    frames = [Image.new("RGB", (60, 40), color) for color in ("red", "blue")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


def jpeg_of(width: int, height: int) -> bytes:
    """A file whose header says so."""
    at = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:at] + struct.pack(">HH", height, width) + JPEG[at + 4 :]


def damaged(file: bytes, kind: str) -> Make:
    return of(file[: len(file) * 2 // 3], kind)


NOISE = BytesIO()
Image.effect_noise((60, 40), 60).convert("RGB").save(NOISE, "WEBP", lossless=True)
ZIP = b"PK\x03\x04x" + b"PK\x05\x06" + bytes(18)

FILES: dict[str, tuple[Make, str]] = {
    "no file": (told("data:,"), "must begin like"),
    "empty file": (of(b""), "no PNG"),
    "not base64 by its head": (told("data:image/png,abc"), "must begin like"),
    "no type": (told("data:;base64,abcd"), "must begin like"),
    "html": (of(b"<html>", "text/html"), "text/html"),
    "svg": (of(b"<svg/>", "image/svg+xml"), "image/svg+xml"),
    "svg told as png": (of(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), "no PNG"),
    "characters of none": (told("data:image/png;base64,!!!!"), "no base64"),
    "padding inside": (told("data:image/png;base64,QQ==QQ=="), "no base64"),
    "padding inside, far on": (told("data:image/png;base64," + "QUFB" * 65_535 + "QQ==" + "QUFB"), "ends before"),
    "no padding": (told("data:image/png;base64,QQ"), "no base64"),
    "a blank": (told(data_uri(PNG)[:60] + " " + data_uri(PNG)[60:]), "no base64"),
    "of URLs": (told("data:image/png;base64,_-_-"), "no base64"),
    "beyond ASCII": (told("data:image/png;base64,ÄÄÄÄ"), "no base64"),
    "too many bytes": (of(bytes(21 << 20)), "at most 20971520"),
    "jpeg told as png": (of(JPEG), "and is image/jpeg"),
    "gif told as webp": (of(GIF, "image/webp"), "and is image/gif"),
    "bmp": (of(picture(kind="BMP")), "no PNG"),
    "tiff": (of(picture(kind="TIFF")), "no PNG"),
    "icon": (of(picture(kind="ICO")), "no PNG"),
    "postscript": (of(picture(kind="EPS")), "no PNG"),
    "pdf": (of(picture(kind="PDF")), "no PNG"),
    "avif": (of(b"\0\0\0\x20ftypavif" + bytes(64)), "no PNG"),
    "zip": (of(ZIP), "no PNG"),
    "text": (of(b"just text"), "no PNG"),
    "cut png": (damaged(PNG, "image/png"), "damaged"),
    "cut jpeg": (damaged(picture(size=(400, 300), kind="JPEG"), "image/jpeg"), "damaged"),
    "cut gif": (damaged(GIF, "image/gif"), "damaged"),
    "cut webp": (damaged(NOISE.getvalue(), "image/webp"), "damaged"),
    "head of a png": (of(PNG[:8]), "damaged"),
    "changed png": (of(PNG[:-20] + b"x" + PNG[-19:]), "damaged"),
    "png without pixels": (of(png(60, 40)), "damaged"),
    "png of no size": (of(png(0, 40, chunk(b"IDAT", zlib.compress(b"")))), "damaged"),
    "huge png": (of(png(2**31 - 1, 2**31 - 1)), "pixels"),
    "large png": (of(png(2000, 2000)), "at most 1048576"),
    "png bomb": (lambda network: data_uri(bomb()), "pixels"),
    "text bomb": (lambda network: data_uri(text_bomb()), "damaged"),
    "huge jpeg": (of(jpeg_of(65_535, 65_535), "image/jpeg"), "pixels"),
    "huge gif": (of(GIF[:6] + b"\xff\xff\xff\xff" + GIF[10:], "image/gif"), "pixels"),
    "a line": (of(picture(size=(5000, 1))), "aspect ratio"),
    "animated gif": (of(animated("GIF"), "image/gif"), "animated"),
    "animated png": (of(animated("PNG")), "animated"),
    "animated webp": (of(animated("WEBP", lossless=True), "image/webp"), "animated"),
    "png and zip": (of(PNG + ZIP), "ZIP file as well"),
    "jpeg and pdf": (
        of(JPEG[:20] + b"\xff\xfe\0\x20%PDF-1.7" + bytes(21) + JPEG[20:], "image/jpeg"), "PDF file as well"),
    "png and program": (of(PNG + b"\x7fELF\x02\x01\x01"), "ELF file as well"),
}  # fmt: skip

URLS: dict[str, tuple[str, str]] = {
    "another host": ("https://other.example/x.png", "no host"),
    "below an allowed one": ("https://a.img.example/x.png", "no host"),
    "the suffix itself": ("https://cdn.example/x.png", "no host"),
    "ends like it": ("https://evilcdn.example/x.png", "no host"),
    "allowed as a user": ("https://img.example@other.example/x.png", "neither user nor port"),
    "port": ("https://img.example:8080/x.png", "neither user nor port"),
    "file": ("file:///etc/passwd", "https or http"),
    "ftp": ("ftp://img.example/x.png", "https or http"),
    "script": ("javascript:alert(1)", "https or http"),
    "path": ("/etc/passwd", "https or http"),
    "nothing": ("", "https or http"),
    "no url": ("http://[::1", "no URL"),
    "long": (f"https://img.example/{'x' * 3000}", "characters"),
    "loopback": ("http://127.0.0.1/x.png", "not public"),
    "loopback as a number": ("http://2130706433/x.png", "not public"),
    "loopback of IPv6": ("http://[::1]/x.png", "no host"),
}


def check(vision: Vision, url: str, why: str) -> None:
    """It is refused."""
    pid = vision.images.pid
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    answer = vision.served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url" and error["code"] == "invalid_image"
    assert error["message"].startswith(error["param"]) and why in error["message"], error
    assert " at 0x" not in error["message"], "an address in memory"
    assert not vision.served.engine.generations
    assert pid is None or vision.images.pid == pid, "it ended the process"


@pytest.mark.parametrize(("make", "why"), FILES.values(), ids=FILES)
def test_a_file_is_refused(vision: Vision, make: Make, why: str) -> None:
    check(vision, make(vision.network), why)


@pytest.mark.parametrize("text", [b"<html></html>", b"<svg width='1'>", b"<?php echo 1;", b"<script>"])
def test_text_in_an_image_says_what_it_likes(text: bytes) -> None:
    """As tools write it: where a picture comes from, or what it was drawn with."""
    told = PNG[:33] + chunk(b"tEXt", b"Comment\0" + text) + PNG[33:]
    assert read_image(told).tobytes() == read_image(PNG).tobytes()
    told = JPEG[:20] + b"\xff\xfe" + struct.pack(">H", len(text) + 2) + text + JPEG[20:]
    assert read_image(told).tobytes() == read_image(JPEG).tobytes()


@pytest.mark.parametrize(("url", "why"), URLS.values(), ids=URLS)
def test_a_url_is_refused_unasked(vision: Vision, url: str, why: str) -> None:
    vision.network.names |= {"127.0.0.1": [["127.0.0.1"]], "2130706433": [["127.0.0.1"]]}
    check(vision, url, why)
    assert not vision.network.asked


@pytest.mark.parametrize("bad", [
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255",
    "::1", "::ffff:127.0.0.1", "fe80::1%eth0", "fd00::1", "64:ff9b::7f00:1", "2002:7f00:1::", "::",
])  # fmt: skip
def test_a_host_with_an_address_inside_is_not_asked(vision: Vision, bad: str) -> None:
    vision.network.names["img.example"] = [[bad], [PUBLIC, bad]]
    for _ in range(2):
        check(vision, "https://img.example/x.png", "not public")
    assert not vision.network.asked


@pytest.mark.parametrize(("target", "why"), [
    ("http://127.0.0.1/x", "not public"), ("http://[::1]/x", "no host"), ("https://other.example/x", "no host"),
    ("https://img.example/x", "not public"), ("//other.example/x", "no host"), ("file:///etc/passwd", "https or http"),
    ("http://[", "no host"), ("https://a.cdn.example/", "not public"),
])  # fmt: skip
def test_a_redirect_is_checked_like_the_first_url(vision: Vision, target: str, why: str) -> None:
    """`img.example` is another host by the second time it is looked up."""
    network = vision.network
    network.names |= {
        "img.example": [[PUBLIC], ["127.0.0.1"]],
        "127.0.0.1": [["127.0.0.1"]],
        "a.cdn.example": [["10.0.0.1"]],
    }
    network.serve("/first", 302, {"location": target})
    check(vision, "https://img.example/first", why)
    assert [(one.url.host, one.url.path) for one in network.asked] == [(PUBLIC, "/first")]


def test_what_hosts_answer_is_bounded(vision: Vision) -> None:
    network = vision.network
    network.serve("/loop", 302, {"location": "/loop"})
    network.serve("/gone", 404, body=PNG)
    network.serve("/endless", body=Endless())
    network.serve("/page", body=b"<html>")
    network.serve("/packed", 200, {"content-encoding": "gzip"}, body=b"\x1f\x8b" + bytes(20))
    for path, why in [
        ("loop", "more than 3 redirects"), ("gone", "status 404"), ("endless", "at most 20971520"), ("page", "no PNG"),
        ("packed", "no PNG"),
    ]:  # fmt: skip
        network.names["a.cdn.example"] = [[PUBLIC]] * 4
        check(vision, f"https://a.cdn.example/{path}", why)
    check(vision, "https://gone.cdn.example/", "cannot be fetched")


def test_what_all_fetched_files_have_together_is_bounded(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they arrive."""
    monkeypatch.setattr(reader, "MAX_ALL_BYTES", 6 << 20)
    bodies = [Endless(most=4) for _ in range(3)]
    for number, body in enumerate(bodies):
        vision.network.serve(f"/{number}", body=body)
    vision.network.names["img.example"] = [[PUBLIC]] * 3
    urls = [f"https://img.example/{at}" for at in range(3)]
    answer = vision.served.http.post("/v1/chat/completions", json=ask(*urls))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "invalid_image"), error
    assert "more than 6291456 bytes together" in error["message"]
    assert sum(body.num_sent for body in bodies) <= 6 + 3 and all(body.has_ended.wait(WAIT_S) for body in bodies)


def ask(*urls: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": SERVED, "messages": [{"role": "user", "content": parts}], **fields}


def leave(vision: Vision, body: Endless, path: str) -> None:
    """As clients do that no longer want an answer."""
    url = urlsplit(vision.served.url)
    connection = http.client.HTTPConnection(url.netloc, timeout=WAIT_S)
    content = json.dumps(ask("https://img.example/stalled"))
    connection.request("POST", path, content, {"content-type": "application/json"})
    assert body.has_begun.wait(WAIT_S)
    connection.close()


def end_with_another(vision: Vision, body: Endless) -> None:
    answer = vision.served.http.post("/v1/chat/completions", json=ask("https://img.example/stalled", "file:///x"))
    assert answer.status_code == 400 and "content[1].image_url.url" in answer.json()["error"]["message"]


def end_by_deadline(vision: Vision, body: Endless) -> None:
    given = ask("https://img.example/stalled", deadline_ms=300)
    answer = vision.served.http.post("/v1/chat/completions", json=given)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline"), answer.text


@pytest.mark.parametrize("end", [
    end_with_another, end_by_deadline, partial(leave, path="/v1/chat/completions"), partial(leave, path="/tokenize"),
])  # fmt: skip
def test_what_ends_a_request_ends_its_fetches(
    vision: Vision, end: Callable[[Vision, Endless], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_S", 2 * WAIT_S)
    vision.network.names["img.example"] = [[PUBLIC]] * 2
    body = Endless(most=1)
    vision.network.serve("/stalled", body=body)
    end(vision, body)
    assert body.has_ended.wait(WAIT_S)
    answer = vision.served.http.post("/v1/chat/completions", json=ask(data_uri(PNG)))
    assert answer.status_code == 200


def test_a_checked_address_is_the_one_that_is_asked(vision: Vision) -> None:
    network = vision.network
    network.names |= {"img.example": [[OTHER, PUBLIC]], "b.cdn.example": [[PUBLIC], ["127.0.0.1"]]}
    network.serve("/a", 301, {"location": "https://B.cdn.example/b"})
    network.serve("/b", body=PNG)
    body = {"model": "tiny", "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "https://IMG.example/a?b=c"}}]}]}  # fmt: skip
    assert vision.served.http.post("/v1/chat/completions", json=body).status_code == 200
    first, second = network.asked
    assert (first.url.host, first.headers["host"], first.extensions["sni_hostname"]) == (OTHER, *["img.example"] * 2)
    assert (second.url.host, second.headers["host"]) == (PUBLIC, "b.cdn.example")
    assert first.url.raw_path == b"/a?b=c" and "authorization" not in first.headers
    assert vision.served.engine.sent[0]["images"][0]["data"] == PNG
