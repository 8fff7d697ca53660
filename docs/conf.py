"""How the site is built from these pages: `./build-docs`."""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import clipline

sys.path.insert(0, str(Path(__file__).parent))
import commands
import notebooks

commands.write(Path(__file__).parent)

project, author, release = "clipline", "the clipline authors", clipline.__version__
copyright = "the clipline authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["images/*.py"]
smartquotes = False
python_maximum_signature_line_length = 90
html_show_sourcelink = html_copy_source = False
highlight_language = "text"  # of blocks that name none: what a terminal shows

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = ["myst.header"]  # a page may begin with a picture

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
default_role = "py:obj"  # single backticks of docstrings: a link where there is one, else code

html_theme = "furo"
html_title = "clipline"
html_show_sphinx = False
html_static_path = ["static"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
copybutton_prompt_text = "$ "


def setup(app: Sphinx) -> None:
    """Notebooks of tutorials; parameters of a signature as a list: a `dl` without terms is none to a screen reader."""

    def parameters(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
        listed = re.sub(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>", r"<ul>\n\1</ul>", context.get("body", ""))
        context["body"] = re.sub(r"(?m)^<dd>(<em class=\"sig-param\">.*)</dd>$", r"<li>\1</li>", listed)

    notebooks.connect(app)
    app.connect("html-page-context", parameters)
