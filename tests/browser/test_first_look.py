"""What a reader sees first, and whether all of it is drawn: the overview, marks of doubt, zoom, maps, timelines, paper."""

import re

import pytest
from browser_support import READY_MS, Watched, all_pages, served, write_report
from dashboard_support import A100, H200, raced_database, sample_database
from test_pages import EMPTY_PLOTS

pytestmark = pytest.mark.browser

CPU = "cpu:512:2:AMD EPYC"
QUIET = tuple(100_000.0 + each for each in (0, 40, -30, 10, 60, -50, 20, 5, -10, 70, -60, 30, -20, 15, 25, 35))
DEFAULT = tuple(2.0 * each for each in QUIET)
TWO_GROUPS = (10_000.0, 10_100.0, 9_950.0, 10_040.0) * 2 + (40_000.0, 40_500.0, 39_800.0, 40_100.0) * 2


@pytest.fixture(scope="module")
def noisy_files(tmp_path_factory):
    """Two databases of a CPU; one of the tasks has repetitions in two groups."""
    folder = tmp_path_factory.mktemp("noisy")
    one = raced_database(folder / "a.db", (DEFAULT, QUIET), (DEFAULT, TWO_GROUPS), target=CPU)
    other = raced_database(folder / "b.db", (DEFAULT, tuple(0.8 * each for each in QUIET)), target=CPU)
    return one, other


@pytest.fixture(scope="module")
def noisy(noisy_files, tmp_path_factory):
    """Where their pages are: {"live": ..., "offline": ...}."""
    report = write_report(tmp_path_factory.mktemp("report") / "report.html", *noisy_files)
    with served(*noisy_files) as live:
        yield {"live": live, "offline": report}


def drawn(page):
    page.wait_for_selector("html[data-drawn=yes]", timeout=READY_MS)
    return page


def test_the_task_table_begins_within_the_first_500_pixels(roots, noisy, watch):
    for root in (*roots.values(), *noisy.values()):
        page = watch(root, width=1280, height=800).go("#/")
        first = page.locator("table tbody tr").filter(has=page.locator("td.task")).first.bounding_box()
        assert first["y"] + first["height"] < 500


def test_no_tile_says_what_another_says(roots, watch):
    page = watch(roots["offline"]).go("#/")
    labels = page.locator("dl.facts dt").all_inner_texts()
    assert len(labels) == len(set(labels))


def test_tasks_are_grouped_by_database_and_sorted_inside_their_group(roots, sample_files, watch):
    page = watch(roots["offline"]).go("#/")
    heads = page.locator("tr.group th").all_inner_texts()
    assert [head.split()[0] for head in heads] == [path.name for path in sample_files[:2]]
    assert all(re.search(r"3 tasks . \d+ trials .* over the default, mean of 3 tasks", head) for head in heads)
    page.locator("th button", has_text="Trials").click()
    assert page.locator("tr.group").count() == 2
    for body in page.locator("table.cards tbody").all():
        trials = [int(text.split()[0]) for text in body.locator("td[data-label=Trials]").all_inner_texts()]
        assert trials == sorted(trials, reverse=True) and len(trials) == 3


def test_one_database_needs_no_group(tmp_path, watch):
    with served(sample_database(tmp_path / "a.db", trials=10)) as root:
        assert watch(root).go("#/").locator("tr.group").count() == 0


@pytest.mark.parametrize("mode", ["live", "offline"])
def test_a_time_of_two_groups_is_marked_wherever_it_is_shown(noisy, watch, mode):
    watched: Watched = watch(noisy[mode])
    page = watched.go("#/")
    row = page.locator("tr", has=page.get_by_text("two groups"))
    assert row.count() == 1
    headline = page.locator("dl.facts div").first.inner_text()
    assert "2.24×" in headline and "1 not to be trusted" in headline  # of 2 and 2.5; the third task is left out
    page.get_by_text("Why 1 speed-up is not to be trusted").click()
    assert page.get_by_text("50% near 10.02 us and 50% near 40.05 us").is_visible()
    row.locator("td.task a").click()
    page.wait_for_selector("main[data-page=task]")
    assert "two groups" in page.locator("dl.facts").first.inner_text()
    assert "fall into two groups" in page.locator("p.problem").inner_text()
    page.locator("a[data-key=best]").click()
    page.wait_for_selector("main[data-page=trial]")
    assert "fall into two groups" in page.locator("p.problem").inner_text()
    assert watched.problems == []


def test_a_cpu_has_no_numbers_that_mean_nothing_there(noisy, roots, watch):
    watched: Watched = watch(noisy["offline"])
    page = watched.go("#/")
    assert "Of the limit" not in page.locator("thead").inner_text()
    page.locator("td.task a").first.click()
    page.wait_for_selector("main[data-page=task]")
    words = page.locator("main").inner_text()
    assert "device's limit" not in words and "Clock of the card" not in words
    page.locator("a[data-key=best]").click()
    page.wait_for_selector("main[data-page=trial]")
    words = page.locator("dl.facts").first.inner_text()
    assert not any(name in words for name in ("Registers", "Shared memory", "Spills", "Occupancy"))
    page = watch(roots["offline"]).go("#/")
    assert "Of the limit" in page.locator("thead").inner_text(), "a card has them"


