"""llm, the command and the library, with the service as one of its extra OpenAI models."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.checks import ASKED, base_url, image, mood, pieces_of, run, same

FOLDER = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = FOLDER.name  # llm reads it when imported, and so does the command
(Path(FOLDER.name) / "extra-openai-models.yaml").write_text(
    f"""
- model_id: baton
  model_name: {ASKED["model"]}
  api_base: {base_url()}
  api_key_name: baton
  supports_tools: true
  supports_schema: true
- model_id: images
  model_name: {ASKED["image"]["model"]}
  api_base: {base_url()}
  api_key_name: baton
  vision: true
"""
)
(Path(FOLDER.name) / "keys.json").write_text('{"baton": "none"}')

import llm  # noqa: E402
import openai  # noqa: E402

OPTIONS = {"temperature": 0, "max_tokens": 200}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "llm", "-m", "baton", "-o", "temperature", "0", *arguments, ASKED["sum"]["question"]]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def chat() -> None:
    found = command("--no-stream")
    same((found.returncode, found.stdout.strip()), (0, ASKED["sum"]["answer"]))


def stream() -> None:
    same(command().stdout.strip(), ASKED["sum"]["answer"])
    pieces_of(list(llm.get_model("baton").prompt(ASKED["poem"]["question"], **OPTIONS)))


def call_tool() -> None:
    asked, seen = ASKED["weather"], []

    def implementation(**arguments: Any) -> str:
        seen.append(arguments)
        return str(asked["result"])

    tool = llm.Tool(asked["name"], asked["description"], asked["parameters"], implementation)
    for is_streamed in (False, True):
        chain = llm.get_model("baton").chain(asked["question"], tools=[tool], options=OPTIONS, stream=is_streamed)
        same(chain.text(), asked["answer"])
    same(seen, [asked["arguments"]] * 2)


def in_form(name: str) -> Any:
    asked = ASKED[name]
    answer = llm.get_model("baton").prompt(asked["question"], schema=asked["schema"], stream=False, **OPTIONS)
    return json.loads(answer.text())


def count(files: Sequence[str]) -> tuple[int, int]:
    attached = [llm.Attachment(type="image/png", content=base64.b64decode(file)) for file in files]
    model = llm.get_model("images")
    answer = model.prompt(ASKED["image"]["question"], attachments=attached, stream=False, temperature=0, max_tokens=4)
    usage = answer.usage()
    return usage.input, (usage.details or {}).get("prompt_tokens_details", {}).get("cached_tokens", 0)


def error() -> None:
    found = command("-o", "max_tokens", str(ASKED["refusal"]["max_tokens"]))
    assert found.returncode != 0
    assert ASKED["refusal"]["message"] in found.stderr, f"the message is lost: {found.stderr}"


if __name__ == "__main__":
    run(
        dict(
            chat=chat,
            stream=stream,
            tool=call_tool,
            required="llm cannot ask for a call",
            schema=lambda: same(in_form("person"), ASKED["person"]["answer"]),
            enforced=lambda: mood(in_form("mood")),
            image=lambda: image(count, openai.BadRequestError, "messages[0].content[1].image_url.url"),
            error=error,
        )
    )
