"""`baton weights FOLDER`: workers take other weights of their model, without a restart."""

import json
from contextlib import closing

from cli.service import URL, ApiKey, Service, Url

PATH = "/v1/weights"


def weights(
    folder: str,
    /,
    *,
    revision: str = "",
    model: str | None = None,
    end: bool = False,
    timeout_s: float = 300.0,
    url: Url = URL,
    api_key: ApiKey = "",
) -> int:
    """Have the workers of a model take the weights in a folder in place of their own. Needs the admin key.

    Args:
        folder: Of a checkpoint of the same model, on the workers' hosts, below their --weights-dir.
        revision: Name of what they serve then; by default 12 characters of the fingerprint.
        model: Which one, where the service has several.
        end: End the answers that run, rather than wait for them.
        timeout_s: Seconds to wait for them.
    """
    body = {"path": folder, "revision": revision, "model": model, "timeout_s": timeout_s}
    body["in_flight"] = "end" if end else "wait"
    with closing(Service(url, api_key)) as service, service.call("POST", PATH, body) as response:
        answer = json.loads(response.read())
    still = ", ".join(f"{address} for {seconds:.2f} s" for address, seconds in answer["still_s"].items())
    print(f"weights {answer['weights']}: nothing new was taken for {answer['paused_s']:.1f} s, still stood {still}")
    return 0
