"""Fixtures of several worker tests."""

from pathlib import Path

import pytest

from tests.worker.worker_fixtures import reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    return path