class TestNavigation:
    def links(self, page):
        page.wait_for_function("() => document.querySelectorAll('#nav a').length > 1")
        return page.locator("#nav a").all_inner_texts()

    def test_compare_and_replay_are_there_where_there_is_something(self, roots, tmp_path, watch):
        for root in roots.values():
            assert self.links(watch(root).go("#/")) == ["Overview", "Runs", "Compare", "Records", "Replay"]
        with served(raced_database(tmp_path / "a.db", (DEFAULT, QUIET))) as root:
            assert self.links(watch(root).go("#/")) == ["Overview", "Runs", "Records"]

    def test_a_page_appears_with_its_first_content(self, tmp_path, watch):
        with served(tmp_path / "later.db") as root:
            page = watch(root).go("#/")
            assert page.locator("#nav a").all_inner_texts() == ["Overview"]
            raced_database(tmp_path / "later.db", (DEFAULT, QUIET))
            page.wait_for_function("() => document.querySelectorAll('#nav a').length === 3", timeout=READY_MS)


class TestCompare:
    def test_verdict_interval_and_count_agree(self, tmp_path, watch):
        times = [tuple(factor * each for each in QUIET) for factor in (0.6, 1.005, 1.4)]
        one = raced_database(tmp_path / "a.db", *((DEFAULT, QUIET) for _ in (*times, 0)))
        other = raced_database(tmp_path / "b.db", *((DEFAULT, each) for each in (*times, TWO_GROUPS)))
        with served(one, other) as root:
            page = watch(root).go("#/compare/0/1")
            table = page.locator("table", has=page.locator("caption", has_text="Tasks of both sides"))
            cells = [table.locator(f"td[data-label='{label}']").all_inner_texts() for label in ("95 % interval", "Verdict")]
            tiles = dict(tile.inner_text().split("\n")[:2] for tile in page.locator("dl.facts div").all())
        for interval, verdict in zip(*cells, strict=True):
            ends = [float(end) for end in re.findall(r"[\d.]+", interval)]
            wanted = "not known" if not ends else "no difference shown" if ends[0] <= 1 <= ends[1] else \
                "B is faster" if ends[0] > 1 else "B is slower"  # fmt: skip
            assert verdict == wanted
        for verdict in ("B is faster", "B is slower", "No difference shown", "Not known"):
            assert int(tiles[verdict]) == [found.lower() for found in cells[1]].count(verdict.lower()) == 1
        assert tiles["Not to be trusted"] == "1"

    def test_one_is_in_the_middle_of_a_logarithmic_axis(self, noisy, watch):
        page = drawn(watch(noisy["live"]).go("#/compare/0/1"))
        axis = page.evaluate("""() => {
            const chart = echarts.getInstanceByDom(document.querySelector(".plot"));
            const at = (ratio) => chart.convertToPixel({ xAxisIndex: 0 }, ratio);
            return { half: at(0.8), one: at(1), twice: at(1.25), type: chart.getOption().xAxis[0].type };
        }""")
        assert axis["type"] == "log"
        assert axis["twice"] - axis["one"] == pytest.approx(axis["one"] - axis["half"], abs=0.5)


class TestTask:
    def test_the_vertical_axis_shows_where_the_search_improved(self, roots, watch):
        watched: Watched = watch(roots["offline"])
        page = drawn(watched.go(all_pages(watched)["task"]))
        top = "echarts.getInstanceByDom(document.querySelector('.plot')).getModel().getComponent('yAxis').axis.scale.getExtent()[1]"  # noqa: E501
        near = page.evaluate(top)
        assert re.search(r"\d+ slower trials? above", page.locator("figure").first.inner_text())
        page.get_by_role("button", name="All times").click()
        page.wait_for_function(f"() => {top} > {near}")

    def test_sections_without_content_are_one_line(self, noisy, watch):
        page = watch(noisy["offline"]).go("#/")
        page.locator("td.task a").first.click()
        page.wait_for_selector("main[data-page=task]")
        folded = page.locator("section.folded")
        assert folded.count() >= 2
        for section in folded.all():
            assert section.bounding_box()["height"] < 60
            assert section.locator(".why").inner_text().endswith(".")
            assert section.locator(".plot:visible").count() == 0

    def test_two_knobs_have_a_map_whose_cells_are_the_trials(self, roots, watch):
        for mode in roots:
            watched: Watched = watch(roots[mode])
            page = drawn(watched.go(all_pages(watched)["task"]))
            figure = page.locator("figure", has=page.get_by_role("heading", name="Times by two knobs"))
            choices = figure.locator("select").first.locator("option").all_inner_texts()
            assert len(choices) == 30 and "tile" in choices[0]  # 15 pairs of each template, the most important first
            figure.locator("select").first.select_option(index=3)
            figure.locator("summary").click()
            figure.locator("td[data-label=Best] a").first.click()
            page.wait_for_selector("main[data-page=trial]")
            assert watched.problems == []


