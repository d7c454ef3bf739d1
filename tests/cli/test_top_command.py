from __future__ import annotations

import json

import pytest


def test_once_as_json_is_one_object_about_devices(invoke) -> None:
    result = invoke("top", "--once", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["pipeline"] is None


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_out_of_range_is_refused(invoke, interval: str) -> None:
    result = invoke("top", "--once", "--interval", interval)

    assert result.exit_code == 2
    assert "--interval" in result.stderr
