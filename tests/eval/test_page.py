"""The page in a browser: what a reader does with it, with the network off."""

import shutil

import example_report
import pytest

from fluxq.eval.report.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `test`")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium of the distribution's packages")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    made = example_report.example(2, count=12)
    return write_report(tmp_path_factory.mktemp("page") / "report.html", made).as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser, address):
    """open_page(**context) is the page, once its charts are live; anything it says or asks for fails the test."""
    said, asked, contexts = [], [], []

    def open_with(width=1280, charts=True, **context):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, offline=True, **context))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        if charts:
            page.wait_for_selector("html[data-charts=ready]", state="attached")
        return page

    yield open_with
    for context in contexts:
        context.close()
    assert said == []
    assert all(url == address or url.startswith("data:image/") for url in asked)


@pytest.mark.slow
def test_slider_moves_the_cut_of_all_runs_of_a_row(open_page):
    page = open_page()
    row = page.locator(".row").first
    slider, pictures = row.locator("input").first, row.locator(".after img.over")
    assert pictures.count() == 2 and row.locator(".after img.under").count() == 2
    cut = "node => getComputedStyle(node).clipPath"
    assert pictures.first.evaluate(cut) == "inset(0px 0px 0px 0%)"  # all of the quantized picture
    slider.fill("20")
    assert all("20%" in pictures.nth(index).evaluate(cut) for index in range(2))
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert "21%" in pictures.first.evaluate(cut)
    place = slider.bounding_box()
    slider.click(position={"x": 0.75 * place["width"], "y": place["height"] / 2})
    assert 70 < float(slider.input_value()) < 80


@pytest.mark.slow
def test_tables_sort_both_ways_and_leave_what_is_missing_last(open_page):
    page = open_page()
    runs = page.locator("#runs")

    def column(index):
        return runs.locator(f"tbody tr > :nth-child({index})").all_inner_texts()

    bits = runs.get_by_role("button", name="Bits per weight")
    bits.click()
    assert [text.split()[0] for text in column(6)] == ["4.50", "8.02", "16.00"]
    bits.focus()
    page.keyboard.press("Enter")
    assert [text.split()[0] for text in column(6)] == ["16.00", "8.02", "4.50"]
    assert runs.locator("th[aria-sort=descending]").count() == 1
    runs.get_by_role("button", name="Run", exact=False).first.click()
    assert [text.split()[0] for text in column(1)] == ["16", "schnell-int8", "schnell-nvfp4"]

    metrics = page.locator("#metrics")
    metrics.get_by_role("button", name="schnell-int8").click()
    names = metrics.locator("tbody th").all_inner_texts()
    assert names[0].startswith("SSIM") and names[-1].startswith("PSNR")  # .95 first


