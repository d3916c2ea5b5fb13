"""Streams an answer that goes on when its connection or its gateway is gone, through OpenAI's client.

Usage: python survives.py QUESTION [http://HOST:PORT ...]: one or several gateways with the same store (--state-url).
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence

from openai import APIConnectionError, APIError, OpenAI
from openai.types.responses import ResponseStreamEvent

ENDS = ("response.completed", "response.incomplete", "response.failed")
PATIENCE_S = 60.0


def stream(clients: Sequence[OpenAI], question: str) -> Iterator[ResponseStreamEvent]:
    """Each event once. After a cut the next client reads on behind the last one."""
    model, answer_id, last = clients[0].models.list().data[0].id, "", -1
    until = time.monotonic() + PATIENCE_S
    for client in (clients[at % len(clients)] for at in range(sys.maxsize)):
        try:
            if answer_id:
                events = client.responses.retrieve(answer_id, stream=True, starting_after=last)
            else:
                events = client.responses.create(model=model, input=question, stream=True)
            for event in events:
                if event.type == "response.created":
                    answer_id = event.response.id
                last, until = event.sequence_number, time.monotonic() + PATIENCE_S
                yield event
                if event.type in ENDS:
                    return
        except (APIConnectionError, APIError, OSError) as error:
            print(f"\n[{type(error).__name__}: reading on]", file=sys.stderr)
        except Exception as error:  # of the HTTP library, when a body breaks off
            if not type(error).__module__.startswith("http"):
                raise
        if time.monotonic() > until:
            raise TimeoutError(f"no gateway answered for {PATIENCE_S:g} s")
        time.sleep(0.2)


def main(question: str, *urls: str) -> None:
    key = os.environ.get("BATON_API_KEY", "none")
    clients = [OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for url in urls or ("http://127.0.0.1:8000",)]
    for event in stream(clients, question):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
