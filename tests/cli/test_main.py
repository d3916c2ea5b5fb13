"""The command line: sources of settings, their precedence, and errors for unknown names."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cyclopts.exceptions import CycloptsError

from cli.plan import FEWER_S, PROGRAM, Bounds, build_flags, find_addresses, plan_gateway, plan_workers
from cli.screen import list_things_to_try, reachable, render_log_line
from cli.sources import VARIABLES
from demo.paths import TARGET_DIR
from engine.adapters.peft import find_digest
from engine.compose import resolve_model_folder
from runtime.config import DecodeConfig, GatewayConfig, PrefillConfig, RolesConfig, ServeConfig
from runtime.events import Loading, Ready, parse_event
from runtime.settings import ConfigError, field_names
from tests.support.combinations import combination
from tests.support.command_line import bind, call, parse
from tests.support.ipv6 import needs_ipv6
from tests.support.live import START_S
from wire.files import DeniedError
from worker.startup.models import (
    check_model,
    choose_served_name,
    choose_served_names,
    fetch_tokenizer,
    locate_model,
    name_models,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "baton.toml"
    path.write_text(text)
    return path


# -- precedence: command line > environment > file > default ---------------------------------------------------------


def test_each_source_beats_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 'port = 1\nmax_queue = 1\ndtype = "float16"\n')
    monkeypatch.setenv("BATON_PORT", "2")
    monkeypatch.setenv("BATON_MAX_QUEUE", "2")
    config = parse("serve", "--port", "3", file=file)
    assert (config.port, config.max_queue, config.dtype, config.device) == (3, 2, "float16", "auto")
    monkeypatch.undo()
    assert parse("prefill") is None and parse("serve") is None


def test_lists_come_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 'prefill = ["a:1", "b:2"]\ndecode = ["c:3"]\n')
    assert parse("gateway", file=file).prefill == ("a:1", "b:2")
    monkeypatch.setenv("BATON_PREFILL", "x:1,y:2")
    monkeypatch.setenv("BATON_API_KEY", "one two")
    monkeypatch.setenv("BATON_PREFILL_WORKERS", "7")  # `serve`'s; must not be taken for `--prefill`
    config = parse("gateway", file=file)
    assert (config.prefill, config.decode, config.api_key) == (("x:1", "y:2"), ("c:3",), ("one", "two"))
    assert parse("gateway", "--prefill=q:1", "--prefill=r:1", file=file).prefill == ("q:1", "r:1")
    monkeypatch.setenv("BATON_API_KEY", "")
    assert parse("gateway", "--decode=a:1").api_key == ()


@pytest.mark.parametrize("keys", ["one,two", "one two", " one"])
def test_clients_send_the_first_of_several_keys(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["status"],
        ["chat"],
        ["drain", "h:2"],
        ["launch", "codex"],
        ["bench", "serve"],
        ["bench", "contexts"],
        ["bench", "overload"],
    ):
        monkeypatch.setenv("BATON_API_KEY", keys)
        found = bind(*words)
        assert found.get("api_key") == "one" or found["options"].api_key == "one"


def test_an_empty_variable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Compose passes one that is not set."""
    file = write(tmp_path, "port = 1\n")
    for words in (
        ["serve"],
        ["doctor"],
        ["prefill"],
        ["decode"],
        ["gateway", "--decode=a:1"],
        ["status"],
        ["bench", "serve"],
    ):
        unset = bind(*words)
        for name in VARIABLES:
            monkeypatch.setenv(name, "")
        assert bind(*words) == unset
    monkeypatch.setenv("BATON_PORT", "")
    assert parse("serve", file=file).port == 1
    monkeypatch.setenv("BATON_PROT", "")
    with pytest.raises(ConfigError, match="did you mean BATON_PORT"):
        parse("serve")


