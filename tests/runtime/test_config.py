"""Settings are validated, and automatic choices follow from the machine."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, RolesConfig, ServeConfig
from runtime.config_parts import find_hosts
from runtime.settings import ConfigError, Settings, field_names, flag
from worker.startup.limits import complete
from worker.startup.pool_size import resolve_pools

DOCUMENT = (Path(__file__).parents[2] / "docs" / "CONFIGURATION.md").read_text()
CONFIG_TYPES = (PrefillConfig, DecodeConfig, RolesConfig, GatewayConfig, ServeConfig)
IN_WORDS = {  # the document's wording |-> the default it means
    "none": ("", ()),
    "demo": (("demo",),),  # of services, which may have several models
    "off": (False,),
    "on": (True,),
    "folder's name or hub id": ((),),
    "the model's": (0,),
    "1 on a GPU, else 0": (None,),
    "any where the roles share CPU cores, else 0": (None,),
    "none; `serve` draws one": ("",),
    "by device": (0,),
    "where there are several keys": (None,),
}
IN_OTHER_PLACES = {
    "--port, --grpc-port": f"`{ServeConfig.port}`, the next",
    "--tp, --prefill-tp, --decode-tp, serve": f"`{DecodeConfig.tp}`",
    "--pp, --prefill-pp, --decode-pp, serve": f"`{DecodeConfig.pp}`",
    "--num-hosts, --prefill-hosts, --decode-hosts, serve --ray": f"`{DecodeConfig.num_hosts}`",
}


NO_NAMES = ("", "//x", "a b", "a..b", "10.0.0.1", "[::1]", "a" * 64)


@pytest.mark.parametrize(
    ("config_type", "field", "value", "wanted"),
    [
        (ServeConfig, "port", 70000, "--port needs 0 to 65535"),
        (ServeConfig, "decode_workers", 0, "--decode-workers needs 1 or more"),
        (ServeConfig, "decode_tp", 0, "--decode-tp needs 1 or more"),
        (ServeConfig, "prefill_tp", 1025, "--prefill-tp needs 1024 or less"),
        (DecodeConfig, "tp", 0, "--tp needs 1 or more"),
        (PrefillConfig, "pp", 0, "--pp needs 1 or more"),
        (ServeConfig, "heartbeat_s", 60.0, "--heartbeat-s needs a number below --lease-s, which is 30"),
        (ServeConfig, "drain_s", -1.0, "--drain-s needs 0 or more"),
        (ServeConfig, "stall_s", 0.0, "--stall-s needs a number above 0"),
        (ServeConfig, "lease_s", 0.0, "--lease-s needs a number above 0"),
        (ServeConfig, "api_key", ("",), "--api-key needs keys"),
        (ServeConfig, "api_key", ("a b",), "--api-key needs keys"),
        (ServeConfig, "admin_key", "too-short", "BATON_ADMIN_KEY needs 16 or more"),
        (ServeConfig, "served_name", ("one", ""), "--served-name needs names of 1 to 200 characters"),
        (ServeConfig, "served_name", ("n" * 201,), "--served-name needs names of 1 to 200 characters"),
        (ServeConfig, "cors_origins", ("",), "--cors-origins needs origins such as https://app.example.com"),
        (ServeConfig, "lora", ("one",), "--lora needs NAME=PATH"),
        (ServeConfig, "lora", ("=path",), "--lora needs NAME=PATH"),
        (ServeConfig, "lora", ("n" * 201 + "=path",), "up to 200 characters"),
        (ServeConfig, "lora", ("one=a", "one=b"), "neither the model's nor given twice"),
        (ServeConfig, "model", "", "--model needs a folder"),
        (ServeConfig, "otlp_endpoint", "collector:4318", "--otlp-endpoint needs a URL such as"),
        (ServeConfig, "otlp_endpoint", "http://[::1", "--otlp-endpoint needs a URL such as"),
        (PrefillConfig, "page_tokens", 15, "--page-tokens needs a power of two"),
        (PrefillConfig, "chunk_tokens", 8, "--chunk-tokens needs 16 or more"),
        (PrefillConfig, "kv_memory_share", 1.5, "--kv-memory-share needs a number above 0 and at most 1"),
        (DecodeConfig, "host", "0.0.0.0", "--advertise-host needs the name by which others reach this --host 0.0.0.0"),
        (DecodeConfig, "host", "[::]", "--advertise-host needs the name by which others reach this --host [::]"),
        (DecodeConfig, "host", "fe80::1", "--host needs 127.0.0.1, or else --tls-dir"),
        (DecodeConfig, "require_transport", True, "--require-transport needs a --transport other than auto"),
        (ServeConfig, "local_prefill_max_tokens", 2**32, "--local-prefill-max-tokens needs 4294967295 or less"),
        (ServeConfig, "max_queue", 2**32, "--max-queue needs 4294967295 or less"),
        (ServeConfig, "body_limit_bytes", 2**31, "--body-limit-bytes needs 2147483647 or less"),
        (ServeConfig, "decode_max_running", -1, "--decode-max-running needs 0 or more"),
        (ServeConfig, "prefill_max_running", 2**32, "--prefill-max-running needs 4294967295 or less"),
        (ServeConfig, "chunk_tokens", 8, "--chunk-tokens needs 16 or more"),
        (ServeConfig, "prefill_workers", 10**9, "--prefill-workers needs 1024 or less"),
        (DecodeConfig, "max_running", 2**32, "--max-running needs 4294967295 or less"),
        (DecodeConfig, "page_tokens", 2**32, "--page-tokens needs 4294967295 or less"),
        (DecodeConfig, "kv_memory_mib", 10**9, "--kv-memory-mib needs 16777216 or less"),
        (DecodeConfig, "threads", 10**5, "--threads needs 4096 or less"),
        (DecodeConfig, "grammar_cpu_s", 10**6, "--grammar-cpu-s needs 86400 or less"),
        (GatewayConfig, "decode", (), "--decode needs at least one host:port"),
        (GatewayConfig, "decode", ("localhost",), "--decode needs host:port"),
        (GatewayConfig, "decode", ("::1:9001",), "127.0.0.1:9001, [::1]:9001, dns:NAME:9001 or file:PATH"),
        (GatewayConfig, "decode", ("dns:workers",), "write dns:NAME:PORT, or dns:_SERVICE._PROTO.NAME"),
        (GatewayConfig, "decode", ("dns:_grpc._tcp.workers:9000",), "write dns:NAME:PORT, or dns:_SERVICE._PROTO.NAME"),
        *((GatewayConfig, "decode", (f"dns:{name}:9000",), "write dns:NAME:PORT") for name in NO_NAMES),
        (ServeConfig, "no_prefill", "fail", "--no-prefill needs fallback, or a --prefill-workers of 1 or more"),
        (GatewayConfig, "decode", ("file:",), "names no file: write file:PATH"),
        (ServeConfig, "max_decode_workers", 3, "--max-decode-workers needs --ray"),
        (GatewayConfig, "dns_server", "10.0.0.10", "--dns-server needs an IP address and port"),
        (GatewayConfig, "dns_server", "localhost:53", "--dns-server needs an IP address and port"),
        (GatewayConfig, "no_prefill", "wait", "--no-prefill needs fallback, or a --prefill worker"),
        (ServeConfig, "goal_kv_usage", 0.0, "--goal-kv-usage needs a number above 0 and at most 1"),
        (GatewayConfig, "prefill", ("a:0",), "--prefill needs host:port"),
        (DecodeConfig, "host_rank", 1, "--host-rank needs 0 or less, as --num-hosts is 1"),
        (DecodeConfig, "num_hosts", 2, "--num-hosts needs a number that divides --tp, which is 1"),
        (ServeConfig, "decode_hosts", 2, "--decode-hosts needs --ray"),
    ],
)
def test_a_bad_value_is_refused_with_what_would_do(
    config_type: type[Settings], field: str, value: object, wanted: str
) -> None:
    needed: dict[str, object] = {"decode": ("a:1",)} if config_type is GatewayConfig else {}
    if field == "no_prefill" and config_type is ServeConfig:
        needed["prefill_workers"] = 0
    with pytest.raises(ConfigError) as refusal:
        config_type(**{**needed, field: value})
    assert wanted in str(refusal.value)


@pytest.mark.parametrize(
    ("tp", "pp", "hosts", "wanted"),
    [(2, 1, 3, "divides --decode-tp, which is 2"), (2, 3, 4, "--decode-tp x --decode-pp, 2 x 3, between stages")],
)
def test_nodes_share_ranks_evenly(tp: int, pp: int, hosts: int, wanted: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=wanted):
        ServeConfig(ray="auto", decode_tp=tp, decode_pp=pp, decode_hosts=hosts)
    assert ServeConfig(ray="auto", decode_tp=tp, decode_pp=pp, decode_hosts=tp * pp).decode_hosts == tp * pp


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e10])
@pytest.mark.parametrize("config_type", CONFIG_TYPES)
def test_no_time_is_endless(config_type: type[Settings], value: float) -> None:
    needed: dict[str, object] = {"decode": ("a:1",)} if config_type is GatewayConfig else {}
    times = [item.name for item in dataclasses.fields(config_type) if isinstance(item.default, float)]
    assert {"lease_s", "drain_s"} <= set(times)
    for name in [name for name in times if name.endswith("_s")]:
        with pytest.raises(ConfigError, match=f"{flag(name)} needs "):
            config_type(**{**needed, name: value})


@pytest.mark.parametrize("config_type", [PrefillConfig, DecodeConfig])
def test_peers_are_told_an_ipv6_address_in_brackets(config_type: type[PrefillConfig | DecodeConfig]) -> None:
    assert config_type(host="::1").reachable_host == config_type(host="[::1]").reachable_host == "[::1]"
    secret = "0123456789abcdef"
    anywhere = config_type(host="::", advertise_host="fd00::7", fleet_secret=secret)
    assert anywhere.reachable_host == "[fd00::7]"
    assert config_type(host="::", advertise_host="worker", fleet_secret=secret).reachable_host == "worker"
    assert GatewayConfig(decode=("[::1]:9001",)).decode == ("[::1]:9001",)


SPREAD: dict[str, Any] = {
    "tp": 4, "num_hosts": 2, "rendezvous": "10.0.0.1:9", "host": "10.0.0.2", "fleet_secret": "s" * 16,
}  # fmt: skip


def test_a_worker_over_several_hosts_needs_an_address_and_a_secret() -> None:
    assert PrefillConfig(**SPREAD, host_rank=1).ranks_here == 2 and PrefillConfig(tp=4).ranks_here == 4
    assert PrefillConfig(**SPREAD, pp=2).ranks_here == PrefillConfig(**SPREAD | {"tp": 2}, pp=4).ranks_here == 4
    assert PrefillConfig(**SPREAD | {"host": "127.0.0.1", "rendezvous": "127.0.0.1:9"}).num_hosts == 2
    for wrong, wanted in (
        ({"rendezvous": ""}, "--rendezvous needs the host:port at which host 0 waits"),
        ({"fleet_secret": "", "tls_dir": "tls"}, "without BATON_FLEET_SECRET"),
        ({"host": "127.0.0.1"}, "--host needs an address that the other hosts"),
        ({"host_rank": 2}, "--host-rank needs 1 or less"),
        ({"pp": 3}, "--num-hosts needs a number that divides --tp x --pp, 4 x 3, between stages"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            PrefillConfig(**SPREAD | wrong)


def test_a_leader_worker_set_says_how_many_hosts_there_are() -> None:
    asked = PrefillConfig(**SPREAD | {"num_hosts": 0, "rendezvous": ""})
    variables = {"LWS_LEADER_ADDRESS": "p-0.p.baton", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    found = find_hosts(asked, variables)
    assert (found.num_hosts, found.host_rank, found.rendezvous) == (2, 1, "p-0.p.baton:29500")
    own = dataclasses.replace(asked, rendezvous="other:1")
    assert find_hosts(own, variables).rendezvous == "other:1"
    assert find_hosts(PrefillConfig(), variables).num_hosts == 1, "only where that is asked for"
    with pytest.raises(ConfigError, match="LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX"):
        find_hosts(asked, variables | {"LWS_GROUP_SIZE": "two"})
    with pytest.raises(ConfigError, match="--num-hosts needs a number that divides --tp, which is 4"):
        find_hosts(asked, variables | {"LWS_GROUP_SIZE": "3"})


def test_shares_of_revisions_are_read_and_wrong_ones_named() -> None:
    given = GatewayConfig(decode=("d:1",), revision_weight=("new=0.1", "a=b=0"))
    assert given.revision_shares() == {"new": 0.1, "a=b": 0.0}
    for wrong, said in (
        (("new",), "needs NAME=SHARE"),
        (("new=x",), "needs NAME=SHARE"),
        (("new=1.5",), "from 0 to 1"),
        (("new=0.5", "new=0.1"), "twice"),
        (("=0.5",), "no name"),
    ):
        with pytest.raises(ConfigError, match=said):
            GatewayConfig(decode=("d:1",), revision_weight=wrong)


def test_traces_need_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig(otlp_endpoint="https://[::1]:4318/own").otlp_endpoint
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'baton[otel]'")):
        ServeConfig(otlp_endpoint="http://a:4318")


@pytest.mark.parametrize(
    ("port", "grpc_port", "expected"), [(8000, None, 8001), (0, None, 0), (65535, None, 0), (8000, 0, 0), (1, 9, 9)]
)
def test_the_grpc_port_follows_the_rest_port(port: int, grpc_port: int | None, expected: int) -> None:
    assert ServeConfig(port=port, grpc_port=grpc_port).grpc_listen_port == expected


@pytest.mark.parametrize(
    ("config", "available_mib", "pages"),
    [
        (DecodeConfig(max_running=4), 100_000, 4 * 63),  # room for every session
        (DecodeConfig(max_running=64, kv_memory_share=0.25), 1000, 250),
        (DecodeConfig(kv_memory_mib=77), 10, 77),
        (DecodeConfig(kv_memory_mib=62), 100, 0),
        (DecodeConfig(), 100, 0),
    ],
)
def test_pages_of_a_pool_in_main_memory(config: DecodeConfig, available_mib: int, pages: int) -> None:
    """A page of 16 tokens is 1 MiB here, a context of 1000 tokens 63 pages. With less it is refused."""

    def resolve() -> int:
        return resolve_pools(complete(config, None, None), 1000, 1 << 20, 1, None, available_mib << 20)[0]

    if pages:
        assert resolve() == pages
    else:
        with pytest.raises(ConfigError, match="--kv-memory-mib 63 or more"):
            resolve()


class TestDocument:
    """docs/CONFIGURATION.md agrees with the classes."""

    @staticmethod
    def rows() -> Iterator[tuple[str, str]]:
        """Flags and their documented defaults, from all tables."""
        for line in DOCUMENT.splitlines():
            if line.startswith(("| `--", "| `BATON_")):
                first, default = (cell.strip() for cell in line.split("|")[1:3])
                yield ", ".join(re.findall(r"`([^`]+)`", first)), default

    def test_defaults(self) -> None:
        rows = dict(self.rows())
        assert len(rows) > 30
        for flags, default in rows.items():
            if flags in IN_OTHER_PLACES:
                assert default == IN_OTHER_PLACES[flags]
                continue
            name = flags.removeprefix("--").removeprefix("BATON_").replace("-", "_").lower()
            types = [config_type for config_type in CONFIG_TYPES if name in field_names(config_type)]
            assert types, flags
            for config_type in types:
                actual = getattr(config_type, name)
                documented = default.strip("`")
                shown = f"{actual:.15g}" if isinstance(actual, int | float) else str(actual)
                assert documented == shown or actual in IN_WORDS.get(documented, ()), (flags, documented, actual)

    def test_defaults_below_the_tables(self) -> None:
        for name in ("prefill_workers", "decode_workers", "start_timeout_s"):
            assert flag(name) in DOCUMENT
        assert ServeConfig.prefill_workers is None and "(1, or 0 on GPUs of which decode workers need all)" in DOCUMENT
        assert ServeConfig.decode_workers == 1 and "`--decode-workers` (`1`)" in DOCUMENT
        assert ServeConfig.prefill_tp == ServeConfig.decode_tp == PrefillConfig.tp == DecodeConfig.tp
        assert ServeConfig.prefill_pp == ServeConfig.decode_pp == PrefillConfig.pp == DecodeConfig.pp
        assert ServeConfig.prefill_hosts == ServeConfig.decode_hosts == DecodeConfig.num_hosts
        assert f"`--start-timeout-s` (`{ServeConfig.start_timeout_s:g}`)" in DOCUMENT
        assert f"(of free memory, `{PrefillConfig.kv_memory_share:g}`;" in DOCUMENT

    def test_every_setting_is_there(self) -> None:
        for config_type in CONFIG_TYPES:
            for name in set(field_names(config_type)) - {"ready_fd"}:
                assert f"`{flag(name)}`" in DOCUMENT or f"`BATON_{name.upper()}`" in DOCUMENT, name
