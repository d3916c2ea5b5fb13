"""The Kubernetes manifests agree with each other and with the program; no cluster is asked.

The base's files are read as they are. Overlays are built by kubectl, and left out where there is none.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.certs import build_files
from runtime import rpc
from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig
from runtime.config_parts import find_hosts
from runtime.trust import TLS_FILES, TlsFiles, Trust
from tests.support import command_line
from wire.private_folders import IS_PRIVATE

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
VERSIONS = ("1.27", "1.37")  # the oldest and the newest that the manifests are for
FLEETS = {  # what people apply |-> folders
    "base": ("base",), "cpu": ("overlays/cpu",), "gpu": ("overlays/gpu",), "rdma": ("overlays/rdma",),
    "cpu with TLS": ("overlays/cpu", "overlays/tls"),
}  # fmt: skip
CONFIGS = {"gateway": GatewayConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
FIELDS = {"status.podIP": "10.0.0.7", "metadata.name": "baton-0"}
COMPONENT = "app.kubernetes.io/component"
BUFFER_S = 10
ELSEWHERE = {"kubernetes.io/metadata.name": "elsewhere"}
SYSTEM, RESOLVER = {"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """The pods of one Deployment or StatefulSet."""

    owner: Manifest
    flags: tuple[str, ...]  # its command line, with its variables filled in
    config: Any  # what Baton reads from it

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.owner["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.owner["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        return self.labels[COMPONENT]

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


@dataclass(frozen=True)
class Fleet:
    name: str
    manifests: list[Manifest]
    pods: dict[str, Pod]  # component |->

    def of_kind(self, kind: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] == kind]


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_FLEET_SECRET", "0123456789abcdef")
        manifests = list(build(FLEETS[request.param], tmp_path_factory.mktemp("kustomize")))
        owners = [one for one in manifests if one["kind"] in ("Deployment", "StatefulSet")]
        pods = [read_pod(owner, manifests) for owner in owners]
        yield Fleet(request.param, manifests, {pod.component: pod for pod in pods})


def build(parts: tuple[str, ...], folder: Path) -> Iterator[Manifest]:
    """The manifests of an overlay and components. folder: where to write what names them; made if it is not there."""
    if parts == FLEETS["base"]:
        for file in yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())["resources"]:
            yield from yaml.safe_load_all((KUBERNETES / "base" / file).read_text())
    elif shutil.which("kubectl") is None:
        pytest.skip("kubectl, which builds overlays, is not installed")
    else:
        resource, *components = (os.path.relpath(KUBERNETES / part, folder) for part in parts)
        folder.mkdir(exist_ok=True)
        kustomization = {"resources": [resource], "components": components}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        yield from yaml.safe_load_all(kustomize(folder))


def kustomize(folder: Path) -> str:
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def read_pod(owner: Manifest, manifests: list[Manifest]) -> Pod:
    """Kubernetes fills in variables; Baton's own parser reads the rest."""
    (container,) = owner["spec"]["template"]["spec"]["containers"]
    values = {entry["name"]: find_value(entry, owner, manifests) for entry in container["env"]}
    flags = tuple(re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["args"])
    return Pod(owner, flags, command_line.parse(*flags))


def find_value(entry: dict[str, Any], owner: Manifest, manifests: list[Manifest]) -> str:
    source = entry.get("valueFrom", {})
    if "fieldRef" in source:
        path = source["fieldRef"]["fieldPath"]
        return owner["metadata"].get("namespace", "baton") if path == "metadata.namespace" else FIELDS[path]
    if "configMapKeyRef" in source:
        wanted = source["configMapKeyRef"]
        (found,) = (
            one for one in manifests if one["kind"] == "ConfigMap" and one["metadata"]["name"] == wanted["name"]
        )
        return str(found["data"][wanted["key"]])
    return "" if "secretKeyRef" in source else str(entry["value"])


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector, of both forms, takes what has these labels."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ()))


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_kubernetes_own_schemas(fleet: Fleet, version: str) -> None:
    for manifest in fleet.manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_each_command_line_is_one_of_batons_and_finds_the_others(fleet: Fleet) -> None:
    assert {name: type(pod.config) for name, pod in fleet.pods.items()} == CONFIGS
    gateway = fleet.pods["gateway"].config
    for role, addresses in (("prefill", gateway.prefill), ("decode", gateway.decode)):
        pod, (address,) = fleet.pods[role], addresses
        _dns, name, port = address.split(":")
        (service,) = (one for one in fleet.of_kind("Service") if one["metadata"]["name"] == name)
        assert selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        assert pod.owner["spec"]["serviceName"] == name
        assert pod.config.port == int(port)
        assert (pod.config.model,) == gateway.model
        assert pod.owner["spec"]["podManagementPolicy"] == "Parallel"