def visible(page, cell):
    """Tell whether all of an element's text lies within the window's width.

    No box may hide it or scroll it away.
    """
    return cell.evaluate(
        """node => {
          const seen = node.getBoundingClientRect();
          let [left, right] = [0, document.documentElement.clientWidth];
          for (let box = node.parentElement; box; box = box.parentElement) {
            if (getComputedStyle(box).overflowX === "visible") continue;
            const edge = box.getBoundingClientRect();
            [left, right] = [Math.max(left, edge.left), Math.min(right, edge.right)];
          }
          return seen.height > 0 && seen.left >= left - 1 && seen.right <= right + 1;
        }"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("table", ["#runs", "#metrics"])
def test_a_phone_shows_every_number_with_what_it_is(open_page, table, script):
    page = open_page(390, charts=script, java_script_enabled=script)
    cells = page.locator(f"{table} tbody td[data-value]").all()
    full = [cell for cell in cells if cell.get_attribute("data-value")]
    assert len(full) >= 12
    for cell in full:
        assert visible(page, cell), cell.inner_text()
        label = cell.get_attribute("data-label")
        assert label and label in cell.evaluate("node => getComputedStyle(node, '::before').content")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 1024])
def test_no_column_of_four_runs_is_cut_on_a_desktop(browser, tmp_path, width):
    address = write_report(tmp_path / "four.html", example_report.example(4)).as_uri()
    context = browser.new_context(viewport={"width": width, "height": 900}, java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    for table in ("#runs", "#metrics"):
        for cell in page.locator(f"{table} > thead th, {table} > tbody td").all():
            assert visible(page, cell), cell.inner_text()
    context.close()


@pytest.mark.slow
def test_a_table_that_does_not_fit_says_that_there_is_more(open_page):
    """By a shadow at the side where it goes on, which stays at the box when the table is scrolled."""
    page = open_page(390)
    page.get_by_text("Times of every stage").first.click()
    box = page.get_by_role("region", name="Times").first
    assert box.evaluate("node => node.scrollWidth > node.clientWidth + 100")
    assert box.evaluate("node => getComputedStyle(node).backgroundAttachment") == "local, local, scroll, scroll"


@pytest.mark.slow
def test_a_word_s_link_opens_the_glossary(open_page):
    page = open_page()
    meaning = page.locator("#glossary dd").first
    assert not meaning.is_visible()
    page.locator("a.term").first.click()
    assert meaning.is_visible() and page.locator(":target").inner_text() == "PSNR"


@pytest.mark.slow
def test_charts_are_live_fit_and_follow_the_chosen_metric(open_page):
    page = open_page()
    live = page.locator("[data-chart].vega-embed:has(svg.marks)")
    assert live.count() == page.locator("[data-chart]:visible").count() >= 5
    for part in page.locator("details:has([data-chart])").all():
        part.locator("summary").first.click()
    page.wait_for_function(
        "document.querySelectorAll('details:has([data-chart]):not([data-charts=ready])').length === 0"
    )
    assert live.count() == page.locator("[data-chart]").count() > 8
    heading = page.locator("[data-chart=cost-bits] text", has_text="better")
    assert "PSNR" in heading.text_content()
    page.select_option("#metric", "fid")
    heading.filter(has_text="FID to held-out images, lower is better").wait_for(state="attached")
    assert page.locator("[data-chart=cost-latency] text", has_text="lower is better").count() == 1
    page.locator("[data-chart=cost-bits] .mark-symbol path").first.hover()
    page.locator(".vg-tooltip.visible", has_text="schnell-").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_dark_and_narrow(open_page, width, scheme):
    page = open_page(width, color_scheme=scheme)
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = sum(map(int, paper.strip("rgb()").split(",")[:3])) > sum(map(int, ink.strip("rgb()").split(",")[:3]))
    assert light == (scheme == "light")
    label = page.locator("[data-chart=drift-velocity_error] .mark-text text").first.evaluate(
        "node => getComputedStyle(node).fill"
    )
    assert label != "rgb(0, 0, 0)"
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.slow
def test_page_without_javascript_shows_tables_charts_and_pictures(open_page):
    page = open_page(charts=False, java_script_enabled=False)
    for selector in ("#metrics", "[data-chart=cost-bits] svg", "[data-chart=drift-velocity_error] svg"):
        assert page.locator(selector).bounding_box()["height"] > 100
    row = page.locator(".row").first
    boxes = [row.locator(kind).bounding_box() for kind in (".before img",)]
    boxes += [each.bounding_box() for each in row.locator(".after img").all()]
    assert len(boxes) == 3 and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] < boxes[2]["x"]
    assert boxes[0]["y"] == boxes[1]["y"] == boxes[2]["y"]  # 16 bit and both runs of one prompt
    assert page.locator("#metric").bounding_box() is None  # what only a script makes work is not there


@pytest.mark.slow
def test_print_shows_whole_pictures_side_by_side(open_page):
    page = open_page()
    page.locator(".row input").first.fill("50")
    page.emulate_media(media="print")
    first, second = (page.locator(".row").first.locator("img:visible").nth(index) for index in (0, 1))
    assert first.bounding_box()["x"] + first.bounding_box()["width"] <= second.bounding_box()["x"]
    assert second.evaluate("node => getComputedStyle(node).clipPath") == "none"
    assert page.locator(".row input").first.bounding_box() is None and page.locator("nav").bounding_box() is None
