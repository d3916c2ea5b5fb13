"""Alerts, their tests and the dashboard are complete and agree with each other.

tests/services/demo/test_monitoring_service.py compares them with the metrics of running processes.
"""

import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_kubernetes import KUBERNETES, kustomize
from tests.support.monitoring import (
    DEPLOY,
    MATCHER,
    MONITORING,
    read_panels,
    read_plain_rules,
    read_queries,
    read_rule_tests,
    read_rules,
)

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@needs_promtool
@pytest.mark.parametrize(
    "command", ["test rules rules_test.yaml", "check rules rules.yaml", "check config prometheus.yaml"]
)
def test_promtool_passes(command: str, tmp_path: Path) -> None:
    for name in ("rules_test.yaml", "prometheus.yaml"):
        shutil.copy(MONITORING / name, tmp_path)
    (tmp_path / "rules.yaml").write_text(read_plain_rules())
    done = subprocess.run(["promtool", *command.split()], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_panels_and_autoscalers_have_queries_that_prometheus_parses(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "5m") for _place, query in read_queries()]
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", "rules.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_each_alert_explains_itself() -> None:
    for rule in read_rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
    assert max(Counter(rule["alert"] for rule in read_rules()).values()) == 1


def test_each_alert_is_tested_quiet_and_firing() -> None:
    cases = defaultdict[str, set[bool]](set)
    for test in read_rule_tests():
        for case in test["promql_expr_test"]:
            wanted = {label: value for label, _sign, value in MATCHER.findall(case["expr"])}
            assert wanted["alertstate"] == "firing"
            cases[wanted["alertname"]].add(bool(case.get("exp_samples")))
    assert cases == {rule["alert"]: {True, False} for rule in read_rules()}


def test_each_panel_has_a_unit_a_place_and_the_chosen_data_source() -> None:
    places = set()
    for panel in read_panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert 'namespace="$namespace"' in target["expr"] and target["legendFormat"]
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
        assert panel["gridPos"]["w"] == 8 and panel["gridPos"]["x"] in (0, 8, 16)
    assert len(places) == len(read_panels()) == len({panel["id"] for panel in read_panels()})


def test_prometheus_reads_the_ops_port_of_every_pod() -> None:
    monitor = yaml.safe_load((MONITORING / "pod-monitor.yaml").read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (relabeling,) = endpoint["relabelings"]
    assert relabeling["targetLabel"] == "component"
    for role in ("gateway", "prefill", "decode"):
        pods = next(iter(yaml.safe_load_all((KUBERNETES / f"base/{role}.yaml").read_text())))["spec"]["template"]
        assert monitor["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
        assert pods["metadata"]["labels"]["app.kubernetes.io/component"] == role
        assert endpoint["port"] in {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    (job,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    assert [one["labels"]["component"] for one in job["static_configs"]] == ["gateway", "prefill", "decode"]


def test_autoscalers_scale_the_stateful_sets() -> None:
    for scaled in yaml.safe_load_all((DEPLOY / "kubernetes/autoscaling.yaml").read_text()):
        name = scaled["spec"]["scaleTargetRef"]["name"]
        owner = next(iter(yaml.safe_load_all((KUBERNETES / f"base/{name.removeprefix('baton-')}.yaml").read_text())))
        assert (owner["kind"], owner["metadata"]["name"]) == (scaled["spec"]["scaleTargetRef"]["kind"], name)
        assert f'role="{name.removeprefix("baton-")}"' in scaled["spec"]["triggers"][0]["metadata"]["query"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_monitoring_of_a_cluster_can_be_built() -> None:
    built = {one["kind"]: one for one in yaml.safe_load_all(kustomize(MONITORING))}
    assert set(built) == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    assert built["ConfigMap"]["data"]["dashboard.json"] == (MONITORING / "dashboard.json").read_text()
    namespaces = {one["metadata"]["namespace"] for one in built.values()}
    assert namespaces == {yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())["namespace"]}
