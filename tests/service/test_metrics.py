"""Prometheus metrics, and the dashboard that reads them."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from autopipe.core.stats import StageReport
from autopipe.service.totals import StageTotal, StageTotals
from tests.service.serving import ALIAS, Running, until

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def scrape(running: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels, model_name left out."""
    with urllib.request.urlopen(running.url + "/metrics", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == ALIAS
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(running: Running, name: str, **labels: str) -> float:
    return scrape(running).get(("autopipe:" + name, frozenset(labels.items())), 0.0)


def test_requests_are_counted_by_tokens_times_and_ends(running: Running, client: OpenAI) -> None:
    until(lambda: not running.service.num_open)
    before = scrape(running)

    def new(name: str, **labels: str) -> float:
        key = ("autopipe:" + name, frozenset(labels.items()))
        return scrape(running).get(key, 0.0) - before.get(key, 0.0)

    for _ in range(2):
        done = client.completions.create(
            model=ALIAS, prompt="abcabcabcabc", max_tokens=30, temperature=0, logit_bias={"257": -100}
        )
    assert done.usage is not None
    until(lambda: new("request_success_total", finished_reason="length") == 2)
    assert new("generation_tokens_total") == 60
    assert new("prompt_tokens_total") == 2 * done.usage.prompt_tokens
    assert new("time_to_first_token_seconds_count") == 2
    assert new("inter_token_latency_seconds_count") in range(1, 60)
    assert value(running, "num_requests_running") == value(running, "num_requests_waiting") == 0
    proposed = new("spec_decode_num_draft_tokens_total", stage="ngram")
    accepted = new("spec_decode_num_accepted_tokens_total", stage="ngram")
    assert proposed > 0
    assert 0 <= accepted <= proposed
    assert new("spec_decode_num_drafts_total", stage="target") > 0


def test_the_plan_in_force_is_a_gauge_with_its_properties(running: Running) -> None:
    names = [labels for (name, labels), _ in scrape(running).items() if name == "autopipe:plan_info"]
    assert [dict(labels) for labels in names] == [
        {"mode": "lockstep", "chain": "ngram(4)>target", "policy": "static", "pinned": "false"}
    ]


def test_openmetrics_is_given_to_who_asks_for_it(running: Running) -> None:
    request = urllib.request.Request(running.url + "/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.read().endswith(b"# EOF\n")


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=x", ";;=", "*/*", "\xe9"])
def test_an_accept_header_that_cannot_be_read_gets_plain_text(running: Running, accept: str) -> None:
    request = urllib.request.Request(running.url + "/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain")


def test_the_dashboard_asks_for_metrics_that_exist(running: Running) -> None:
    with urllib.request.urlopen(running.url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    known = set(re.findall(r"^# TYPE (autopipe:\w+)", text, re.MULTILINE))
    known |= {name + suffix for name in known for suffix in ("_bucket", "_sum", "_count")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name for panel in panels for query in panel["targets"] for name in re.findall(r"autopipe:\w+", query["expr"])
    }
    assert asked - known == set()
    assert len(asked) > 15


def test_sums_hold_finished_requests_and_those_under_way_once() -> None:
    totals = StageTotals()
    totals.count(1, [StageReport("a", proposed=4, accepted=2, acceptance_histogram={1: 1, 3: 1})])
    now = totals.now({1: [StageReport("a", proposed=4)], 2: [StageReport("a", proposed=3, accepted=3)]})
    assert (now["a"].proposed, now["a"].accepted) == (7, 5)
    assert now["a"].acceptance_rate == pytest.approx(5 / 7)
    assert totals.finished()["a"].proposed == 4
    totals.count(1, [StageReport("a", proposed=4)])  # for another client that waited for the same request
    assert totals.finished()["a"].proposed == 4
    assert now["a"].since(StageTotal(proposed=9)).proposed == 0
