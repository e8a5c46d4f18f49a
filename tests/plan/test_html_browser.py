"""The planner's page in a browser, Chromium (apt-get install chromium), on a wide and on a narrow screen."""

import html
import json
import re
import shutil
import subprocess

import pytest

from megajax.plan.__main__ import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run"
FLAGS += " --disable-background-networking --disable-component-update"
# The page in a frame, as windows have a least width, and its sizes, colour, tooltips and all that it loads.
FRAME = """<!DOCTYPE html><body style="margin: 0"><iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}">
</iframe><script>
addEventListener("load", () => {{
  const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement
  document.documentElement.dataset.found = JSON.stringify({{
    page: root.scrollWidth, screen: root.clientWidth, layouts: page.querySelector("#layouts .scroll").scrollWidth,
    paper: getComputedStyle(page.body).backgroundColor, titles: page.querySelectorAll("svg.bar title").length,
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name)}})
}})
</script>"""


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip("needs a browser: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    words = "--model gpt3-175b --gpus 1024 --gpu h100-80gb --global-batch-size 1536"
    assert main([*words.split(), "--out", str(folder / "plan.toml"), "--html", str(folder / "report.html")]) == 0
    return (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_its_screen_and_loads_nothing(browser, page, width, dark, tmp_path):
    (tmp_path / "frame.html").write_text(FRAME.format(width=width, page=html.escape(page)))
    own = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,950", "--dump-dom"]
    own += ["--blink-settings=preferredColorScheme=0"] * dark
    command = [browser, *FLAGS.split(), *own, f"file://{tmp_path / 'frame.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', done.stdout)[1]))
    assert found["loaded"] == []
    assert found["page"] <= found["screen"] == width and found["titles"] > 50
    assert found["layouts"] <= found["screen"] or width == 400  # a narrow screen scrolls the table in its own box
    assert found["paper"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
