"""Pasted configurations: read as the reader reads files."""

import json

import pytest

from moetune.huggingface.pasted import pasted_config
from moetune.huggingface.reader import read_decoder
from tests.huggingface.configs import DEEPSEEK, QWEN3


@pytest.mark.parametrize("document", [QWEN3, DEEPSEEK])
def test_a_pasted_configuration_is_read_as_its_file_is(document: dict[str, object]) -> None:
    config = pasted_config("\ufeff" + json.dumps(document, indent=3))
    assert json.loads(config.text) == document
    assert config.decoder() == read_decoder(document, name="pasted", where="somewhere")
