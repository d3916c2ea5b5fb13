"""The queries of deploy/monitoring and deploy/kubernetes, and what they ask for."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
SELECTOR = re.compile(r"(baton:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(!?=~?)\s*"([^"]*)"')


def read_rules() -> list[dict[str, Any]]:
    """All alerts."""
    return [rule for group in yaml.safe_load(read_plain_rules())["groups"] for rule in group["rules"]]


def read_plain_rules() -> str:
    """For Prometheus without its operator: as prometheus-rule.yaml says in its first line."""
    command = ["sed", "1,/^spec:/d; s/^  //", str(MONITORING / "prometheus-rule.yaml")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_rule_tests() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    return tests


def read_panels() -> list[dict[str, Any]]:
    """The dashboard's panels without rows."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def read_queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and the query."""
    for rule in read_rules():
        yield rule["alert"], rule["expr"]
    for test in read_rule_tests():
        yield from ((test["name"], series["series"]) for series in test["input_series"])
    for panel in read_panels():
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for scaled in yaml.safe_load_all((DEPLOY / "kubernetes/autoscaling.yaml").read_text()):
        yield scaled["metadata"]["name"], scaled["spec"]["triggers"][0]["metadata"]["query"]
