"""HTTP to services on this machine, a connection of its own for each call.

httpx's own functions get ready for TLS at every call, which is 30 ms of CPU: too much where something is asked for
until it comes true.
"""

import httpx

HTTP = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
