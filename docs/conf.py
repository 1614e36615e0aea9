"""Settings of Sphinx for the site, which `python -m benchmarks.site` builds of Markdown as it stands."""

from fluxq import __version__

project = "fluxq"
author = "the authors of fluxq"
project_copyright = f"{author}, Apache-2.0"
release = version = __version__
extensions = ["myst_parser"]
highlight_language = "text"  # of fences that name none
html_theme = "furo"
html_title = f"fluxq {__version__}"
html_show_sourcelink = False
html_copy_source = False  # the pages in the checkout are the source
myst_heading_anchors = 4  # by the rule of code hosts, so that a link works in both places
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]  # a page of help begins where its command stands in the list
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures are words here, and no links
exclude_patterns: list[str] = []
