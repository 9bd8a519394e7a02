"""Configurations that people paste, which must be JSON.

A text is not run, and no file or network is read. Its size is bounded, and other files are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.architecture import Decoder
from moetune.domain.document import is_pointer
from moetune.domain.errors import InputError
from moetune.huggingface.family import PREDICTIONS
from moetune.huggingface.kinds import LAYERS
from moetune.huggingface.reader import read_decoder
from moetune.huggingface.registry import check_fields

MOST_BYTES = 256 * 2**10
"""Largest size of a configuration. The largest known configuration has 30 KiB, most of it names
of labels."""
NAME = "pasted"
"""Name of a pasted model; `moetune plan --model pasted/config.json` plans the same model under the
same name."""
_WHERE = "the configuration"
_MOST_DEPTH = 16
_LARGEST = 2**53
_LAYERS = frozenset({*LAYERS, *PREDICTIONS})
_MOST_LAYERS = 1024
_PASTE = "paste the text of a config.json from a model's page on Hugging Face"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastedConfig:
    """A configuration that was pasted.

    Args:
        text: compact JSON of an object.
    """

    text: str

    def decoder(self) -> Decoder:
        """Return the model; it may take long, because a text may have any sizes.

        Raises:
            InputError: the configuration describes no known model.
        """
        return read_decoder(json.loads(self.text), name=NAME, where=_WHERE)


def pasted_config(text: str) -> PastedConfig:
    """Return the configuration in a pasted text.

    Raises:
        InputError: the text is too long, another kind of file, or not a JSON object.
    """
    if len(text.encode("utf-8", errors="replace")) > MOST_BYTES:
        raise InputError(
            f"{_WHERE} is longer than the {MOST_BYTES // 2**10} KiB that are read here",
            "paste a config.json alone; a tokenizer, an index of weights or weights are longer",
        )
    _check_kind(text.lstrip("\ufeff \t\r\n"))
    document = _json(text)
    check_fields(document, _WHERE, _PASTE)
    _check_layers(document)
    return PastedConfig(text=json.dumps(document, separators=(",", ":"), ensure_ascii=False))


def configuration_of(value: object) -> PastedConfig:
    """Return the configuration in a program's values.

    Raises:
        InputError: as in `pasted_config`.
    """
    if isinstance(value, PastedConfig):
        return value
    try:
        return pasted_config(json.dumps(value))
    except (TypeError, ValueError):
        raise InputError(
            f"config must be the values of a config.json, got {type(value).__name__}",
            "read the file with json.load, or give its path as the model", field="config",
        ) from None  # fmt: skip


def _check_kind(start: str) -> None:
    """Raise InputError for files that people confuse with a configuration."""
    if is_pointer(start):
        raise InputError(
            f"{_WHERE} is a Git LFS pointer: it names a file, and does not have its text",
            "run `git lfs pull`, or copy the text from the model's page",
        )
    if start.startswith(("PK\x03", "PK\x05", "\x1f\x8b", "\x1f\ufffd", "\x80", "\ufffd")):
        raise InputError(f"{_WHERE} is a compressed or binary file, not a text", _PASTE)
    if start.startswith("<"):
        raise InputError(f"{_WHERE} is a page of HTML, not a config.json", _PASTE)
    if not start:
        raise InputError(f"{_WHERE} is empty", _PASTE)


def _json(text: str) -> Mapping[str, object]:
    try:
        document = json.loads(text.lstrip("\ufeff"), parse_constant=_no_number)
        _check_values(document, _MOST_DEPTH)
        # What UTF-8 cannot hold, a lone half of a pair, would fail later.
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{_WHERE} holds characters that are none", _PASTE) from None
    except RecursionError:
        raise InputError(f"{_WHERE} is nested too deeply for a model's", _PASTE) from None
    except ValueError as error:
        raise InputError(f"{_WHERE} is not valid JSON: {error}", _PASTE) from None
    if not isinstance(document, Mapping):
        raise InputError(f"{_WHERE} is not an object of fields", _PASTE)
    return document


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is no number of JSON")


def _check_values(value: object, depth: int) -> None:
    """Raise ValueError for values nested too deeply, or numbers larger than any model's."""
    if isinstance(value, Mapping | list):
        if not depth:
            raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_values(item, depth - 1)
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"it has the number {value}, larger than any of a model")


def _check_layers(document: Mapping[str, object]) -> None:
    """Raise InputError for more layers than can be read in a short time."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            _check_layers(value)
        elif key in _LAYERS and isinstance(value, int) and value > _MOST_LAYERS:
            raise InputError(
                f"{_WHERE} has {key} {value:,}, more than the {_MOST_LAYERS:,} that are read here",
                "correct the field in the configuration",
            )
