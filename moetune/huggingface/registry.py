"""Where configurations come from: the registry's models, files, and texts that people paste.

Each model of the registry is a JSON file: its `title`, the `source` of its configuration,
`aliases`, what its authors published, and the `config`: the fields that give sizes, which are read
like a user's file.

A pasted text is JSON or refused: nothing in it is run, and no file or network is read. It is
bounded, told apart from other files, and packed for addresses.
"""

import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.document import is_pointer, refuse_pointer, refuse_zip
from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_then
from moetune.huggingface.family import PREDICTIONS
from moetune.huggingface.kinds import LAYERS
from moetune.huggingface.reader import read_decoder

_FOLDER = Path(__file__).resolve().parent / "models"
_SUFFIX = re.compile(
    r"-(instruct|base|pretrain|chat|hf|it|pt|fp8|bf16|nvfp4|mxfp4|thinking|original|16e|128e|17b"
    r"|v0\.[0-9]+|v1|exp|speciale|terminus|[0-9]{4})$"
)
_PREFIX = re.compile(r"^(meta-|nvidia-)")
MOST_BYTES = 256 * 2**10
"""Of a configuration: the largest known has 30 KiB, most of it names of labels."""
MOST_PACKED = 6_000
"""Characters in an address: browsers and proxies take 8 KiB, of which the rest needs some."""
NAME = "pasted"
"""Of the model; `moetune plan --model pasted/config.json` plans the same under the same name."""
_WHERE = "the configuration"
_MOST_DEPTH = 16
_LARGEST = 2**53
_LAYERS = frozenset({*LAYERS, *PREDICTIONS})
_MOST_LAYERS = 1024
_PASTE = "paste the text of a config.json from a model's page on Hugging Face"
_DIFFUSION = ("_diffusers_version", "sample_size", "cross_attention_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model as its authors published it, and as its configuration describes it.

    Args:
        source: of the configuration.
        published: parameters in words, as the authors count them; "" for a user's file.
        config: its configuration; of the registry's models the fields that give sizes.
    """

    title: str
    source: str
    decoder: Decoder
    published: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """An entry of the registry."""

    name: str
    title: str
    source: str
    published: str


def registered_models() -> tuple[RegisteredModel, ...]:
    """Return every entry of the registry, in the order of their names."""
    return tuple(
        RegisteredModel(
            name=name, title=entry["title"], source=entry["source"], published=entry["published"]
        )
        for name, entry in zip(model_names(), map(_entry, model_names()), strict=True)
    )


def model_names() -> tuple[str, ...]:
    """Return the names of the models of the registry, in alphabetic order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def resolve_name(name: str) -> str | None:
    """Return the registry's name of a model, None where it does not have it.

    The owner before a slash, capitals, underscores and words such as "-Instruct" do not matter.
    """
    wanted = _PREFIX.sub("", name.rpartition("/")[2].lower().replace("_", "-"))
    spellings = [wanted]
    while (shorter := _SUFFIX.sub("", spellings[-1])) != spellings[-1]:
        spellings.append(shorter)
    names = model_names()
    for spelling in spellings:
        if spelling in names:
            return spelling
    aliased = (name for name in names if set(spellings) & {*_entry(name)["aliases"]})
    return next(aliased, None)


def named_model(name: str) -> PublishedModel:
    """Return a model of the registry.

    Raises:
        InputError: it does not have it; the error names the nearest.
    """
    registered = resolve_name(name)
    if registered is None:
        names = model_names()
        raise InputError(
            f"model {name!r} is unknown",
            nearest_then(
                f"known: {', '.join(names)}; or give the path of a config.json",
                name.rpartition("/")[2].lower(),
                names,
            ),
        )
    entry = _entry(registered)
    return PublishedModel(
        title=entry["title"],
        source=entry["source"],
        published=entry["published"],
        decoder=read_decoder(entry["config"], name=registered, where=registered),
        config=entry["config"],
    )


def read_model(path: Path) -> PublishedModel:
    """Return the model of a `config.json`, or of a folder with one.

    Raises:
        InputError: there is no such file, it is not JSON, or describes no known model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"configuration {file} cannot be read: {error.strerror}",
            "give a config.json, its folder, or a model's name",
        ) from None
    refuse_pointer(content, f"configuration {file}")
    refuse_zip(content, f"configuration {file}", "unpack it, and name the config.json inside")
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"configuration {file} is not valid JSON: {error}", "download the file again"
        ) from None
    if not isinstance(document, Mapping):
        raise InputError(
            f"configuration {file} is not an object of fields", "give a Hugging Face config.json"
        )
    check_fields(document, f"configuration {file}", "give the config.json beside it")
    full = file.resolve()
    name = full.parent.name if full.name == "config.json" else full.stem
    decoder = read_decoder(document, name=name, where=str(file))
    return PublishedModel(
        title=name, source=str(file), decoder=replace(decoder, path=str(full)), config=document
    )


def _entry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PastedConfig:
    """A configuration that was pasted.

    Args:
        text: compact JSON of an object.
    """

    text: str

    @property
    def packed(self) -> str | None:
        """The text for an address; None where it is too long for one."""
        raw = zlib.compress(self.text.encode(), 9)
        packed = base64.urlsafe_b64encode(raw).decode().rstrip("=")
        return packed if len(packed) <= MOST_PACKED else None

    def decoder(self) -> Decoder:
        """Return the model; it may take long, as the sizes in a text are anybody's.

        Raises:
            InputError: the configuration describes no known model.
        """
        return read_decoder(json.loads(self.text), name=NAME, where=_WHERE)


def pasted_config(text: str) -> PastedConfig:
    """Return the configuration in a pasted text.

    Raises:
        InputError: it is too long, another kind of file, or not an object of JSON.
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
        InputError: as of `pasted_config`.
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


def unpacked_config(packed: str) -> PastedConfig:
    """Return what `PastedConfig.packed` is of; it is bounded whatever the packing says.

    Raises:
        InputError: it was cut short or changed, or its text is too long.
    """
    broken = InputError(
        f"config: {_WHERE} in the address is damaged or was cut short",
        "copy the whole address again, or paste the configuration",
    )
    if len(packed) > MOST_PACKED:
        raise broken
    unpacker = zlib.decompressobj()
    try:
        raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        text = unpacker.decompress(raw, MOST_BYTES + 1)
    except (ValueError, binascii.Error, zlib.error):
        raise broken from None
    if len(text) > MOST_BYTES:
        raise InputError(
            f"config: {_WHERE} in the address unpacks to more than {MOST_BYTES // 2**10} KiB",
            "paste the configuration itself",
        )
    if not unpacker.eof or unpacker.unused_data:
        raise broken
    try:
        return pasted_config(text.decode())
    except UnicodeDecodeError:
        raise broken from None


def _check_kind(start: str) -> None:
    """Raise InputError for files that people take for a configuration."""
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
    """Raise ValueError for what is nested deeply, or counts beyond what any model has."""
    if isinstance(value, Mapping | list):
        if not depth:
            raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_values(item, depth - 1)
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"it has the number {value}, larger than any of a model")


def _check_layers(document: Mapping[str, object]) -> None:
    """Raise InputError for so many layers that to write them down takes long."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            _check_layers(value)
        elif key in _LAYERS and isinstance(value, int) and value > _MOST_LAYERS:
            raise InputError(
                f"{_WHERE} has {key} {value:,}, more than the {_MOST_LAYERS:,} that are read here",
                "correct the field in the configuration",
            )


def check_fields(document: Mapping[str, object], where: str, hint: str) -> None:
    """Raise InputError for other documents that lie beside a configuration, by their kind.

    Args:
        hint: what to give instead of an index of weights.
    """
    if "model_type" in document:
        return
    name = document.get("_class_name")
    if name is not None or any(key in document for key in _DIFFUSION):
        what = f" ({name[:80]})" if isinstance(name, str) else ""
        raise InputError(
            f"{where} is of a diffusion model{what}, and only language models are planned",
            "take the config.json of a Mixture-of-Experts or dense language model",
        )
    if "weight_map" in document:
        raise InputError(f"{where} is an index of weights, not a config.json", hint)