class TestRuns:
    def test_every_run_is_listed_and_has_its_timeline(self, roots, sample_files, watch):
        for mode in roots:
            watched: Watched = watch(roots[mode])
            page = watched.go("#/runs")
            assert page.locator("tbody tr").count() == 4  # two databases of two runs
            assert page.locator("th[aria-sort]").inner_text().startswith("Started")
            page.locator("tbody a").first.click()
            page.wait_for_selector("main[data-page=run]")
            drawn(page)
            assert page.evaluate(EMPTY_PLOTS) == []
            figure = page.locator("figure", has=page.get_by_role("heading", name="Timeline"))
            assert "under way beside the device" in figure.locator(".plot").get_attribute("aria-label")
            figure.locator("summary").click()
            figure.locator("tbody a[href*=trial]").first.click()
            page.wait_for_selector("main[data-page=trial]")
            assert watched.problems == []


class TestRecords:
    def test_a_row_is_one_line_high_with_run_and_knobs(self, roots, watch):
        watched: Watched = watch(roots["offline"], width=1280)
        page = watched.go("#/records")
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("Measured")
        page.get_by_label("Template").select_option(index=1)
        page.wait_for_function("() => document.querySelector('td[data-label=tile]')")
        heights = {round(row.bounding_box()["height"]) for row in page.locator("tbody tr").all()[:40]}
        assert max(heights) <= 40
        for knob in ("tile", "stages", "order"):
            assert page.locator("tbody tr").first.locator(f"td[data-label={knob}]").inner_text() not in ("", "–")
        page.locator("tbody tr").first.locator("td[data-label=Run] a").click()
        page.wait_for_selector("main[data-page=run]")

    def test_what_all_rows_share_is_said_once(self, roots, watch):
        page = watch(roots["offline"]).go("#/records")
        page.get_by_label("Template").select_option(index=1)
        page.locator("input[type=search]").fill("tile=128")
        page.get_by_text("The same in all of them: tile=128.").wait_for()
        assert page.locator("td[data-label=tile]").count() == 0

    def test_the_server_sorts_what_the_page_does_not_hold(self, tmp_path, watch):
        path = sample_database(tmp_path / "many.db", trials=400)
        with served(path) as root:
            page = watch(root).go("#/records")
            page.locator("th button", has_text="Time").click()
            # There are 1,212 records, so the server's 5,000 hold all of them, and no remark about the newest is left.
            said = "() => !document.querySelector('p.line').textContent.includes('newest')"
            page.wait_for_function(said, timeout=READY_MS)
            times = page.locator("td[data-label=Time]").all_inner_texts()
        assert times[0].endswith("µs") and times[0] == min(times, key=lambda text: float(text.split()[0]))


class TestDrawnInFull:
    def test_every_chart_of_a_long_page_is_drawn_without_scrolling(self, roots, watch):
        watched: Watched = watch(roots["live"], width=1280, height=800)
        page = drawn(watched.go(all_pages(watched)["task"]))
        assert page.evaluate("window.scrollY") == 0
        assert page.locator(".plot:visible").count() >= 8
        assert page.evaluate(EMPTY_PLOTS) == []

    def test_paper_has_every_chart_at_once_and_light(self, roots, watch):
        watched: Watched = watch(roots["live"], "dark", width=1280, height=800)
        page = watched.go(all_pages(watched)["task"])
        found = page.evaluate(f"""() => {{
            dispatchEvent(new Event("beforeprint"));
            return {{ theme: document.documentElement.dataset.theme, empty: ({EMPTY_PLOTS})() }};
        }}""")
        assert found == {"theme": "light", "empty": []}
        page.emulate_media(media="print")
        for plot in page.locator(".plot:visible").all():
            assert plot.locator("canvas").bounding_box()["width"] <= plot.bounding_box()["width"] + 1
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"

    def test_a_page_becomes_a_pdf(self, roots, watch):
        watched: Watched = watch(roots["offline"])
        for address in all_pages(watched).values():
            page = watched.go(address)
            assert page.pdf(format="A4").startswith(b"%PDF")
        assert watched.problems == []


def test_devices_are_a_side_of_compare_too(tmp_path, watch):
    one = raced_database(tmp_path / "a.db", (DEFAULT, QUIET), target=H200)
    other = raced_database(tmp_path / "b.db", (DEFAULT, QUIET), target=A100)
    with served(one, other) as root:
        page = watch(root).go("#/compare")
        page.wait_for_url("**/compare/*/*")
        assert "No difference shown" in page.locator("dl.facts").inner_text()