def test_every_drain_ends_before_the_kubelet_kills(fleet: Fleet) -> None:
    for pod in fleet.pods.values():
        hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert hook[0] == "sleep"
        assert pod.spec["terminationGracePeriodSeconds"] >= int(hook[1]) + pod.config.drain_s + BUFFER_S
        assert pod.config.drain_s > 30, "answers last minutes"
    assert "preStop" in fleet.pods["gateway"].container["lifecycle"], "proxies must stop sending first"


def test_probes_ask_the_ops_port_and_wait_for_loading(fleet: Fleet) -> None:
    for pod in fleet.pods.values():
        first = "/live" if pod.component == "gateway" else "/ready"  # a gateway may wait for workers for long
        paths = {"startupProbe": first, "livenessProbe": "/live", "readinessProbe": "/ready"}
        for probe, path in paths.items():
            asked = pod.container[probe]["httpGet"]
            assert (asked["path"], pod.ports[asked["port"]]) == (path, pod.config.ops_port)
        assert pod.config.ops_host == "0.0.0.0"
        startup = pod.container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= (300 if pod.component == "gateway" else 1800)
        assert pod.spec["enableServiceLinks"] is False


def test_ports_have_the_numbers_that_flags_say_and_services_name_them(fleet: Fleet) -> None:
    for pod in fleet.pods.values():
        config = pod.config
        is_gateway = isinstance(config, GatewayConfig)
        serves = {"rest": config.port, "grpc": config.grpc_listen_port} if is_gateway else {"grpc": config.port}
        assert pod.ports == serves | {"ops": config.ops_port}
    for service in fleet.of_kind("Service"):
        (pod,) = (pod for pod in fleet.pods.values() if service["spec"]["selector"].items() <= pod.labels.items())
        for port in service["spec"]["ports"]:
            assert pod.ports[port["targetPort"]] == port["port"] and port["name"] == port["targetPort"]


def test_selectors_take_the_pods_of_one_component_each(fleet: Fleet) -> None:
    for pod in fleet.pods.values():
        assert selects(pod.owner["spec"]["selector"], pod.labels)
        (spread,) = pod.spec["topologySpreadConstraints"]
        assert selects(spread["labelSelector"], pod.labels)
    budgets = [one["spec"]["selector"] for one in fleet.of_kind("PodDisruptionBudget")]
    taken = [[name for name, pod in fleet.pods.items() if selects(selector, pod.labels)] for selector in budgets]
    assert sorted(taken) == [["decode"], ["gateway"], ["prefill"]]


def test_no_secret_is_in_the_files_and_every_pod_gets_the_fleets(fleet: Fleet) -> None:
    assert not fleet.of_kind("Secret")
    for pod in fleet.pods.values():
        given = {entry["name"]: entry for entry in pod.container["env"]}
        assert given["BATON_FLEET_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": "baton-fleet", "key": "secret"}}
        for name, entry in given.items():
            is_secret = name.startswith("BATON_") and name != IS_PRIVATE
            assert not is_secret or "secretKeyRef" in entry["valueFrom"]
            assert not is_secret or not entry["valueFrom"]["secretKeyRef"].get("optional"), (
                "none starts without its keys"
            )
        assert not any("key=" in flag or "secret=" in flag for flag in pod.flags)


def test_pods_trust_their_own_volumes_which_are_writable_by_all(fleet: Fleet) -> None:
    for pod in fleet.pods.values():
        assert {"name": IS_PRIVATE, "value": "1"} in pod.container["env"]


