"""cohere, for its rerankers alone."""

import cohere

from tests.clients.checks import ASKED, CHECKS, base_url, run, same


def embed() -> None:
    query, _, other = ASKED["embed"]["texts"]
    for kind in (cohere.ClientV2, cohere.Client):
        client = kind(api_key="none", base_url=base_url().removesuffix("/v1"))
        found = client.rerank(model=ASKED["embed"]["model"], query=query, documents=[other, query], top_n=1).results
        same([one.index for one in found], [1])


if __name__ == "__main__":
    run({**dict.fromkeys(CHECKS, "only its reranker is asked"), "embed": embed})
