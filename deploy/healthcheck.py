"""Exit status 0 when the process in this container answers 200 at its ops port: `healthcheck.py 9100 /ready`."""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0  # a process answers within 3 s, or says why not


def main(port: str, path: str) -> int:
    """The exit status."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # none, whatever the environment names
    try:
        opener.open(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S).close()
    except OSError as error:  # HTTPError, for any status but 2xx, is one too
        reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
        print(f"not healthy: {error}: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
