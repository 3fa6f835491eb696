"""The book: what is run, what is run again, and a report that a browser opens without a network."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from browsing import requested
from outrider.errors import ConfigurationError
from outrider_lab.book import pages, plan, readme, report, runs, svg
from outrider_lab.book.plan import OTHERS, OWN, BookRun
from outrider_lab.book.runs import Record
from outrider_lab.papers import app
from outrider_lab.papers.record import Store, entitle

HOSTILE = "<script>document.title = 'gone'</script>"


def names(found):
    return [run.name for run in found]


def test_every_experiment_is_in_the_book(tmp_path):
    """Those that need no model of one's own run anyway; the rest with --models, or are named."""
    known = {info.name for info in app.registered_commands} - set(OTHERS)
    found, absent = plan.planned(app, tmp_path, True, None)
    assert set(names(found)) | set(absent) == known | set(OWN)
    assert {"toy", "k-sweep", "speed", "wagner"} <= set(names(found))
    assert "--models" in absent["tasks"]
    toy = next(run for run in found if run.name == "toy")
    assert toy.words == ["bench", "toy", "--quick", "--out", str(tmp_path / "toy")]
    full, _ = plan.planned(app, tmp_path, False, None)
    assert not any("--quick" in run.words for run in full)


def test_models_of_ones_own_are_used(tmp_path):
    with pytest.raises(ConfigurationError, match="some of smollm2"):
        plan.planned(app, tmp_path, True, tmp_path)
    (tmp_path / "smollm2").mkdir()
    quick, _ = plan.planned(app, tmp_path, True, tmp_path)
    tasks = next(run for run in quick if run.name == "tasks")
    assert tasks.words[-2:] == ["--model", str(tmp_path / "smollm2")]
    assert {"chen-smollm2", "wagner-smollm2"} <= set(names(quick))
    full, absent = plan.planned(app, tmp_path, False, tmp_path)
    assert set(OWN) - set(names(full)) == {"alpha-speech"} == set(absent)
    assert "whisper-base and speech" in absent["alpha-speech"]
    for name in ("whisper-base", "speech"):
        (tmp_path / name).mkdir()
    full, absent = plan.planned(app, tmp_path, False, tmp_path)
    assert set(OWN) <= set(names(full))
    assert absent == {}


def test_what_has_times_runs_alone_and_the_rest_in_pairs(tmp_path):
    """Two counted runs meet at a barrier, which no run with times ever reaches in company."""
    both, going, most = threading.Barrier(2, timeout=10), [], Counter()

    def start(run, log):
        log.write_text("done\n")
        going.append(run.name)
        if not run.timed:
            both.wait()
        most[run.timed] = max(most[run.timed], len(going))
        going.remove(run.name)
        return 0

    words = {"speed": [], "toy": [], "alpha": [], "budget": ["--timed", "0"], "tree": []}
    words["draft-length"] = ["--timed", "0"]
    every = [BookRun(name, ["bench", name, *more]) for name, more in words.items()]
    assert [run.name for run in every if run.timed] == ["speed", "alpha"]
    assert runs.run_all(every, Record(tmp_path, True), lambda line: None, start) == []
    assert most == {False: 2, True: 1}


def test_counted_runs_take_a_thread_and_no_times(tmp_path):
    quick, _ = plan.planned(app, tmp_path, True, None)
    counted = {run.name: run.words for run in quick if not run.timed}
    assert set(counted) == {"toy", "tree", "theory", "draft-length", "budget"}
    assert counted["budget"][-4:] == ["--timed", "0", "--threads", "1"]
    full, _ = plan.planned(app, tmp_path, False, None)
    assert {run.name for run in full if not run.timed} == {"toy", "tree", "theory"}


def test_only_some(tmp_path):
    found, absent = plan.planned(app, tmp_path, True, None, ["speed", "toy"])
    assert sorted(names(found)) == ["speed", "toy"]
    assert absent["k-sweep"] == "left out by --only"
    with pytest.raises(ConfigurationError, match="known are"):
        plan.planned(app, tmp_path, True, None, ["nothing"])
    with pytest.raises(ConfigurationError, match="--models"):
        plan.planned(app, tmp_path, True, None, ["tasks"])


