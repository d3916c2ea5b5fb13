"""Clients that leave, workers that stop, and slow readers. Rows 1, 10, 15 and 22 of the fault list."""

import os
import re
import socket
from contextlib import ExitStack

from tests.support.fault_answers import Truth, ask, find_busy, is_alive
from tests.support.fleet import HOST, ProcessFleet
from tests.support.live import HTTP, WAIT_S, wait_until

NUM_IDLE = 1000


def test_row_01_pages_of_a_client_that_leaves_its_answer_are_free_at_once(quad: ProcessFleet) -> None:
    """For running prompts see test_held.py."""
    generated = quad.count("decode", "generation_tokens_total")
    cancelled = quad.count("decode", "cancelled_total", {"phase": "active"})
    stream = ask(quad, num_tokens=3500)
    stream.wait_for_tokens(10)
    stream.cancel()
    seconds = quad.wait_until_unused()
    print(f"row 1, decode: pages free after {seconds * 1e3:.0f} ms")
    assert quad.count("decode", "cancelled_total", {"phase": "active"}) == cancelled + 1
    assert quad.count("decode", "generation_tokens_total") < generated + 3500


def test_row_10_stopped_decode_worker_is_noticed_and_left(quad: ProcessFleet, truth: Truth) -> None:
    stream = ask(quad)
    stream.wait_for_tokens(5)
    stopped = find_busy(quad, "decode")
    stopped.stop()
    truth.check(stream)
    assert not is_alive(quad, stopped)
    print(f"row 10, decode: the client's longest pause was {stream.longest_pause_s:.2f} s")
    stopped.resume()
    quad.wait_until_whole()
    truth.check_canary(quad)


def test_row_10_stopped_prefill_worker_is_noticed_and_left(quad: ProcessFleet, truth: Truth) -> None:
    stream = ask(quad, num_prompt=3500, num_tokens=20)
    stopped = find_busy(quad, "prefill")
    stopped.stop()
    truth.check(stream)
    wait_until(lambda: not is_alive(quad, stopped))
    print(f"row 10, prefill: answered after {stream.seconds:.2f} s")
    truth.check_canary(quad)


def test_row_10_ready_names_who_stopped(quad: ProcessFleet, truth: Truth) -> None:
    workers = [quad["decode-0"], quad["decode-1"]]
    for worker in workers:
        worker.stop()
    wait_until(lambda: HTTP.get(f"{quad.url}/ready", timeout=WAIT_S).status_code == 503)
    answer = HTTP.get(f"{quad.url}/ready", timeout=WAIT_S).text
    for worker in workers:
        assert re.search(f"{worker.address} (does not answer|has been silent)", answer), answer
    for worker in workers:
        worker.resume()
    wait_until(lambda: HTTP.get(f"{quad.url}/ready", timeout=WAIT_S).status_code == 200)
    truth.check_canary(quad)


def test_row_15_rude_clients_do_not_disturb_others(quad: ProcessFleet, truth: Truth) -> None:
    """A stream that is not read, a request that never ends, and a thousand silent sockets."""
    body = b'{"prompt": [7, 8, 9], "max_tokens": 3900, "stream": true, "ignore_eos": true, "model": "%s"}'
    model = HTTP.get(f"{quad.url}/v1/models", timeout=WAIT_S).json()["data"][0]["id"].encode()
    with ExitStack() as stack:
        sockets = [stack.enter_context(_connect(quad)) for _ in range(NUM_IDLE)]
        sockets[0].sendall(_head(len(body % model)) + body % model)
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert sockets[0].recv(1)
        sockets[1].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        sockets[2].sendall(_head(1000) + b"{")
        stream = ask(quad)
        truth.check(stream)
        print(f"row 15: 250 tokens beside {NUM_IDLE} rude sockets took {stream.seconds:.2f} s")
    quad.wait_until_unused()


def _connect(fleet: ProcessFleet) -> socket.socket:
    return socket.create_connection((HOST, fleet.gateway.port), timeout=WAIT_S)


def _head(length: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_row_22_random_bytes_at_every_port(quad: ProcessFleet, truth: Truth) -> None:
    starts = [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"]
    for process in quad.processes.values():
        for port in (process.port, process.ops_port):
            for start in starts:
                with socket.create_connection((HOST, port), timeout=WAIT_S) as peer:
                    try:
                        peer.sendall(start + os.urandom(10_000))
                        peer.shutdown(socket.SHUT_WR)
                        while peer.recv(1 << 16):
                            pass
                    except TimeoutError:
                        raise AssertionError(f"{process.name} keeps port {port} open after {start!r}") from None
                    except OSError:
                        continue  # closed while we connect, which is as good
    assert all(process.is_running for process in quad.processes.values())
    truth.check_crowd(quad)
