"""Every page, live and offline from one file: drawn, accessible, readable at any width, asking nobody else."""

import re

import pytest
from browser_support import READY_MS, Watched, all_pages, served
from dashboard_support import sample_database

from schedsearch.measurement import Outcome
from schedsearch.records.store import Store

pytestmark = pytest.mark.browser

MODES = ("live", "offline")
PAGES = ("overview", "task", "trial", "compare", "records", "replay", "runs", "run")

EMPTY_PLOTS = """() => [...document.querySelectorAll(".plot")].filter((plot) => plot.offsetParent).filter((plot) => {
    const canvas = plot.querySelector("canvas");
    if (!canvas) return true;
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let index = 3; index < data.length; index += 4) if (data[index] > 0) return false;
    return true;
}).map((plot) => plot.getAttribute("aria-label"))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("mode", MODES)
def test_every_page_is_drawn_without_barriers_and_without_a_word_in_the_console(roots, watch, axe, mode, theme):
    watched: Watched = watch(roots[mode], theme)
    addresses = all_pages(watched)
    assert set(addresses) == set(PAGES)
    for name, address in addresses.items():
        page = watched.go(address)
        assert page.locator("h1").count() == 1, name
        if page.locator(".plot:visible").count():
            page.wait_for_selector("html[data-drawn=yes]", timeout=READY_MS)
        assert page.evaluate(EMPTY_PLOTS) == [], name
        page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
        page.evaluate(axe)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]] == [], name
    assert watched.problems == []
    assert watched.foreign_requests() == []


@pytest.mark.parametrize("width", [360, 1440, 3840])
def test_no_page_is_wider_than_its_window(roots, watch, width):
    watched: Watched = watch(roots["offline"], width=width)
    for name, address in all_pages(watched).items():
        page = watched.go(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate("parseFloat(getComputedStyle(document.documentElement).fontSize)") >= 15, name


def test_every_chart_has_a_table_of_its_numbers(roots, watch):
    watched: Watched = watch(roots["offline"])
    addresses = all_pages(watched)
    charts = 0
    for name in ("task", "trial", "compare", "replay", "run"):
        page = watched.go(addresses[name])
        for figure in page.locator("figure.chart:visible").all():
            if not figure.locator(".plot").is_visible():
                assert figure.locator("p.empty").inner_text().endswith("."), name  # words instead of a plot
                continue
            charts += 1
            assert figure.locator(".plot").get_attribute("aria-label").endswith("."), name
            figure.locator("summary").first.click()
            figure.locator("tbody tr").first.wait_for()
    assert charts >= 11


def test_the_keyboard_reaches_everything(roots, watch):
    watched: Watched = watch(roots["offline"])
    page = watched.go("#/")
    focused = "document.activeElement.textContent.trim()"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/")
    page.locator(".cards th button", has_text="Trials").focus()
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert page.evaluate(focused).startswith("Trials")  # sorting keeps the focus
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.locator("td.task a").first.focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=task]")
    assert page.evaluate("document.activeElement.id") == "main"
    page.go_back()
    page.wait_for_selector("main[data-page=overview]")


def test_the_keyboard_reaches_single_trials_of_a_chart(roots, watch):
    watched: Watched = watch(roots["offline"])
    page = watched.go(all_pages(watched)["task"])
    plot = page.get_by_role("slider").first
    page.get_by_role("button", name="Over seconds").focus()
    for _ in range(10):
        page.keyboard.press("Tab")
        if plot.evaluate("plot => plot === document.activeElement"):
            break
    ring = page.locator(".ring").first
    ring.wait_for()
    trials = page.locator("dl.facts div", has_text="Trials").locator("dd").first.inner_text().split()[0]
    assert plot.get_attribute("aria-valuemax") == trials
    page.keyboard.press("Home")
    words = plot.get_attribute("aria-valuetext")
    assert words.startswith("Trial 1: ") and "tile=64" in words  # the default is the first
    assert page.get_by_text(words).is_visible()
    left = ring.bounding_box()["x"]
    page.keyboard.press("PageUp")
    assert plot.get_attribute("aria-valuenow") == "11"
    assert ring.bounding_box()["x"] > left
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_selector("main[data-page=trial]")
    assert page.locator("h1").inner_text().startswith("Record 1")


def test_a_row_of_the_table_shows_its_dot(roots, watch):
    watched: Watched = watch(roots["offline"])
    page = watched.go(all_pages(watched)["task"])
    figure = page.locator("figure.chart").first
    figure.locator("summary").click()
    figure.locator("tbody a").nth(2).focus()
    figure.locator(".ring").wait_for()
    figure.locator("tbody a").nth(2).evaluate("link => link.blur()")
    figure.locator(".ring").wait_for(state="hidden")


def test_the_importance_of_knobs_comes_from_a_model_and_from_the_trials(roots, watch):
    for mode in MODES:
        watched: Watched = watch(roots[mode])
        page = watched.go(all_pages(watched)["task"])
        figure = page.locator("figure.chart", has_text="Importance of knobs")
        figure.get_by_text("Boosted trees, trained on").wait_for(timeout=READY_MS)
        assert "the first is tile" in figure.locator(".plot").get_attribute("aria-label")
        figure.locator("summary").click()
        assert "The model loses without it" in figure.locator("thead").inner_text()
        figure.get_by_role("button", name="From the trials").click()
        assert "Of the failures" in figure.locator("thead").inner_text()
        assert watched.problems == []


def test_the_switch_of_colours_is_kept(roots, watch):
    watched: Watched = watch(roots["live"], "light")
    page = watched.go("#/")
    theme = "document.documentElement.dataset.theme"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    assert page.evaluate(theme) == "light"
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate(theme) == "dark"
    assert page.evaluate(ground) != light
    watched.go("#/records")
    assert page.evaluate(theme) == "dark"
    page.emulate_media(color_scheme="light")
    assert page.evaluate(theme) == "dark"


def test_records_are_filtered_and_sorted(roots, watch):
    watched: Watched = watch(roots["offline"])
    page = watched.go("#/records")
    everything = page.locator("p.line").inner_text()
    page.locator("input[type=search]").fill("tile=128")
    page.wait_for_function("words => document.querySelector('p.line').textContent !== words", arg=everything)
    shown = page.locator("td[data-label=Config]").all_inner_texts()
    assert shown and all("tile=128" in text for text in shown)
    page.locator("input[type=search]").fill("no such text")
    page.get_by_text("No row matches the filter.").wait_for()
    page.locator("input[type=search]").fill("")
    page.get_by_label("Outcome").select_option("all failures")
    assert "ok" not in page.locator("tbody tr td:nth-child(3)").all_inner_texts()
    page.get_by_label("Outcome").select_option("ok")
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.get_by_role("button", name="Copy the command").first.click()
    assert re.fullmatch(r"schedsearch records show \d+ --db \S+\.db", page.evaluate("window.copied"))
    page.locator("th button", has_text="Time").click()
    first = page.locator("tbody tr td:nth-child(2)").first.inner_text()
    page.locator("th button", has_text="Time").click()
    assert page.locator("tbody tr td:nth-child(2)").first.inner_text() != first


def test_an_address_that_is_nothing_says_so(roots, watch):
    for mode in MODES:
        watched: Watched = watch(roots[mode])
        for address in ("#/nothing", "#/task/0.nothing", "#/trial/9.9", "#/compare/a/b", "#/task/%2e%2e%2f"):
            page = watched.go(address)
            assert page.locator("p.problem").inner_text(), address
            assert "Traceback" not in page.locator("main").inner_text()
        page.get_by_text("To the overview").click()
        page.wait_for_selector("main[data-page=overview]")


def test_the_server_is_asked_when_a_filter_needs_more_than_the_page_holds(tmp_path, watch):
    path = sample_database(tmp_path / "many.db", trials=400)
    with Store.open(path, readonly=True) as store:
        outcomes = [row.measurement.outcome for row in store.rows()]
    wrong = outcomes.count(Outcome.WRONG_ANSWER)
    with served(path) as root:
        page = watch(root).go("#/records")
        page.get_by_label("Outcome").select_option("wrong_answer")
        said = f"{wrong} of {len(outcomes):,} records."
        page.wait_for_function("said => document.querySelector('p.line').textContent === said", arg=said, timeout=READY_MS)
        page.get_by_label("Outcome").select_option("all")
        said = f"{len(outcomes):,} records; the newest 1,000 are listed."
        page.wait_for_function("said => document.querySelector('p.line').textContent === said", arg=said, timeout=READY_MS)
        assert "ok" in page.locator("tbody tr td:nth-child(3)").all_inner_texts()
