"""The small target of the producer's tests, for rows that are really rendered and tokenized."""

from pathlib import Path

import pytest

from producer.datasets.model_folder import find_model
from producer.datasets.template import Template
from tests.producer.small import write_model


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder: Path = write_model(tmp_path_factory.mktemp("target"), vocab_size=320)
    return Template(find_model(str(folder)))
