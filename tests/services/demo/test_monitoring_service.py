"""Alerts, dashboard and autoscalers ask for metrics and labels that running processes expose."""

import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support.live import Live, read_families
from tests.support.monitoring import MATCHER, SELECTOR, read_queries
from tests.support.oracle import random_prompt
from tests.support.surface import VOCAB, Surface

OF_THE_SCRAPE = {"component", "namespace", "instance"}  # labels that a target has
CLOSED = {"le", "role", "state"}  # labels whose values are all there from the start
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}

Labels = dict[str, set[str]]  # label |-> its values
Exposed = dict[str, dict[str, Labels | None]]  # component |-> name of a sample |-> labels; None: no sample yet


@pytest.fixture(scope="module")
def exposed(demo: Live, surface: Surface) -> Exposed:
    surface.ask(random_prompt(100, VOCAB, seed=17), max_tokens=4, cache_salt="monitoring")
    found: Exposed = defaultdict(dict)
    for process, url in demo.metrics_urls.items():
        names = found[process.partition("-")[0]]
        for family in read_families(url):
            names |= {family.name + suffix: None for suffix in SUFFIXES.get(family.type, ("",))}
            for sample in family.samples:
                names[sample.name] = labels = names.get(sample.name) or {}
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    return found


def find_faults(exposed: Exposed, query: str) -> Iterator[str]:
    """What the query asks for and no process has."""
    groups = {label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(", ")}
    known = [set(OF_THE_SCRAPE)]
    for name, matchers in SELECTOR.findall(query):
        asked = {label: (sign, value) for label, sign, value in MATCHER.findall(matchers)}
        having = {component for component, names in exposed.items() if name in names}
        wanted = set(asked["component"][1].split("|")) if "component" in asked else having
        if not wanted or not wanted <= having:
            yield f"{name} is of {having or 'no process'}"
            continue
        if "component" not in asked | dict.fromkeys(groups) and len(having) > 1:
            yield f"{name} is of {having}, which mean different things by it"
        labels = exposed[min(wanted)][name]
        if labels is None:
            known.append(groups)
            continue
        known.append(set(labels))
        for label in asked.keys() - OF_THE_SCRAPE:
            sign, value = asked[label]
            if label not in labels or (label in CLOSED and sign == "=" and value not in labels[label]):
                yield f"{name} has no {label}={value}"
    yield from (f"nothing has a label {label}" for label in groups - set().union(*known))


def test_queries_ask_for_what_processes_expose(exposed: Exposed) -> None:
    faults = [f"{place}: {fault}" for place, query in read_queries() for fault in find_faults(exposed, query)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "query",
    [
        "baton:no_such_metric",
        'baton:leases_expired_total{component="gateway"}',
        "rate(baton:num_requests_running[5m])",
        'baton:workers{role="decoder"}',
        'baton:time_to_first_token_seconds_bucket{le="3.0"}',
        "sum by (reason) (baton:attempts_failed_total)",
    ],
)
def test_other_queries_are_noticed(exposed: Exposed, query: str) -> None:
    assert len(list(find_faults(exposed, query))) == 1
