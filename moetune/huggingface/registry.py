"""Named models: the fields of their configurations that give sizes, one JSON file each.

Each file has the model's `title`, the `source` of its configuration, `aliases`, what its authors
published, and the `config`, which is read like a user's file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.document import refuse_pointer, refuse_zip
from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_then
from moetune.huggingface.pasted import check_fields
from moetune.huggingface.reader import read_decoder

_FOLDER = Path(__file__).resolve().parent / "models"
_SUFFIX = re.compile(
    r"-(instruct|base|pretrain|chat|hf|it|pt|fp8|bf16|nvfp4|mxfp4|thinking|original|16e|128e|17b"
    r"|v0\.[0-9]+|v1|exp|speciale|terminus|[0-9]{4})$"
)
_PREFIX = re.compile(r"^(meta-|nvidia-)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model as its authors published it, and as its configuration describes it.

    Args:
        source: of the configuration.
        published: parameters in words, as the authors count them; "" for a user's file.
    """

    title: str
    source: str
    decoder: Decoder
    published: str = ""


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
        for name, entry in ((name, _entry(name)) for name in model_names())
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
    for known in names:
        if set(spellings) & set(_entry(known)["aliases"]):
            return known
    return None


def named_model(name: str) -> PublishedModel:
    """Return a model of the registry.

    Raises:
        InputError: it does not have it; the error names the nearest.
    """
    known = resolve_name(name)
    if known is None:
        names = model_names()
        raise InputError(
            f"model {name!r} is unknown",
            nearest_then(
                f"known: {', '.join(names)}; or give the path of a config.json",
                name.rpartition("/")[2].lower(),
                names,
            ),
        )
    entry = _entry(known)
    return PublishedModel(
        title=entry["title"],
        source=entry["source"],
        published=entry["published"],
        decoder=read_decoder(entry["config"], name=known, where=known),
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
    return PublishedModel(title=name, source=str(file), decoder=replace(decoder, path=str(full)))


def _entry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found