def test_what_has_ended_well_is_not_run_again(tmp_path):
    codes, started = {"one": 0, "two": 2, "three": 0}, []

    def start(run, log):
        started.append(run.name)
        log.write_text("first\nlast line\n")
        return codes[run.name]

    every = [BookRun(name, ["bench", name]) for name in codes]
    go = lambda: runs.run_all(every, Record(tmp_path, True), lambda line: None, start)  # noqa: E731
    assert go() == ["two"]
    assert started == ["one", "two", "three"]
    assert Record(tmp_path, True).document["runs"]["two"]["said"] == "last line"
    codes["two"] = 0
    assert go() == []
    assert started[3:] == ["two"]
    every[0] = BookRun("one", ["bench", "one", "--other"])
    assert go() == []
    assert started[4:] == ["one"]
    with pytest.raises(ConfigurationError, match="holds the quick book"):
        Record(tmp_path, False)


@pytest.mark.slow
def test_a_run_is_a_process_with_a_log(tmp_path):
    run = BookRun("none", ["bench", "none"])
    assert runs.start(run, tmp_path / "log") == 2
    assert "none" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_an_experiment_ends_with_its_book(tmp_path):
    """A book that is killed leaves no experiment behind; the same command goes on."""
    words = ["all", "--quick", "--only", "theory", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "outrider", "bench", *words]
    book = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def running():
        found = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found if alive(pid)}
        return [
            pid
            for pid, line in lines.items()
            if b"book.child" in line and str(tmp_path).encode() in line
        ]

    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        except OSError:
            return False

    def within(seconds, wanted):
        end = time.monotonic() + seconds
        while time.monotonic() < end and bool(running()) != wanted:
            time.sleep(0.2)
        return bool(running()) == wanted

    assert within(60, True)
    os.kill(book.pid, signal.SIGKILL)
    book.communicate()
    assert within(10, False)
    assert not (tmp_path / "theory" / "theory.json").exists()
    assert subprocess.run(command, check=False).returncode == 0
    assert Record(tmp_path, True).document["runs"]["theory"]["code"] == 0


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Results of a small experiment with its picture, and of a made-up one with odd contents."""
    folder = tmp_path_factory.mktemp("book")
    words = ["toy", "--quick", "--out", str(folder / "toy")]
    assert CliRunner().invoke(app, words).exit_code == 0
    store = Store(folder / "odd", "odd", {"model": "/home/me/models/small", "sizes": [1, 2]})
    rows = [{"name": f"{HOSTILE} {n}", "number": n / 3, "none": None} for n in range(50)]
    store.write({"long": rows, "published": [{"name": "a & b", "interval": "[1.00, 2.00]"}]})
    entitle(folder / "odd", "odd", f"Odd {HOSTILE}", {"long": "a long table"})
    Record(folder, True).keep(BookRun("odd", ["bench", "odd"]), 2, 1.0, "it failed")
    return folder


def test_the_report_opens_without_a_network(book, browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report.render(book), encoding="utf-8")
    browser.get(page.as_uri())
    every = lambda css: browser.find_elements("css selector", css)  # noqa: E731
    assert browser.title == "outrider: what was measured"
    found = {one.name: one for one in pages.read(book)}
    assert set(found) == {"toy", "odd"}
    for name, one in found.items():
        for table, rows in one.tables.items():
            (shown,) = every(f"#{name} table[data-table={table}]")
            lines = shown.find_elements("css selector", "tbody tr")
            assert len(lines) == min(len(rows), report.SHOWN)
            cells = [cell.text for cell in lines[0].find_elements("css selector", "td")]
            assert cells == [" ".join(report.shown(value).split()) for value in rows[0].values()]
        assert len(every(f"#{name} figure svg")) == len(one.pictures)
    assert every("#odd .published table")
    assert "10 rows more in odd/odd-long.csv" in every("#odd")[0].text
    assert "odd failed: it failed" in every("body")[0].text
    assert "small" in every("#odd dl")[0].text
    assert "/home/me" not in browser.page_source
    assert found["toy"].pictures
    for picture in every("figure svg"):
        assert min(picture.size["width"], picture.size["height"]) > 200
        marks = "return [...arguments[0].querySelectorAll('path, image, use, rect')].filter(m => {"
        marks += "const b = m.getBoundingClientRect(); return b.width > 0 && b.height > 0}).length"
        assert browser.execute_script(marks, picture) > 50
    outside = [url for url in requested(browser) if not url.startswith(("file://", "data:"))]
    assert outside == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_report_is_dark_in_the_dark_and_white_on_paper(book, browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report.render(book), encoding="utf-8")
    paper = "return getComputedStyle(document.body).backgroundColor"
    seen = {}
    for media, scheme in (("", "light"), ("", "dark"), ("print", "dark")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        given = {"media": media, "features": features}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", given)
        browser.get(page.as_uri())
        seen[media, scheme] = browser.execute_script(paper)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert seen["", "dark"] != seen["", "light"]
    assert seen["print", "dark"] == "rgb(255, 255, 255)"
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(printed["data"]) > 20_000


def test_an_outside_reference_would_be_seen(browser, tmp_path):
    """The control of the test above: the browser's log shows what a page asks for."""
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/picture.png">')
    browser.get(page.as_uri())
    assert "http://127.0.0.1:9/picture.png" in list(requested(browser))