def test_a_file_has_the_options_of_any_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names may be spelt as on the command line."""
    assert parse("decode", file=write(tmp_path, "max-running = 5\nrequire_transport = false\n")).max_running == 5
    service = write(tmp_path, 'url = "http://h:1"\napi_key = "k"\n')
    for command in (["chat"], ["status"], ["drain", "h:2"]):
        found = bind(*command, file=service)
        assert (found["url"], found["api_key"]) == ("http://h:1", "k")
        assert bind(*command, "--url=http://i:1", file=service)["url"] == "http://i:1"
    monkeypatch.setenv("BATON_CONFIG", str(write(tmp_path, "port = 1\n")))
    assert bind("status") == {} and parse("serve").port == 1, "the variable applies only to processes of a service"
    assert bind("bench", "serve", file=write(tmp_path, 'concurrency = "1,2"\n'))["options"].concurrency == "1,2"


# -- unknown names and bad values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text", "refusal"),
    [
        (("serve", "--max-que", "1"), "", "--max-que"),
        (("serve",), "max_que = 1\n", r"key in .*baton\.toml: max_que; did you mean max_queue"),
        (("decode",), "prefill_workers = 1\n", "prefill_workers"),  # of another command
        (("status",), "port = 1\n", "unknown key .*: port"),
        (("serve",), "port = ", "not valid TOML"),
        (("serve",), "port = 1\nport = 2", "not valid TOML"),
        (("serve",), 'port = "x"', "port"),
        (("serve",), "port = [1, 2]", "give one value"),
        (("serve",), 'model = {a = "b"}', "give one value"),
        (("serve",), 'dtype = "int3"', "int3"),
    ],
)
def test_a_file_or_flag_that_cannot_be_used(tmp_path: Path, words: tuple[str, ...], text: str, refusal: str) -> None:
    with pytest.raises((CycloptsError, ConfigError), match=refusal):
        parse(*words, file=write(tmp_path, text))


def test_variables_and_files_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("serve", file=tmp_path / "none.toml")
    monkeypatch.setenv("BATON_MAX_QUE", "1")
    with pytest.raises(ConfigError, match="BATON_MAX_QUE; did you mean BATON_MAX_QUEUE"):
        parse("decode")


# -- what the program says -------------------------------------------------------------------------------------------


def test_help_imports_no_torch_and_the_version_is_that_of_the_package() -> None:
    code = "import sys, cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=START_S).returncode == 0
    assert call("--version").stdout.strip() == version("baton")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        combination(("doctor", "--device=cpu"), "torch"),
        (("serve", "--port=0"), "torch"),
        combination(("prefill",), "torch"),
        combination(("decode",), "torch"),
        (("bench", "kernels"), "torch"),
        combination(("bench", "steps", "/dev/null"), "torch"),
        (("decode",), "xgrammar"),
    ],
)
def test_a_command_says_which_package_it_lacks(words: tuple[str, ...], missing: str) -> None:
    done = without((missing,), *words)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"baton {words[0]} needs {missing}, which is not installed here: ")


@pytest.mark.parametrize(
    "words", [combination(("--help",)), ("plan", "--model=8B", "--gpu=h100"), combination(("bench", "serve", "--help"))]
)
def test_what_needs_no_tensors_runs_where_gateways_do(words: tuple[str, ...]) -> None:
    done = without(("torch", "safetensors", "xgrammar"), *words)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def without(packages: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    """The program where these cannot be imported."""
    hidden = f"import sys; sys.modules |= dict.fromkeys({packages!r}); from cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True, timeout=START_S)


def test_the_program_alone_says_what_to_do_first() -> None:
    done = call()
    assert (done.returncode, done.stderr) == (0, "")
    shown = [line.split("  ")[1] for line in done.stdout.splitlines() if line.startswith("  baton")]
    for words in shown:
        name, *options = words.split()[1:]
        assert parse(name, *options) is not None or bind(name, *options) is not None, words
    assert [words.split()[1] for words in shown] == ["serve", "chat", "status", "doctor", "serve"]


def test_a_bad_setting_is_one_line_and_a_status(tmp_path: Path) -> None:
    said = "baton: port=-1 cannot be used: --port needs 0 to 65535; 0 takes any free port\n"
    done = call("decode", "--port=-1")
    assert (done.returncode, done.stderr) == (2, said)
    done = call("serve", "--port=7000", "--grpc-port=7000")
    assert done.returncode == 2 and "grpc_port=7000 is also the port of REST" in done.stderr
    assert call("serve", "--no-such-flag").returncode == 2
    file = write(tmp_path, "prot = 1")
    assert "did you mean port?" in call("serve", BATON_CONFIG=str(file)).stderr
    assert "did you mean port?" in call("--config", str(file), "serve").stderr
    done = call("plan", "--ttft", "500")
    text = " ".join(done.stderr.replace("│", " ").split())
    assert (done.returncode, "plan needs --model, --gpu." in text) == (2, True), "all that is missing"
    assert "Did you mean --model llama3?" in call("serve", "llama3").stderr


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_in_use_is_reported_before_anything_loads(host: str) -> None:
    family, shown = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        for name in ("", "ops-"):
            done = call("serve", f"--{name}host={shown}", f"--{name}port={port}", f"--model={Path(__file__).parent}")
            assert (done.returncode, done.stdout) == (2, "")
            assert f"{name.replace('-', '_')}port={port} on host {shown} cannot be used (Address already" in done.stderr


# -- the command lines that `serve` gives its processes --------------------------------------------------------------

CONFIG = ServeConfig(
    model=("/m",), host="0.0.0.0", port=9, ops_host="::1", ops_port=8, prefill_workers=2, threads=3, transport="grpc",
    require_transport=True, prefill_max_running=5, decode_max_running=6, api_key=("k", "l"), max_queue=7,
    max_context_tokens=99, otlp_endpoint="http://c:1",
)  # fmt: skip


def test_workers_get_what_is_theirs() -> None:
    specs = plan_workers(CONFIG, program=("baton",))
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0"]
    prefill, decode = parse(*specs[0].command[1:]), parse(*specs[2].command[1:])
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert (prefill.host, prefill.port, prefill.max_running, prefill.threads) == ("127.0.0.1", 0, 5, 3)
    assert (prefill.ops_host, prefill.ops_port) == (decode.ops_host, decode.ops_port) == ("127.0.0.1", 0)
    assert (decode.transport, decode.require_transport, decode.max_running) == ("grpc", True, 6)
    assert prefill.kv_memory_share == decode.kv_memory_share == pytest.approx(0.5 / 3)


def test_processes_of_a_service_log_json_whatever_the_service_shows() -> None:
    config = replace(CONFIG, log_level="debug", log_format="text")
    for spec in (*plan_workers(config, program=("baton",)), plan_gateway(config, (), ("c:1",), ("baton",))):
        found: Any = parse(*spec.command[1:])
        assert (found.log_level, found.log_format) == ("debug", "auto")


def test_who_may_call_is_the_gateways() -> None:
    access: dict[str, Any] = {
        "api_keys_file": "/k.toml",
        "allowed_host": ("a", "*.b"),
        "tls_cert": "/c",
        "tls_key": "/k",
    }
    for by_key in (None, False, True):
        config = replace(CONFIG, cache_salt_by_key=by_key, **access)
        found: Any = parse(*plan_gateway(config, (), ("c:1",), ("baton",)).command[1:])
        assert found.cache_salt_by_key is by_key
        assert {name: getattr(found, name) for name in access} == access


def test_adapters_are_the_gateways_and_make_room_on_workers() -> None:
    url = "postgresql://user:password@host/name"
    config = replace(CONFIG, lora=("one=/a", "two=/b=c"), admin_key="0123456789abcdef", state_url=url)
    assert config.lora_paths(("name",)) == {"name": {"one": "/a", "two": "/b=c"}}
    assert {plan.settings.max_loras for plan in plan_workers(config)} == {8}
    assert {plan.settings.max_loras for plan in plan_workers(replace(config, max_loras=1))} == {1}
    assert {plan.settings.max_loras for plan in plan_workers(CONFIG)} == {0}
    spec = plan_gateway(config, (), ("c:1",), ("baton",))
    found = parse(*spec.command[1:])
    assert isinstance(found, GatewayConfig) and (found.lora, found.admin_key) == (config.lora, "")
    assert spec.environment["BATON_ADMIN_KEY"] == config.admin_key
    assert spec.environment["BATON_STATE_URL"] == url and not any("password" in word for word in spec.command)
    with pytest.raises(ConfigError, match="neither the model's"):
        replace(config, served_name=("one",))
    with pytest.raises(ConfigError, match="neither a model's"):
        config.lora_paths(("two", "three"))


def test_models_without_answers_have_prefill_workers_alone() -> None:
    (alone,) = plan_workers(replace(CONFIG, prefill_workers=0), embedding=[""])
    assert (alone.name, alone.role) == ("prefill-0", "prefill")
    config = replace(CONFIG, model=("chat=demo", "texts=minilm"), prefill_workers=1, decode_workers=2)
    roles = [(plan.name, plan.settings.model) for plan in plan_workers(config, embedding=["texts"])]
    chat = [(f"chat {name}", "demo") for name in ("prefill-0", "decode-0", "decode-1")]
    assert roles == [*chat, ("texts prefill-0", "minilm")]


def test_each_model_has_its_workers_and_memory_is_for_those_awake() -> None:
    config = replace(CONFIG, model=("a=/m", "b=org/n", "c=demo"), prefill_workers=1, lora=("x=/x@b", "y=/y@z"))
    specs = plan_workers(config)
    assert [spec.name for spec in specs] == [f"{name} {role}-0" for name in "abc" for role in ("prefill", "decode")]
    decode = parse(*specs[3].command[len(PROGRAM) :])
    assert isinstance(decode, DecodeConfig) and (decode.model, decode.model_name) == ("org/n", "b")
    assert decode.kv_memory_share == pytest.approx(0.5 / 6)
    assert plan_workers(replace(config, max_awake=2))[0].settings.kv_memory_share == pytest.approx(0.5 / 4)
    gpus = plan_workers(replace(config, max_awake=1, device="auto"), ("0", "1"))
    assert [spec.gpus for spec in gpus] == [(0,), (1,)] * 3 and {one.settings.gpu_memory_share for one in gpus} == {0.9}
    gateway = parse(*plan_gateway(config, (), ("c:1",)).command[len(PROGRAM) :])
    assert isinstance(gateway, GatewayConfig) and gateway.model == config.model
    assert gateway.lora_paths(("a", "b", "c")) == {"a": {"y": "/y@z"}, "b": {"x": "/x"}, "c": {}}
    for wrong in ({"served_name": ("d",)}, {"draft_model": "/d"}, {"model": ("",)}):
        with pytest.raises(ConfigError):
            replace(config, **wrong)


def test_workers_that_change_roles_have_both_and_begin_with_one() -> None:
    config = replace(CONFIG, roles="auto", prefill_workers=1, decode_workers=2, chunk_tokens=64)
    specs = plan_workers(config)
    assert [(spec.name, spec.role) for spec in specs] == [(f"worker-{number}", "worker") for number in range(3)]
    settings = [parse(*spec.command[len(PROGRAM) :]) for spec in specs]
    assert all(isinstance(one, RolesConfig) and one.local_prefill_chunk_tokens == 64 for one in settings)
    assert [getattr(one, "role", "") for one in settings] == ["prefill", "decode", "decode"]
    ready = [Ready(spec.role, f"a:{number + 1}", "", 1, "i") for number, spec in enumerate(specs)]
    assert find_addresses(ready) == (("a:1", "a:2", "a:3"),) * 2
    gateway = parse(*plan_gateway(config, *find_addresses(ready)).command[len(PROGRAM) :])
    assert isinstance(gateway, GatewayConfig) and gateway.roles == "auto"
    for wrong in ({"decode_tp": 2, "prefill_tp": 1}, {"decode_pp": 2}, {"ray": "auto"}):
        with pytest.raises(ConfigError):
            replace(config, **wrong)


def test_the_gateway_gets_the_public_side_and_no_key_on_its_command_line() -> None:
    spec = plan_gateway(replace(CONFIG, served_name=("name", "*")), ("a:1", "b:1"), ("c:1",), ("baton",))
    config = parse(*spec.command[1:])
    assert isinstance(config, GatewayConfig)
    assert (config.host, config.port, config.served_name, config.max_queue) == ("0.0.0.0", 9, ("name", "*"), 7)
    assert (config.ops_host, config.ops_port) == ("::1", 8)
    assert (config.prefill, config.decode, config.max_context_tokens) == (("a:1", "b:1"), ("c:1",), 99)
    assert (config.api_key, config.otlp_endpoint) == ((), "http://c:1")
    assert spec.environment == {"BATON_API_KEY": "k,l"}


@pytest.mark.parametrize(
    "config",
    [
        ServeConfig(port=0, grpc_port=0, cors_origins=("*", "http://a"), lease_s=7.5, require_transport=False),
        ServeConfig(transport="shm", require_transport=True, served_name=("a b", "*"), max_queue=1),
    ],
)
def test_flags_build_the_same_settings(config: ServeConfig) -> None:
    assert parse("serve", *build_flags(config)) == config


def test_workers_follow_the_load_at_once_when_it_grows_and_later_when_it_falls() -> None:
    bounds = Bounds(1, 4)
    course = [
        (0, 1, 3),
        (1, 3, 9),
        (2, 4, 0),
        (60, 4, 1),
        (62, 4, 1),
        (63, 3, 1),
        (121, 3, 3),
        (122, 3, 1),
        (181, 3, 1),
    ]
    assert [bounds.choose(have, needed, now) for now, have, needed in course] == [3, 4, 4, 4, 3, 3, 3, 3, 3]
    assert bounds.choose(3, 1, 122 + FEWER_S) == 2
    assert bounds.choose(0, 0, 300) == 1 and Bounds(2, 2).choose(2, 9, 0) == 2


def test_every_setting_of_a_process_can_be_set_through_serve() -> None:
    own = {"model_name", "advertise_host", "kv_memory_share", "ready_fd", "prefill", "decode", "dns_server"}
    own |= {"kv_events", "kv_events_replay"}  # an endpoint is one worker's
    own |= {"num_hosts", "host_rank", "rendezvous"}  # a service is on one machine
    own |= {"revision_weight", "on_revision_gone"}  # one service, one revision
    own |= {"role"}  # one worker's
    by_role = {"max_running", "tp", "pp"}  # such as prefill_tp
    for config_type in (PrefillConfig, DecodeConfig, RolesConfig, GatewayConfig):
        assert set(field_names(config_type)) - set(field_names(ServeConfig)) <= own | by_role
    assert {f"{role}_{name}" for role in ("prefill", "decode") for name in by_role} <= set(field_names(ServeConfig))


# -- a model's name --------------------------------------------------------------------------------------------------


def test_model_names(tmp_path: Path) -> None:
    assert choose_served_name("demo") == "baton-demo"
    assert choose_served_name("org/name") == locate_model("org/name") == "org/name"
    assert choose_served_name(str(tmp_path)) == tmp_path.name
    assert choose_served_name("/gone/away") == "away"
    assert choose_served_names((), "demo") == ("baton-demo",)
    assert choose_served_names(("*",), "demo") == ("baton-demo", "*")
    assert choose_served_names(("*", "a", "b"), "demo") == ("a", "b", "*")
    odd = tmp_path / "x=y"
    odd.mkdir()
    assert name_models(("demo",), ("n", "*")) == {"n": "demo"}
    assert name_models(("demo", "n=demo", str(odd), "org/q=z"), ("*",)) == {
        "baton-demo": "demo", "n": "demo", "x=y": str(odd), "org/q=z": "org/q=z",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--model needs names that differ"):
        name_models(("demo", "baton-demo=org/n"), ())
    assert fetch_tokenizer(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ConfigError, match="set --model to a folder"):
        fetch_tokenizer(str(tmp_path / "none"))


def test_a_folder_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    """Each fault in turn is put right until the folder passes."""
    files = {
        "has no configuration: put config.json": ("config.json", b"{}"),
        "has no tokenizer: put tokenizer.json or": ("tokenizer.json", b"{}"),
        "has no weights: put": ("model.safetensors", b""),
        r"cannot be used \(.*config.json: model_type None": ("config.json", (TARGET_DIR / "config.json").read_bytes()),
        r"cannot be used \(.*tokenizer.json: ": ("tokenizer.json", b'{"model": {}}'),
        r"cannot be used \(.*model.safetensors is truncated": ("model.safetensors", b"\2" + bytes(7) + b"{}"),
    }
    for refusal, (name, content) in files.items():
        with pytest.raises(ConfigError, match=f"{refusal}.* set --draft-model"):
            check_model(str(tmp_path), option="draft_model")
        (tmp_path / name).write_bytes(content)
    assert check_model(str(tmp_path)) == tmp_path


@pytest.fixture
def shared() -> Iterator[Path]:
    """A copy of the demo model that every user may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "models" / "one"
        shutil.copytree(TARGET_DIR, folder)
        paths = (Path(name), folder.parent, folder, *folder.iterdir())
        for path in paths:
            path.chmod(0o755)
        yield folder
        for path in paths:
            path.chmod(0o755)


