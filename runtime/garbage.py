"""Keeps Python's garbage collector from stopping a process that serves: a full collection looks at all there is."""

import gc


def spare_what_is_here() -> None:
    """Leave everything made so far out of later collections. For a process that has loaded all it needs to serve.

    By then a gateway has 260,000 objects, which take 0.1 s to look at, and a worker a million.
    """
    gc.collect()
    gc.freeze()
