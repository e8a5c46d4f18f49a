"""Sphinx's configuration. `sphinx-build -W --keep-going -b html docs build/docs` builds the site (extra `docs`).

The pages are plain Markdown that GitHub shows too, so nothing in them is Sphinx's own: the navigation is read from the
lists of links in index.md, and a link to a file outside of docs/ becomes a download of that file.
"""

import dataclasses
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the modules are imported for their docstrings

import megajax  # noqa: E402

project = "megajax"
copyright = "the authors of megajax, Apache 2.0"
release = version = megajax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["images"]

html_theme = "furo"
html_title = f"megajax {version}"
html_show_sourcelink = html_copy_source = html_show_copyright = False
pygments_style = "friendly"
myst_heading_anchors = 5  # as GitHub's: `page.md#a-heading`

# Signatures stay readable, and what they name need not have a page of its own.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
add_module_names = False
default_role = "code"  # `name` in a docstring


def with_navigation(app, docname, source):
    """index.md: after the text, a hidden `toctree` for each section, of the pages that its list links to."""
    if docname != "index":
        return
    for title, section in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", source[0], re.MULTILINE):
        pages = [re.sub(r"\.\w+$", "", page) for page in re.findall(r"^\* \[.*\]\((.*)\)$", section, re.MULTILINE)]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def with_fields(app, what, name, documented, options, lines):
    """A dataclass of `megajax.config`: its fields, with the help that the command line prints."""
    if what != "class" or not dataclasses.is_dataclass(documented):
        return
    described = "\n".join(lines)
    for field in dataclasses.fields(documented):
        if "help" in field.metadata and f":ivar {field.name}:" not in described:
            default = "" if field.default is dataclasses.MISSING else f"; default: ``{field.default!r}``"
            text = re.sub(r"([*_`|])", r"\\\1", field.metadata["help"])
            lines += ["", f".. attribute:: {field.name}", "", f"   {text}{default}"]
    lines.append("")


def without_fields(app, what, name, documented, options, signature, annotation):
    """A dataclass whose fields are listed below: no signature that repeats them with their defaults."""
    if what == "class" and dataclasses.is_dataclass(documented) and len(dataclasses.fields(documented)) > 4:
        return "(...)", annotation
    return None


def setup(app):
    app.connect("autodoc-process-signature", without_fields)
    app.connect("source-read", with_navigation)
    app.connect("autodoc-process-docstring", with_fields)
    return {"parallel_read_safe": True}
