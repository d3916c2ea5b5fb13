"""litellm, for which the service is any server with OpenAI's API."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import fetches prices from the internet

import litellm

from tests.clients.checks import ASKED, base_url, openai_checks, pieces_of, refused, run, same, user, vectors


def ask(**fields: Any) -> Any:
    return litellm.completion(
        api_base=base_url(),
        api_key="none",
        num_retries=0,
        **{"temperature": 0, "max_tokens": 200, **fields, "model": f"openai/{fields.get('model', ASKED['model'])}"},
    )


def chat() -> None:
    answer = ask(messages=[user("sum")])
    same(answer.choices[0].message.content, ASKED["sum"]["answer"])
    assert answer.usage.completion_tokens > 3


def stream() -> None:
    pieces_of([chunk.choices[0].delta.content or "" for chunk in ask(messages=[user("poem")], stream=True)])


def embed() -> None:
    found = litellm.embedding(
        model=f"openai/{ASKED['embed']['model']}", input=ASKED["embed"]["texts"], api_base=base_url(), api_key="none"
    )
    vectors([one["embedding"] for one in found.data])


def error() -> None:
    refused(lambda: ask(messages=[user("sum")], max_tokens=ASKED["refusal"]["max_tokens"]), litellm.BadRequestError)


if __name__ == "__main__":
    run(dict(chat=chat, stream=stream, embed=embed, error=error, **openai_checks(ask, litellm.BadRequestError)))
