"""Scripts in benchmarks/ find what they import; most are too long to run here."""

import runpy
import urllib.request
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_the_script_can_be_started(script, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    assert runpy.run_path(str(FOLDER / script), run_name="imported")


@pytest.mark.parametrize(("given", "others"), [("", False), ("example.org", True), ("*", True)])
def test_scripts_ask_a_server_here_past_proxies(given, others, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given)
    runpy.run_path(str(FOLDER / "loopback.py"))["past_proxies"]()
    bypassed = urllib.request.proxy_bypass_environment
    assert all(bypassed(host) for host in ("127.0.0.1:8000", "localhost"))
    assert bool(bypassed("example.org")) is others
