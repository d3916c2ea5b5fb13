"""Models without answers behind real processes: prefill workers alone, of which one is killed in mid-batch."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import ollama
import openai
import pytest

from prefill_worker.main import NICE
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.support.checkpoints import write_tokenizer
from tests.support.live import HTTP, HTTP_S, WAIT_S, Live, serve, wait_until
from tests.support.pooled import cosine, embed, open_engine, write_pooled

SAME = 0.99999
TEXTS = [f"text {number} " + "of some words, " * (number % 5) for number in range(60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name |-> checkpoint. "decoder": last tokens, natively; "pairs": a cross-encoder."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("decoder", "pairs", "files")}
    write_pooled(found["decoder"], "qwen3", "Qwen3Model", "lasttoken", normalizes=True, max_position_embeddings=400)
    prompts = {"prompts": {"query": "find: "}}
    (found["decoder"] / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    write_pooled(
        found["pairs"], "roberta", "RobertaForSequenceClassification", num_labels=1, max_position_embeddings=400
    )
    for name in ("decoder", "pairs"):
        write_tokenizer(found[name], 300)
    return found


@pytest.fixture(scope="module")
def live(folders: dict[str, Path]) -> Iterator[Live]:
    with serve(
        f"decoder={folders['decoder']}", f"--model=pairs={folders['pairs']}", "--prefill-workers=2", "--threads=1",
        "--dtype=float32", f"--batch-dir={folders['files']}", "--kv-memory-mib=64", hands_over=False, forks=True,
    ) as service:  # fmt: skip
        service.wait_until_whole()
        yield service


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{live.url}{path}", json={"model": "decoder", **body}, timeout=WAIT_S)


@pytest.fixture(scope="module")
def expected(live: Live, folders: dict[str, Path]) -> list[Any]:
    """The vectors of TEXTS by an engine here, of the tokens that the service counts."""
    ids = [post(live, "/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    engine = open_engine(folders["decoder"])
    return [vector for at in range(0, len(ids), 4) for vector in embed(engine, ids[at : at + 4])]


def priorities(pids: Sequence[int]) -> Iterator[int]:
    """The priority of each thread that is still there."""
    for thread in (path for pid in pids for path in Path(f"/proc/{pid}/task").iterdir()):
        with suppress(ProcessLookupError):
            yield os.getpriority(os.PRIO_PROCESS, int(thread.name))


def test_what_serves(live: Live) -> None:
    assert {one["role"] for one in live.status()} == {"prefill"} and len(live.status()) == 4
    assert not HTTP.get(f"{live.url}/status", timeout=HTTP_S).json()["no_hand_off"], "there is none to see"
    listed = HTTP.get(f"{live.url}/v1/models", timeout=HTTP_S).json()["data"]
    assert [(one["id"], one["task"], one["max_model_len"]) for one in listed] == [
        ("decoder", "embed", 399), ("pairs", "score", 398),
    ]  # fmt: skip
    if sys.platform == "linux":  # a worker that computes texts alone leaves the cores to those of streams
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert min(priorities([one["pid"] for one in live.status()])) == max(NICE, own), "some threads have a lower one"
        assert os.getpriority(os.PRIO_PROCESS, live.pids["gateway"]) == own
    chat = post(live, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert chat.status_code == 400 and "makes embeddings" in chat.json()["error"]["message"]
    wrong = post(live, "/v1/embeddings", model="pairs", input="x")
    assert wrong.status_code == 400 and "scores of pairs" in wrong.json()["error"]["message"]


def test_ollama_client(live: Live, expected: list[Any]) -> None:
    client = ollama.Client(live.url)
    found = client.embed("decoder:latest", TEXTS[:4])
    assert all(cosine(one, own) > SAME for one, own in zip(found.embeddings, expected, strict=False))
    assert len(found.embeddings) == 4 and found.prompt_eval_count and found.total_duration
    assert cosine(client.embeddings("decoder", TEXTS[3]).embedding, expected[3]) > SAME
    (cut,) = client.embed("decoder", "word " * 2000, dimensions=8).embeddings
    assert len(cut) == 8
    assert client.embed("decoder", []).embeddings == [], "whether the model is there"
    with pytest.raises(ollama.ResponseError, match="shorten it"):
        client.embed("decoder", "word " * 500, truncate=False)
    with pytest.raises(ollama.ResponseError, match="scores of pairs"):
        client.embed("pairs", "x")
    assert client.show("decoder").capabilities == ["embedding"]


def test_openai_client(live: Live, expected: list[Any]) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="decoder", input=TEXTS)  # which asks for base64
    assert all(cosine(one.embedding, own) > SAME for one, own in zip(found.data, expected, strict=True))
    tokens = post(live, "/tokenize", prompt=TEXTS[3]).json()["tokens"]
    assert found.usage.prompt_tokens > len(TEXTS) * 8
    for given in (tokens, [tokens]):
        (one,) = client.embeddings.create(model="decoder", input=given, encoding_format="float").data
        assert cosine(one.embedding, expected[3]) > SAME
    (short,) = client.embeddings.create(model="decoder", input=TEXTS[3], dimensions=8).data
    assert cosine(short.embedding, expected[3][:8]) > SAME and abs(np.linalg.norm(short.embedding) - 1) < 1e-5
    named = post(live, "/v1/embeddings", input="a fish", prompt_name="query").json()["data"][0]["embedding"]
    plain = post(live, "/v1/embeddings", input="find: a fish").json()["data"][0]["embedding"]
    assert cosine(named, plain) > SAME


def test_hostile_inputs(live: Live) -> None:
    for given, detail in (
        ("", "is empty"), ([], "is empty"), (["x", ""], "input[1] is empty"), ("x" * 1000, "1000 tokens"),
        ([5] * 100_000, "tokens"), ([999], "token id 999"), (["x"] * 2049, "at most 2048"),
    ):  # fmt: skip
        answer = post(live, "/v1/embeddings", input=given)
        assert answer.status_code == 400 and detail in answer.json()["error"]["message"], answer.text
    cut = post(live, "/v1/embeddings", input="y" * 1000, truncate_prompt_tokens=-1).json()
    assert cut["usage"]["prompt_tokens"] == 399
    assert post(live, "/v1/embeddings", input="   ").status_code == 200
    assert post(live, "/v1/embeddings", input="x", dimensions=65).status_code == 400


def test_scores_and_grpc(live: Live, expected: list[Any]) -> None:
    documents = ["one", {"text": "the second of them"}, "three"]
    ranked = post(live, "/v2/rerank", model="pairs", query="which?", documents=documents, top_n=2).json()["results"]
    scored = post(live, "/v1/score", model="pairs", text_1="which?", text_2=["one", "the second of them", "three"])
    scores = [one["score"] for one in scored.json()["data"]]
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sorted(scores, reverse=True)[:2])
    assert all(0 < one < 1 for one in scores) and ranked[0]["document"]["text"]
    classes = post(live, "/classify", model="pairs", input="one").json()["data"][0]
    assert classes["num_classes"] == 1
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        found = stub.Embed(pb.EmbedRequest(model="decoder", texts=TEXTS[:3]), timeout=WAIT_S)
        assert all(cosine(one.values, own) > SAME for one, own in zip(found.embeddings, expected, strict=False))
        with pytest.raises(grpc.RpcError, match="is empty"):
            stub.Embed(pb.EmbedRequest(model="decoder"), timeout=WAIT_S)


def test_a_worker_is_killed(live: Live, expected: list[Any]) -> None:
    """Each text of a request comes once, with the vector that it has elsewhere; so do the lines of a batch."""
    name = next(one for one in live.pids if one.startswith("decoder prefill"))
    lines = [
        {"custom_id": f"{at}", "method": "POST", "url": "/v1/embeddings", "body": {"model": "decoder", "input": text}}
        for at, text in enumerate(TEXTS)
    ]
    files = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)))}
    file = HTTP.post(f"{live.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=HTTP_S).json()["id"]
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(post, live, "/v1/embeddings", input=TEXTS * 4) for _ in range(3)]
        body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        batch = HTTP.post(f"{live.url}/v1/batches", json=body, timeout=HTTP_S).json()["id"]
        time.sleep(0.2)
        os.kill(live.pids[name], signal.SIGKILL)
        for one in asked:
            answer = one.result()
            assert answer.status_code == 200, answer.text
            data = answer.json()["data"]
            assert [item["index"] for item in data] == list(range(len(TEXTS) * 4))
            assert all(cosine(item["embedding"], expected[at % len(TEXTS)]) > SAME for at, item in enumerate(data))
    state: dict[str, Any] = {}

    def is_over() -> bool:
        state.update(HTTP.get(f"{live.url}/v1/batches/{batch}", timeout=HTTP_S).json())
        return bool(state["status"] == "completed")

    wait_until(is_over, explain=lambda: state)
    output = HTTP.get(f"{live.url}/v1/files/{state['output_file_id']}/content", timeout=HTTP_S).text.splitlines()
    found = {one["custom_id"]: one["response"]["body"]["data"][0]["embedding"] for one in map(json.loads, output)}
    assert len(output) == len(found) == len(TEXTS)
    assert all(cosine(vector, expected[int(name)]) > SAME for name, vector in found.items())