def test_pods_meet_the_restricted_profile(fleet: Fleet) -> None:
    (namespace,) = fleet.of_kind("Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    for pod in fleet.pods.values():
        spec, own = pod.spec, pod.container["securityContext"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True
        assert own["capabilities"]["drop"] == ["ALL"]
        added = own["capabilities"].get("add", [])
        assert (level, added) in [("restricted", []), ("privileged", ["IPC_LOCK"]), ("privileged", [])]
        assert {
            len(set(volume) - {"name"} - {"emptyDir", "persistentVolumeClaim", "secret"}) for volume in spec["volumes"]
        } == {0}
        assert spec["automountServiceAccountToken"] is False
    accounts = {one["metadata"]["name"]: one for one in fleet.of_kind("ServiceAccount")}
    assert {pod.spec["serviceAccountName"] for pod in fleet.pods.values()} == set(accounts)


def test_what_a_process_writes_to_is_a_volume(fleet: Fleet) -> None:
    for pod in fleet.pods.values():
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod.container["volumeMounts"]}
        assert {"/tmp", "/home/baton/.cache"} <= {path for path, volume in mounts.items() if "emptyDir" in volume}
        for entry in pod.container["env"]:
            if entry["name"].endswith(("_CACHE_DIR", "_CACHE_PATH")):
                assert entry["value"].startswith("/home/baton/.cache/")
        model = pod.config.model
        folder = re.match(r"/\w+", model if isinstance(model, str) else model[0])
        assert folder is None or folder[0] in mounts


def test_images_are_those_of_the_dockerfile_in_this_version(fleet: Fleet) -> None:
    stages = re.findall(r"^FROM runtime AS (\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    base = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())
    assert {one["newTag"] for one in base["images"]} == {version}
    if fleet.name != "base":  # which has no kind of worker
        for pod in fleet.pods.values():
            name, _, tag = pod.container["image"].partition(":")
            assert name.removeprefix("baton-") in stages and tag == version


def test_workers_have_the_devices_that_they_use(fleet: Fleet) -> None:
    for pod in (fleet.pods["prefill"], fleet.pods["decode"]) if fleet.name != "base" else ():
        limits = pod.container["resources"]["limits"]
        assert pod.config.device == ("cuda" if fleet.name in ("gpu", "rdma") else "cpu")
        assert limits.get("nvidia.com/gpu", 0) == (pod.config.tp if pod.config.device == "cuda" else 0)
        assert ("rdma/ib" in limits) == (pod.config.transport == "nixl") == (fleet.name == "rdma")
        assert getattr(pod.config, "require_transport", False) == (fleet.name == "rdma" and pod.component == "decode")


def admits(
    fleet: Fleet, pod: Pod, direction: str, port: int, peer: Mapping[str, str], namespace: Mapping[str, str]
) -> bool:
    """Whether the pod's policies let it be called at `port` (Ingress), or call it (Egress), by what has these labels.

    `namespace`: labels of the peer's; empty for the fleet's own.
    """

    def matches(one: dict[str, Any]) -> bool:
        if "ipBlock" in one:
            return "ip" in peer and ip_address(peer["ip"]) in ip_network(one["ipBlock"]["cidr"])
        if "namespaceSelector" in one:
            return selects(one["namespaceSelector"], namespace) and selects(one.get("podSelector", {}), peer)
        return not namespace and selects(one["podSelector"], peer)

    policies = [
        one["spec"] for one in fleet.of_kind("NetworkPolicy") if selects(one["spec"]["podSelector"], pod.labels)
    ]
    policies = [policy for policy in policies if direction in policy["policyTypes"]]
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), ())]
    side = "from" if direction == "Ingress" else "to"
    return not policies or any(
        (not rule.get(side) or any(matches(one) for one in rule[side]))
        and (not rule.get("ports") or port in [one["port"] for one in rule["ports"]])
        for rule in rules
    )


def test_network_policies_admit_what_is_needed(fleet: Fleet) -> None:
    calls = [("gateway", "prefill"), ("gateway", "decode"), ("prefill", "decode"), ("decode", "prefill")]
    for source, target in calls:
        caller, called = fleet.pods[source], fleet.pods[target]
        assert admits(fleet, called, "Ingress", called.config.port, caller.labels, {}), (source, target)
        assert admits(fleet, caller, "Egress", called.config.port, called.labels, {}), (source, target)
        ranks_port = 40_000  # of ranks other than 0, and of UCX: any free one
        is_open = admits(fleet, called, "Ingress", ranks_port, caller.labels, {})
        assert is_open == (source != "gateway" and called.config.device == "cuda"), (source, target)
    for pod in fleet.pods.values():
        assert admits(fleet, pod, "Ingress", pod.config.ops_port, {}, MONITORING)
        assert admits(fleet, pod, "Egress", 53, RESOLVER, SYSTEM)
        assert admits(fleet, pod, "Egress", 53, {"ip": "169.254.20.10"}, ELSEWHERE), "NodeLocal DNSCache"
    for port in (fleet.pods["gateway"].config.port, fleet.pods["gateway"].config.grpc_listen_port):
        assert admits(fleet, fleet.pods["gateway"], "Ingress", port, {}, ELSEWHERE)


def test_network_policies_admit_no_one_else(fleet: Fleet) -> None:
    stranger = {"app.kubernetes.io/name": "stranger"}
    for pod in fleet.pods.values():
        assert not admits(fleet, pod, "Ingress", pod.config.ops_port, stranger, ELSEWHERE)
        assert not any(admits(fleet, pod, "Egress", port, stranger, ELSEWHERE) for port in (53, 443, 9000))
        assert not any(admits(fleet, pod, "Egress", port, stranger, SYSTEM) for port in (53, 443))
        assert not admits(fleet, pod, "Egress", 53, {"ip": "9.9.9.9"}, ELSEWHERE)
        if pod.component != "gateway":
            for where in ({}, ELSEWHERE, MONITORING):
                assert not admits(fleet, pod, "Ingress", pod.config.port, stranger, where)


