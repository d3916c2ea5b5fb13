"""The containers' files agree with each other and with the program; nothing is built or run."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from runtime import rpc
from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig
from runtime.ops import PATHS, OpsServer
from tests.support import command_line

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HEAVY = {"torch", "safetensors", "xgrammar"}
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROFILES = ("cpu", "postgres", "gpu", "rdma")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
TEXTS = dict(zip(STAGES, re.split(r"^FROM .*$", DOCKERFILE, flags=re.MULTILINE)[1:], strict=True))
[CUDA] = re.findall(r"^ARG CUDA=(\S+)$", DOCKERFILE, re.MULTILINE)


def fill_in(text: str, values: Mapping[str, str] = MappingProxyType({})) -> str:
    """Compose's `${NAME:-default}`: values if set, otherwise the defaults."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: values.get(found[1], found[2]), text)


def parse(command: list[str], values: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The settings that the program reads from a container's command."""
    return command_line.parse(*(fill_in(word, values) for word in command))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret that deploy/.env gives to all processes, and what images set."""
    monkeypatch.setenv("BATON_FLEET_SECRET", "0123456789abcdef")
    [variable] = re.findall(r"BATON_\w+=\S+", DOCKERFILE)
    monkeypatch.setenv(*variable.split("="))


def read_by_compose(profile: str, **values: str) -> subprocess.CompletedProcess[str]:
    """What Compose itself makes of the file; needs no Docker."""
    words = (
        "-f",
        DEPLOY / "docker-compose.yaml",
        "--env-file=/dev/null",
        "--profile",
        profile,
        "config",
        "--format=json",
    )
    program = Path(sys.executable).with_name("docker-compose")
    return subprocess.run([program, *words], capture_output=True, text=True, env=values, timeout=60, check=False)


def find_services(role: str, profile: str) -> list[dict[str, Any]]:
    """The services of a profile that run a role."""
    return [one for one in SERVICES.values() if one.get("command", [""])[0] == role and profile in one["profiles"]]


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_itself_reads_the_file_as_these_tests_do(profile: str) -> None:
    given = {"BATON_FLEET_SECRET": "x" * 32, "MODEL": "a/b:Q4_K_M"}
    found = json.loads(read_by_compose(profile, **given).stdout)["services"]
    ours = {name: one for name, one in SERVICES.items() if profile in one["profiles"]}
    assert found.keys() == ours.keys()
    for name, service in ours.items():
        words = [fill_in(word, given) for word in service.get("command", ())]
        assert (found[name]["command"] or []) == words, name
    refusal = read_by_compose(profile)
    assert refusal.returncode == 1 and "BATON_FLEET_SECRET is missing a value: run  echo" in refusal.stderr


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_is_a_ring(profile: str) -> None:
    gateways, [prefill], [decode] = (find_services(role, profile) for role in ("gateway", "prefill", "decode"))
    gateway = gateways[0]
    settings, first, second = (parse(service["command"]) for service in (gateway, prefill, decode))
    assert isinstance(settings, GatewayConfig)
    assert isinstance(first, PrefillConfig)
    assert isinstance(second, DecodeConfig)
    for worker, found, (named,) in ((prefill, first, settings.prefill), (decode, second, settings.decode)):
        (alias,) = worker["networks"]["default"]["aliases"]
        assert (named, found.advertise_host) == (f"dns:{alias}:{found.port}", rpc.OWN_ADDRESS), "it can be scaled"
    assert settings.model == (first.model,) == (second.model,)
    assert first.device == second.device == ("cpu" if profile in ("cpu", "postgres") else "cuda")
    assert [fill_in(port).rsplit(":", 1)[1] for port in gateway["ports"]] == [
        str(settings.port),
        str(settings.grpc_listen_port),
    ]


def test_gateways_of_one_database_differ_in_their_ports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is in their network only, keeps its files in a volume, and is asked for after it answers."""
    gateways, database = find_services("gateway", "postgres"), SERVICES["postgres"]
    first, second = ({**one, "ports": ()} for one in gateways)
    assert first == second and len({port for one in gateways for port in one["ports"]}) == 4
    url = fill_in(first["environment"]["BATON_STATE_URL"], {"BATON_FLEET_SECRET": "abc"})
    monkeypatch.setenv("BATON_STATE_URL", url)
    assert parse(first["command"]).state_url == url == "postgresql://baton:abc@postgres/baton"
    assert first["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert database["environment"]["POSTGRES_USER"] == "baton" and "ports" not in database
    assert database["environment"]["POSTGRES_PASSWORD"] == first["environment"]["BATON_FLEET_SECRET"]
    assert database["healthcheck"]["test"][0:2] == ["CMD", "pg_isready"]
    [volume] = database["volumes"]
    assert volume.partition(":")[0] in COMPOSE["volumes"]


def test_every_process_gets_the_fleets_secret_and_none_starts_without() -> None:
    for service in SERVICES.values():
        if "command" in service:
            given = service["environment"]["BATON_FLEET_SECRET"]
            assert given.startswith("${BATON_FLEET_SECRET:?")
            assert not any("secret" in word for word in service["command"])


@pytest.mark.parametrize("profile", PROFILES)
def test_workers_share_namespaces_that_outlive_them(profile: str) -> None:
    workers = find_services("prefill", profile) + find_services("decode", profile)
    [holder] = {worker["pid"] for worker in workers}
    assert {worker["ipc"] for worker in workers} == {holder}
    service = SERVICES[holder.removeprefix("service:")]
    assert profile in service["profiles"]
    assert service["build"]["target"] in STAGES
    assert service["healthcheck"]["test"] == ["CMD", "true"], "Compose 2.26 waits for one"
    assert {worker["image"] for worker in workers} == {service["image"]}
    assert not any("build" in worker for worker in workers), "one service builds the image"
    assert {worker["pull_policy"] for worker in workers} == {"never"}
    assert service["ipc"] == "shareable"
    assert service["entrypoint"] == ["sleep", "infinity"]


def test_gpu_workers_see_the_same_gpus_and_use_different_ones() -> None:
    [prefill], [decode] = find_services("prefill", "gpu"), find_services("decode", "gpu")
    [first], [second] = (one["deploy"]["resources"]["reservations"]["devices"] for one in (prefill, decode))
    assert first["count"] == "all"
    assert second == first
    visible = [fill_in(one["environment"]["CUDA_VISIBLE_DEVICES"]).split(",") for one in (prefill, decode)]
    assert visible[0][0] != visible[1][0]
    assert sorted(visible[0]) == sorted(visible[1])


def test_ranks_and_transport_of_gpu_workers_are_variables() -> None:
    [prefill], [decode] = find_services("prefill", "gpu"), find_services("decode", "gpu")
    for worker, values in ((prefill, {"PREFILL_TP": "4"}), (decode, {"DECODE_TP": "4"})):
        assert parse(worker["command"], values).tp == 4
        default = parse(worker["command"])
        assert (default.tp, default.gpu_memory_share) == (1, 0), "a worker takes its GPU by the program's own share"
        assert worker["environment"]["BATON_TRANSPORT"] == "${TRANSPORT:-auto}"


def test_the_rdma_profile_is_that_of_gpus_with_what_nixl_needs() -> None:
    added = {"profiles": ["rdma"], "devices": ["/dev/infiniband"], "ulimits": {"memlock": -1}}
    for role in ("prefill", "decode"):
        [worker], [plain] = find_services(role, "rdma"), find_services(role, "gpu")
        environment = plain["environment"] | {"BATON_TRANSPORT": "nixl"}
        assert worker == plain | added | {"environment": environment}


def run_stage(stage: str, folder: Path, doubles: Mapping[str, str], at: int = -1, **arguments: str) -> str:
    """What the shell of a stage's last RUN, or another, prints, with `doubles` (name |-> script) for programs."""
    script = re.split(r"^RUN ", TEXTS[stage], flags=re.MULTILINE)[at].partition("\nCOPY")[0].replace("\\\n", "")
    script = re.sub(r"--mount=\S+", "", script).replace("/toolkit/", f"{folder}/toolkit/")
    for name, text in doubles.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    defaults = dict(re.findall(r"^ARG (\w+)=(\S*)$", TEXTS[stage].replace('""', ""), re.MULTILINE))
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CUDA": CUDA, **defaults, **arguments}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment, cwd=folder, timeout=60)
    return done.stdout + done.stderr


def test_the_cpu_image_has_no_triton_and_no_torch_for_gpus_where_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    lock = (DEPLOY / "worker-cpu-requirements.lock").read_text()
    (tmp_path / "deploy/worker-cpu-requirements.lock").write_text(lock)
    echo = {"pip": 'echo "$@"'}
    rest = tmp_path / "deploy/rest.lock"
    assert run_stage("build-worker-cpu", tmp_path, echo, 1) == "install --no-deps --require-hashes -r rest.lock\n"
    assert "\ntriton==" in lock and rest.read_text() == "".join(
        line for line in lock.splitlines(keepends=True) if not line.startswith("triton==")
    )
    found = run_stage("build-worker-cpu", tmp_path, echo, 1, TORCH_INDEX="INDEX")  # this pip brings no torch
    torch, refusal = found.splitlines()
    assert torch.startswith("install --no-deps --index-url INDEX torch==")
    assert refusal == "TORCH_INDEX=INDEX has no torch for CPUs: set it to the address of PyTorch's CPU wheel index"
    assert not re.search(r"^(torch|triton|nvidia|cuda)", rest.read_text(), re.MULTILINE)


def test_what_gpu_workers_compile_is_kept_in_their_volume() -> None:
    kept = re.findall(r"\b\w+_CACHE_(?:DIR|PATH)=(\S+)", TEXTS["worker-cuda"])
    assert len(kept) == 2 and all(path.startswith("/home/baton/.cache/") for path in kept), "FlashInfer's lies there"


def test_the_cuda_image_is_of_one_cuda_throughout(tmp_path: Path) -> None:
    """torch, NIXL and nvcc: CUDA 13's wheels are PyPI's, CUDA 12's are PyTorch's."""
    assert re.search(r"^FROM nvidia/cuda:\$\{CUDA\}-devel-ubuntu22.04 AS toolkit$", DOCKERFILE, re.MULTILINE)
    echo = {"pip": 'echo "$@"'}
    assert CUDA.startswith("13.0.")
    locked = "install --require-hashes -r deploy/worker-cuda-requirements.lock\ninstall --no-deps .\n"
    assert run_stage("build-worker-cuda", tmp_path, echo) == locked
    assert "\ntorch==2.11.0 " in (ROOT / "deploy/worker-cuda-requirements.lock").read_text()
    found = run_stage("build-worker-cuda", tmp_path, echo, CUDA="12.8.1", TORCH_INDEX="INDEX")
    assert found == "install --extra-index-url INDEX .[cuda,nixl-cu12] torch==2.11.0+cu128\n"
    refusal = run_stage("build-worker-cuda", tmp_path, echo, CUDA="12.8.1")
    assert refusal.startswith("CUDA=12.8.1: set TORCH_INDEX to") and "cu128 wheel index" in refusal
    refusal = run_stage("build-worker-cuda", tmp_path, echo, CUDA="12.6.3")
    assert refusal == "CUDA=12.6.3: set it to 13.0.2 or 12.8.1\n"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["nixl"][0].startswith("nixl-cu13>") and extras["nixl-cu12"][0].startswith("nixl-cu12>")


def test_flashinfers_modules_are_built_by_the_toolkit_for_the_architectures_that_are_asked_for(tmp_path: Path) -> None:
    for folder in ("cuda", "cuda-12", "cuda-12.8"):  # in NVIDIA's image the first two are links
        (tmp_path / "toolkit" / folder).mkdir(parents=True)
    python = {"python": 'echo "$CUDA_HOME $MAX_JOBS" "$@"'}
    for wanted in ("", "8.0 8.9"):
        found = run_stage("build-flashinfer", tmp_path, python, ARCHITECTURES=wanted)
        assert found == f"{tmp_path}/toolkit/cuda-12.8 4 -m bench.gpu_checks.prebuild /aot --architectures {wanted}\n"


def test_flashinfer_finds_its_modules_where_it_looks() -> None:
    [written] = re.findall(r"python -m bench\.gpu_checks\.prebuild (\S+)", TEXTS["build-flashinfer"])
    [(read, place)] = re.findall(r"^COPY --from=build-flashinfer (\S+) (\S+)$", TEXTS["worker-cuda"], re.MULTILINE)
    assert read == written
    assert place.startswith("/opt/baton/") and place.endswith("/site-packages/flashinfer/data/aot")
    [python] = set(re.findall(r"^FROM python:(\d\.\d+)-", DOCKERFILE, re.MULTILINE))
    assert f"/python{python}/" in place
    after = TEXTS["worker-cuda"].index("COPY --from=build-worker-cuda")
    assert TEXTS["worker-cuda"].index("COPY --from=build-flashinfer") > after, "otherwise it would be overwritten"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_can_be_built_watched_and_stopped(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["build"]["target"] in STAGES
    assert service["init"] is service["read_only"] is True
    assert service["restart"] == "unless-stopped"
    assert "healthcheck" in service
    assert "no-new-privileges:true" in service["security_opt"] and service["cap_drop"] == ["ALL"]
    assert service["pids_limit"] > 0 and {"max-size", "max-file"} <= service["logging"]["options"].keys()


def test_a_stuck_worker_ends_itself_as_docker_starts_nothing_else_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in find_services("prefill", "cpu") + find_services("decode", "gpu"):
        monkeypatch.setenv("BATON_EXIT_WHEN_STUCK", service["environment"]["BATON_EXIT_WHEN_STUCK"])
        assert parse(service["command"]).exit_when_stuck == 3


def test_the_gateway_cannot_write_where_workers_load_code_from() -> None:
    caches = {
        name: {one.partition(":")[0] for one in service["volumes"] if isinstance(one, str)}
        for name, service in SERVICES.items()
        if "command" in service
    }
    gateways = [caches.pop(name) for name in ("gateway", "gateway-a", "gateway-b")]
    assert gateways == [{"gateway-cache"}] * 3 and set.union(*caches.values()) == {"cache"}


def test_models_are_mounted_from_a_folder_that_is_there_and_that_git_ignores() -> None:
    mounts = [one for service in SERVICES.values() for one in service.get("volumes", ()) if isinstance(one, dict)]
    assert mounts and all(one["read_only"] and not one["bind"]["create_host_path"] for one in mounts)
    (source,) = {fill_in(one["source"]) for one in mounts}
    assert (DEPLOY / source / ".gitignore").read_text().splitlines()[1:] == ["*", "!.gitignore"]


def test_variables_of_the_hub_and_proxies_are_passed_on_where_they_are_set() -> None:
    for name, service in SERVICES.items():
        if "command" in service:
            given = [key for key, value in service["environment"].items() if value is None]
            assert {"HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} <= set(given), name


def test_the_health_check_asks_the_port_that_is_served() -> None:
    of_images = [json.loads(line) for line in re.findall(r"^HEALTHCHECK .*CMD (.*)$", DOCKERFILE, re.MULTILINE)]
    services = [service for service in SERVICES.values() if "command" in service]
    for service in services:
        settings = parse(service["command"])
        path = "/live" if isinstance(settings, GatewayConfig) else "/ready"
        command = ["python", "/opt/healthcheck.py", str(settings.ops_port), path]
        assert service["healthcheck"]["test"] == ["CMD", *command]
        assert command in of_images and settings.ops_host == "0.0.0.0"
    assert services and len(of_images) == 3


def test_gateway_requirements_are_the_projects_without_tensors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (DEPLOY / "gateway-requirements.txt").read_text().splitlines()
    wanted = [line for line in project["dependencies"] if re.split(r"[<>=\[]", line)[0] not in HEAVY]
    wanted += project["optional-dependencies"]["otel"] + project["optional-dependencies"]["postgres"]
    assert [line for line in lines if not line.startswith("#")] == wanted


def test_workers_for_cpus_import_no_triton() -> None:
    """PyTorch's wheels for CPUs do not bring it."""
    code = "import sys; sys.modules['triton'] = None; import decode_worker.main, prefill_worker.main, cli.doctor_probe"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def check_health(address: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEPLOY / "healthcheck.py"), address.rpartition(":")[2], path]
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment, timeout=60)


def test_the_health_check_asks_the_process_and_no_proxy() -> None:
    done = check_health(":1", "/live")
    assert done.returncode == 1 and "not healthy" in done.stderr
    with OpsServer("127.0.0.1", 0) as server:  # of a process that loads
        live, ready = (check_health(server.address, path, http_proxy="http://127.0.0.1:1") for path in PATHS[:2])
    assert live.returncode == 0, live.stderr
    assert ready.returncode == 1 and "503" in ready.stderr and "this process is loading" in ready.stderr
