"""The planner's page in a browser, QtWebEngine (pip install PySide6-Addons==6.8.3), on a wide and on a narrow screen."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from megajax.plan.__main__ import main

# Prints widths and colours of the page, how many tooltips it has, and all addresses that it loads.
BROWSER = """
import sys
from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

class Log(QWebEngineUrlRequestInterceptor):
    def interceptRequest(self, request):
        print(request.requestUrl().toString())

ASKED = '''JSON.stringify({
  page: document.documentElement.scrollWidth, screen: document.documentElement.clientWidth,
  layouts: document.querySelector("#layouts .scroll").scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
  titles: document.querySelectorAll("svg.bar title").length})'''
application, view, log = QApplication(["page"]), QWebEngineView(), Log()
view.page().profile().setUrlRequestInterceptor(log)
view.resize(int(sys.argv[2]), 900)
answer = lambda text: (print(text), application.quit())
view.loadFinished.connect(lambda _: view.page().runJavaScript(ASKED, answer))
view.show()
view.load(QUrl.fromLocalFile(sys.argv[1]))
QTimer.singleShot(100_000, application.quit)
application.exec()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    has_qt = importlib.util.find_spec("PySide6") and importlib.util.find_spec("PySide6.QtWebEngineWidgets")
    if not has_qt:
        pytest.skip("needs a browser: pip install PySide6-Addons==6.8.3, which has QtWebEngine")
    folder = tmp_path_factory.mktemp("page")
    words = "--model gpt3-175b --gpus 1024 --gpu h100-80gb --global-batch-size 1536"
    assert main([*words.split(), "--out", str(folder / "plan.toml"), "--html", str(folder / "report.html")]) == 0
    return str(folder / "report.html")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_its_screen_and_loads_nothing(page, width, dark):
    flags = "--no-sandbox --disable-gpu" + " --blink-settings=preferredColorScheme=0" * dark
    environment = os.environ | {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags}
    command = [sys.executable, "-c", BROWSER, page, str(width)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    *loaded, answer = done.stdout.splitlines()
    found = json.loads(answer)
    assert loaded == [f"file://{page}"]
    assert found["page"] <= found["screen"] <= width and found["titles"] > 50
    assert found["layouts"] <= found["screen"] or width == 400  # a narrow screen scrolls the table in its own box
    assert found["paper"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
