"""How the site is built from these pages: `./build-docs`."""

import sys
from pathlib import Path

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
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
copybutton_prompt_text = "$ "


setup = notebooks.connect
