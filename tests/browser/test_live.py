"""A page that is open during a run changes by itself, stays as its reader left it, and says when the server is gone."""

import time

import pytest
from browser_support import READY_MS, Watched, served
from dashboard_support import add_trials, sample_database

from schedsearch.records.store import Store

pytestmark = pytest.mark.browser

TRIALS = "() => Number(document.querySelector('.facts div:nth-child(3) dd').firstChild.textContent.replace(/,/g, ''))"
CHART = "echarts.getInstanceByDom(document.querySelector('.plot'))"


def test_new_trials_appear_and_the_page_stays_as_it_was(tmp_path, watch):
    path = sample_database(tmp_path / "live.db", live=True)
    with served(path) as root:
        watched: Watched = watch(root)
        page = watched.go("#/")
        page.wait_for_function("() => document.querySelector('#connection').textContent === 'Live'")
        assert page.get_by_text("Running now").count() == 1
        before = page.evaluate(TRIALS)
        link = page.locator("tr", has_text="A100").locator("td.task a").first
        link.focus()
        page.evaluate("window.mark = document.activeElement.textContent; window.scrollTo(0, 77)")
        begin_s = time.monotonic()
        add_trials(path, 5)
        page.wait_for_function(f"before => ({TRIALS})() > before", arg=before, timeout=READY_MS)
        print(f"stored and shown in {time.monotonic() - begin_s:.2f} s")
        assert page.evaluate("document.activeElement.textContent === window.mark")
        assert page.evaluate("window.scrollY") == 77
        assert watched.problems == []


def test_a_chart_keeps_its_zoom_its_hidden_series_and_its_canvas(tmp_path, watch):
    path = sample_database(tmp_path / "live.db", live=True)
    with served(path) as root:
        watched: Watched = watch(root)
        page = watched.go("#/")
        watched.go(page.locator("tr", has_text="A100").locator("td.task a").first.get_attribute("href"))
        page.wait_for_function("() => document.querySelector('#connection').textContent === 'Live'")
        page.evaluate(f"{CHART}.dispatchAction({{ type: 'dataZoom', start: 20, end: 60 }})")
        page.locator(".legend button").first.click()
        page.evaluate("window.canvas = document.querySelector('.plot canvas')")
        records = "() => document.querySelector('.facts div:nth-child(5) dd').firstChild.textContent"
        before = page.evaluate(records)
        series = f"{CHART}.getOption().series.filter(Boolean).map((one) => one.id)"
        drawn = page.evaluate(series)
        add_trials(path, 7)
        page.wait_for_function(f"before => ({records})() !== before", arg=before, timeout=READY_MS)
        zoom = page.evaluate(f"{CHART}.getOption().dataZoom[0]")
        assert (round(zoom["start"]), round(zoom["end"])) == (20, 60)
        assert page.locator(".legend button").first.get_attribute("aria-pressed") == "false"
        assert page.evaluate(series) == drawn
        assert page.evaluate("window.canvas === document.querySelector('.plot canvas')")
        assert watched.problems == []


def test_a_page_says_when_its_task_is_gone_with_the_database(tmp_path, watch):
    path = sample_database(tmp_path / "a.db", trials=20)
    other = Store.open(tmp_path / "other.db")
    other.close()
    with served(path) as root:
        page = watch(root).go("#/")
        page.wait_for_function("() => document.querySelector('#connection').textContent === 'Live'")
        page.locator("td.task a").first.click()
        page.wait_for_selector("main[data-page=task]")
        (tmp_path / "other.db").replace(path)
        page.get_by_text("there is no task").wait_for(timeout=READY_MS)


def test_a_page_says_when_its_server_is_gone_and_comes_back_by_itself(tmp_path, watch):
    path = sample_database(tmp_path / "live.db", trials=20, live=True)
    with served(path) as root:
        watched: Watched = watch(root)
        page = watched.go("#/")
        page.wait_for_function("() => document.querySelector('#connection').textContent === 'Live'")
        before = page.evaluate(TRIALS)
    page.wait_for_function("() => document.querySelector('#connection').textContent.includes('gone')", timeout=READY_MS)
    assert page.locator("td.task a").count() > 0  # the last state stays
    add_trials(path, 3)
    with served(path, port=int(root.rstrip("/").rsplit(":", 1)[1])):
        page.wait_for_function("() => document.querySelector('#connection').textContent === 'Live'", timeout=READY_MS)
        page.wait_for_function(f"before => ({TRIALS})() > before", arg=before, timeout=READY_MS)