def test_pictures_have_names_of_their_own_and_nothing_outside():
    text = """<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9"
      xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>x</metadata><script>1</script>
      <g id="a" onclick="go()" clip-path="url(#a)"><use xlink:href="#a"/>
      <image xlink:href="http://example.org/x.png"/><image xlink:href="data:image/png;base64,AA=="/>
      <path style="fill: url(http://example.org)"/></g></svg>"""
    found = svg.inline(text, "p-", 'a "label"')
    assert 'id="p-a"' in found
    assert 'href="#p-a"' in found
    assert "url(#p-a)" in found
    assert "data:image/png" in found
    for gone in ("example.org", "script", "metadata", "onclick", "width", "<?xml"):
        assert gone not in found


def test_pictures_belong_to_one_experiment(tmp_path):
    for name in ("alpha", "alpha-more"):
        Store(tmp_path, name, {}).write({"t": [{"a": 1}]})
        for picture in (name, f"{name}-speed"):
            (tmp_path / f"{picture}.svg").write_text("<svg/>")
    found = {page.name: [p.stem for p in page.pictures] for page in pages.read(tmp_path)}
    assert found == {
        "alpha": ["alpha", "alpha-speed"],
        "alpha-more": ["alpha-more", "alpha-more-speed"],
    }


def test_what_is_no_result_is_said(tmp_path):
    with pytest.raises(ConfigurationError, match="no results"):
        report.render(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no results"):
        report.render(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigurationError, match="no JSON document"):
        report.render(tmp_path)


def speeds(folder):
    settings = {"target": "shipped", "prompts": 30, "new tokens": 64, "drafted tokens": 4}
    settings |= {"dtype": "bfloat16", "packed": True, "threads": 1}
    row = {"T": 0.0, "tokens a call": 4.041, "times faster": 2.678, "interval": "[2.61, 2.75]"}
    row["sign"] = "+"
    Store(folder / "speed", "speed", settings).write({"speed": [row | {"ceiling": 2.59}]})


def test_readme_has_the_tables_of_a_folder(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- measured:start -->\nold\n<!-- measured:end -->\nafter\n")
    with pytest.raises(ConfigurationError, match="no results"):
        readme.rewrite(page, tmp_path)
    speeds(tmp_path)
    words = ["report", str(tmp_path), "--readme", str(page)]
    assert CliRunner().invoke(app, words).exit_code == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- measured:start -->\n| temperature |")
    assert text.endswith("<!-- measured:end -->\nafter\n")
    assert "| 0 | 4.04 | 2.68 [2.61, 2.75] | 2.59 |" in text
    assert "The shipped pair, 30 prompts, 64 tokens each, 4 drafted a step, bfloat16" in text
    assert "old" not in text
    assert (tmp_path / "report.html").is_file()
    page.write_text("nothing")
    with pytest.raises(ConfigurationError, match="has no place"):
        readme.rewrite(page, tmp_path)
    assert page.read_text() == "nothing"


def test_the_documents_of_the_book_are_json(book):
    assert json.loads((Path(book) / "runs.json").read_text())["book"] == "quick"
