"""Markup and script in every text of a database stay text, on every page, in tooltips and in tables."""

import pytest
from browser_support import Watched, all_pages

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("mode", ["live", "offline"])
def test_foreign_text_stays_text(hostile_roots, watch, mode):
    watched: Watched = watch(hostile_roots[mode])
    seen = 0
    for name, address in all_pages(watched).items():
        page = watched.go(address)
        page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
        for plot in page.locator(".plot").all():
            if plot.is_visible():
                plot.scroll_into_view_if_needed()
                box = plot.bounding_box()
                for x, y in ((0.5, 0.5), (0.3, 0.4), (0.7, 0.6)):
                    page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
        page.wait_for_timeout(100)
        assert page.evaluate("document.querySelectorAll('img, iframe, object, main script, [onerror]').length") == 0, name
        assert page.evaluate("document.querySelectorAll('script').length") == 4, name
        seen += "<img src=x onerror=alert(1)>" in page.locator("main").inner_text()
    assert watched.dialogs == []
    assert watched.problems == []
    assert watched.foreign_requests() == []
    assert seen >= 5  # it was there to be read
