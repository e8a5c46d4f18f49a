"""scripts/check_site.py, on small pages."""

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts/check_site.py"


@pytest.fixture(scope="module")
def findings():
    spec = importlib.util.spec_from_file_location("check_site", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.findings


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "loads //fonts.example/css"),
        ('<img src="a.svg" srcset="HTTP://a.example/b.png 2x, a.svg">', "loads HTTP://a.example/b.png"),
        ("<style>@import 'https://a.example/x.css';</style>", "loads https://a.example/x.css"),
        ('<p style="background: url(https://a.example/b.png)">', "loads https://a.example/b.png"),
        ('<iframe src="https://a.example/"></iframe>', "loads https://a.example/"),
        ('<a href="gone.html">x</a>', "there is no gone.html"),
        ('<a href="#gone">x</a>', "there is no element #gone in page.html"),
        ('<a href="https://a.example/">x</a><a href="#here" id="here">y</a><img src="a.svg">', None),
        ('<a href="mailto:a@b.example">x</a><a href="page.html">y</a><img src="data:image/png;base64,AA==">', None),
    ],
)
def test_a_page(findings, tmp_path, html, found):
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>")
    assert list(findings(tmp_path)) == ([] if found is None else [f"page.html: {found}"])


def test_a_style_sheet(findings, tmp_path):
    (tmp_path / "page.html").write_text("<p>")
    (tmp_path / "page.css").write_text(
        '@font-face { src: url("https://fonts.example/a.woff2"); } p { background: url(a.png) }'
    )
    assert list(findings(tmp_path)) == ["page.css: loads https://fonts.example/a.woff2"]


def test_an_empty_folder_is_no_site(findings, tmp_path):
    assert list(findings(tmp_path)) == [f"{tmp_path}: no page"]