def test_roll_outs_never_take_the_last_gateway_or_worker(fleet: Fleet) -> None:
    assert fleet.pods["gateway"].owner["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    for pod in fleet.pods.values():
        assert pod.owner["spec"]["replicas"] >= 2
    assert {one["spec"]["maxUnavailable"] for one in fleet.of_kind("PodDisruptionBudget")} == {1}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds overlays, is not installed")
@pytest.mark.parametrize("overlay", ["cpu", "gpu", "rdma"])
def test_the_next_revision_is_the_same_workers_beside_those_that_serve(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_FLEET_SECRET", "0123456789abcdef")
    here = list(build((f"overlays/{overlay}",), tmp_path / "here"))
    following = list(build((f"overlays/{overlay}", "overlays/next"), tmp_path / "following"))
    assert sorted(one["kind"] for one in following) == ["ConfigMap", "StatefulSet", "StatefulSet"]
    names = {(one["kind"], one["metadata"]["name"]) for one in here}
    assert names.isdisjoint((one["kind"], one["metadata"]["name"]) for one in following)
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in here if one["kind"] == "Service"}
    before = {one["metadata"]["name"]: read_pod(one, here) for one in here if one["kind"] == "StatefulSet"}
    for owner in following[1:]:
        pod = read_pod(owner, following)
        old = before[owner["metadata"]["name"].removesuffix("-next")]
        assert pod.config == replace(old.config, revision="next")
        assert services[owner["spec"]["serviceName"]].items() <= pod.labels.items()
        assert selects(owner["spec"]["selector"], pod.labels) and not selects(owner["spec"]["selector"], old.labels)
        for version in VERSIONS:
            kubernetes_validate.validate(owner, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds overlays, is not installed")
@pytest.mark.parametrize("overlay", ["gpu", "rdma"])
def test_a_worker_of_two_hosts_is_the_same_one_in_a_leader_worker_set(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_FLEET_SECRET", "0123456789abcdef")
    alone = list(build((f"overlays/{overlay}",), tmp_path / "alone"))
    together = list(build((f"overlays/{overlay}", "overlays/hosts"), tmp_path / "together"))
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in together if one["kind"] == "Service"}
    sets = {one["metadata"]["name"]: one for one in together if one["kind"] == "LeaderWorkerSet"}
    before = {one["metadata"]["name"]: one for one in alone if one["kind"] == "StatefulSet"}
    assert sets.keys() == before.keys() == {"baton-prefill", "baton-decode"}
    assert not [one for one in together if one["kind"] == "StatefulSet"]
    for name, owner in sets.items():
        group = owner["spec"].pop("leaderWorkerTemplate")
        template = group.pop("workerTemplate")
        assert group == {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"}
        assert owner["spec"].keys() == {"replicas"} and owner["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        pod, old = (
            read_pod(before[name] | {"spec": before[name]["spec"] | spec}, together)
            for spec in ({"template": template}, {})
        )
        for version in VERSIONS:
            kubernetes_validate.validate(pod.owner, version, strict=True)
        configs = []
        for index in range(2):
            address = f"{name}-0.{name}.baton"  # by the Service of that name
            variables = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}
            configs.append(find_hosts(pod.config, variables))
            labels = pod.labels | {"leaderworkerset.sigs.k8s.io/worker-index": str(index)}
            assert (services[name].items() <= labels.items()) == (index == 0), "gateways dial what serves"
        hosts = {"tp": 2, "num_hosts": 2, "rendezvous": f"{address}:29500"}
        assert configs == [replace(old.config, **hosts, host_rank=rank) for rank in range(2)]
        assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == configs[0].ranks_here


async def test_the_certificate_that_the_tls_overlay_asks_for_names_all_workers(fleet: Fleet) -> None:
    assert {pod.config.tls_dir for pod in fleet.pods.values()} == {"/tls" if "TLS" in fleet.name else ""}
    hosts = re.findall(r"--host '?([^'\s]+)", (KUBERNETES / "overlays/tls/kustomization.yaml").read_text())
    made = build_files(tuple(hosts), datetime.now(UTC), timedelta(days=1))
    trust = Trust(TlsFiles(*(made[name][0] for name in TLS_FILES)))
    server = trust.build_server()
    address = f"127.0.0.1:{trust.bind(server, '127.0.0.1', 0)}"
    await rpc.start(server)

    async def ask(name: str) -> None:
        async with trust.open_channel(address, name) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)

    if "TLS" in fleet.name:
        gateway = fleet.pods["gateway"].config
        await ask(gateway.prefill[0].split(":")[1])
        await ask(gateway.decode[0].split(":")[1])
        await ask(fleet.pods["prefill"].config.advertise_host)
        await ask(fleet.pods["decode"].config.advertise_host)
    with pytest.raises(grpc.aio.AioRpcError):
        await ask("baton-0.elsewhere.baton.svc")
    await server.stop(None)
