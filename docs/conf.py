"""Sphinx configuration; `make docs` turns every warning into an error."""

from importlib import metadata

project = "fastattn"
author = "The fastattn authors"
copyright = "2026, The fastattn authors"
release = metadata.version("fastattn")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fastattn {release}"
autodoc_mock_imports = ["timm"]  # which needs a torchvision that fits torch
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