@contextmanager
def not_root() -> Iterator[int]:
    """Its user, in which this process acts meanwhile."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(before)


READERS: dict[str, Callable[[str], object]] = {
    "files": check_model,
    "files of a draft": lambda model: check_model(model, option="draft_model"),
    "folder": fetch_tokenizer,
    "gguf": lambda model: locate_model(f"{model}/x.gguf"),
    "worker": lambda model: resolve_model_folder(model),
    "adapter": lambda model: find_digest(Path(model)),
}


@pytest.mark.parametrize(
    ("denied", "mode", "verb", "readers"),
    [
        (".", 0o600, "enter", [*READERS]),
        (".", 0o311, "enter", set(READERS) - {"gguf"}),  # it may not be listed
        ("..", 0o600, "enter", [*READERS]),
        ("config.json", 0o000, "read", ["files"]),
        ("tokenizer.json", 0o000, "read", ["files"]),
        ("model.safetensors", 0o000, "read", ["files", "files of a draft"]),
    ],
)
def test_what_this_user_may_not_read_is_refused_with_owner_and_mode(
    shared: Path, denied: str, mode: int, verb: str, readers: Collection[str]
) -> None:
    path = (shared / denied).resolve()
    path.chmod(mode)
    with not_root() as user:
        said = (
            f"user {user} may not {verb} {path}, which belongs to user {path.parent.stat().st_uid} with mode {mode:04o}"
        )
        for reader in readers:
            with pytest.raises((ConfigError, DeniedError), match=re.escape(said)):
                READERS[reader](str(shared))
        done = call("serve", "--device=cpu", "--port=0", "--model", str(shared))
        assert done.returncode == 2 and done.stderr.startswith(f"baton: {said}: allow it")
        assert done.stderr.endswith(", or set --model to another\n")


def test_a_hub_id_passes_until_its_files_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert check_model("org/name") is None
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("1")
    (snapshot / "config.json").touch()
    assert check_model("org/name") is None, "a gateway fetched some of its files"
    with pytest.raises(ConfigError, match="cannot be used"):
        check_model("org/name", ("configuration",))


@pytest.mark.parametrize(
    ("command", "model", "said"),
    [
        ("serve", "/nope", "there is no folder /nope"),
        ("decode", "a b", "'a b' is neither a folder nor a hub id"),
        ("plan", "/nope", "there is no folder /nope"),
    ],
)
def test_a_model_that_is_not_there_is_said_in_the_same_words(command: str, model: str, said: str) -> None:
    done = call(command, f"--model={model}", {"plan": "--gpu=H100"}.get(command, "--port=0"))
    assert done.returncode == 2 and f"{said}: set --model to a folder, a hub id such as" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_gateway_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    done = call("gateway", "--decode=127.0.0.1:1", f"--model={tmp_path}")
    assert done.returncode == 2
    assert f"the model in {tmp_path} has no tokenizer: put tokenizer.json or tokenizer.model there" in done.stderr


# -- texts for users -------------------------------------------------------------------------------------------------


def test_events_travel() -> None:
    assert parse_event('{"event": "loading", "done": 1, "total": 2}') == Loading(1, 2)
    line = '{"event":"ready","role":"decode","address":"a:1","ops_address":"","pid":3,"incarnation":"i"}'
    assert parse_event(line) == Ready("decode", "a:1", "", 3, "i")
    for line in ("", "[]", "{}", '{"event": "gone"}', '{"event": "loading"}', '"loading"'):
        with pytest.raises(ValueError, match="event"):
            parse_event(line)


def test_log_lines_become_readable() -> None:
    assert render_log_line('{"event": "gone", "level": "info", "role": "x", "port": 1}') == "info gone port=1"
    assert render_log_line('{"event": "ready"}') is None
    for line in ("plain", "3"):
        assert render_log_line(line) == line


def test_three_things_to_try_can_be_copied() -> None:
    text = list_things_to_try("http://h:1", "m", needs_key=True)
    curl = text[text.index("curl") : text.index("Ctrl-C")]
    assert subprocess.run(["bash", "-n", "-c", curl], timeout=60).returncode == 0
    assert "$BATON_API_KEY" in curl and '"model": "m"' in curl
    assert "baton chat --url http://h:1\n" in text
    assert "baton chat\n" in list_things_to_try("http://127.0.0.1:8000", "m", needs_key=False)


def test_a_service_on_all_interfaces_is_called_by_loopback() -> None:
    assert reachable("0.0.0.0:80") == "127.0.0.1:80"
    assert reachable("[::]:80") == reachable("[0::0]:80") == "127.0.0.1:80"  # it listens there, too
    assert reachable("[::1]:80") == "[::1]:80"
    assert reachable("10.0.0.1:80") == "10.0.0.1:80"


def test_a_process_frees_nothing_at_its_end_but_writes_all_and_keeps_its_code() -> None:
    code = """
import atexit, sys
from cli import main

class Held:
    def __del__(self): print("freed")

held = Held()
main.main = lambda: (atexit.register(print, "registered"), print("written"), sys.exit(3))
main.run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "written\nregistered\n", "")
