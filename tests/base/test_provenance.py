"""Versions are those of the code that runs."""

import importlib.metadata
import tomllib
from pathlib import Path

import fluxq
from fluxq.base.provenance import versions


def test_the_version_of_the_code_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert fluxq.__version__ == project["version"]


def test_installed_versions_are_read_once(monkeypatch):
    found = versions()
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", lambda name: 1 / 0)
    assert versions() == found
