"""Pasted configurations: read as the reader reads files, and packed for addresses and back."""

import base64
import json
import zlib
from hashlib import sha256

import pytest

from moetune.domain.errors import InputError
from moetune.huggingface.pasted import MOST_BYTES, MOST_PACKED, pasted_config, unpacked_config
from moetune.huggingface.reader import read_decoder
from tests.huggingface.configs import DEEPSEEK, QWEN3


@pytest.mark.parametrize("document", [QWEN3, DEEPSEEK])
def test_a_configuration_comes_back_from_its_address(document: dict[str, object]) -> None:
    config = pasted_config("\ufeff" + json.dumps(document, indent=3))
    assert json.loads(config.text) == document
    assert config.packed is not None
    assert config.packed.replace("-", "").replace("_", "").isalnum()
    again = unpacked_config(config.packed)
    assert again == config
    assert again.decoder() == read_decoder(document, name="pasted", where="somewhere")


def test_a_long_configuration_has_no_address() -> None:
    words = {f"word_{at}_id": sha256(bytes([at])).hexdigest() for at in range(250)}
    assert pasted_config(json.dumps({**QWEN3, **words})).packed is None


def test_a_text_that_unpacks_to_more_than_a_configuration_is_not_unpacked() -> None:
    bomb = zlib.compress(b'{"a": "' + b"0" * (200 * MOST_BYTES) + b'"}', 9)
    packed = base64.urlsafe_b64encode(zlib.compress(bomb, 9)).decode()
    with pytest.raises(InputError):
        unpacked_config(packed)
    once = base64.urlsafe_b64encode(zlib.compress(b"0" * (4 * MOST_BYTES), 9)).decode()
    assert len(once) < MOST_PACKED
    with pytest.raises(InputError, match="unpacks to more than 256 KiB"):
        unpacked_config(once)
