"""Requests for the planners from a question on a layer, a model's training or its memory.

Questions from other machines cannot make this machine read files, and have bounded sizes.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from moetune.app.files import read_text
from moetune.app.plan import LONGEST_NAME, check_layer, profile_name, ranks_of
from moetune.app.routing_files import read_layer_routing, read_routing
from moetune.app.training_plan import TrainingRequest
from moetune.config import NO_STORE, Settings
from moetune.domain.cluster import process_bytes
from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS, find_model
from moetune.domain.packing import Packing, packing_of, packing_of_mean
from moetune.domain.pipeline import read_stages
from moetune.domain.profile import Profile
from moetune.domain.question import MEMORY_DEFAULTS, Question, read_question, read_texts
from moetune.domain.request import usual_dtype
from moetune.domain.routing import LayerRouting
from moetune.domain.spelling import about, flag_of
from moetune.domain.targets import Target, find_target
from moetune.domain.training import LayoutRequest, TrainingJob, read_dtype, read_recompute
from moetune.domain.tuning import Tuning, read_tuning
from moetune.domain.units import full_dtype
from moetune.huggingface.pasted import configuration_of
from moetune.huggingface.registry import (
    check_known,
    find_decoder_model,
    is_decoder_name,
    known_name,
)
from moetune.solve.model.fits import MemoryQuestion

PIN_NAMES = tuple(item.name for item in fields(LayoutRequest))
_LARGEST = {"world_size": 2**14, "nodes": 2**14, "global_batch": 2**20, "seq": 2**22}
"""Largest sizes in a served question on a whole model: larger searches take too long."""
_ROUTINGS = ("balanced", "natural")
_SETTINGS = ("dtype", "max_degree", "min_chunk_tokens", "allow_modelled")
"""Fields of a layer's question that take their defaults from settings."""


class ServedQuestion(NamedTuple):
    """A question from another machine, and its profile's name; None for the default profile."""

    question: Question
    profile: str | None


def ask(values: Mapping[str, object]) -> Question:
    """Return the question in values by field, after checks that its kind of plan has each field.

    Raises:
        InputError: a field is unknown, has a wrong value, or is for plans of another kind.
    """
    if (config := values.get("config")) is not None:
        values = {**values, "config": configuration_of(config)}
    question = read_question(values)
    if question.model is not None:
        with about("model"):
            check_known(question.model)
    question.check_scope(is_of_model=is_of_model(question))
    return question


def is_of_model(question: Question) -> bool:
    """Return whether the question is on a whole model and not on a layer."""
    if question.config is not None or question.shape is not None:
        return True
    return question.model is not None and is_decoder_name(question.model)


def model_name(question: Question) -> str:
    """Return the name of the question's whole model; a model given by sizes has them as name."""
    shape = question.shape
    return question.model or "" if shape is None else shape.text


def layer_question(question: Question, settings: Settings | None) -> Question:
    """Return a layer's question with defaults from settings and with its routing file read."""
    settings, name = settings or Settings(db=NO_STORE), question.model
    top_k = question.top_k or 1 if name is None else find_model(name).top_k
    with about("routing"):
        routing = read_layer_routing(question.routing, top_k=top_k)
    gaps = [name for name in _SETTINGS if getattr(question, name) is None]
    question = replace(question, routing=routing, **{gap: getattr(settings, gap) for gap in gaps})
    check_layer(question)
    return question


def training_request(question: Question, profile: Profile) -> TrainingRequest:
    """Return the request for a whole model's layout; raise InputError for a wrong value."""
    return _training_request(question, ranks_of(question, profile), usual_dtype(profile))


def _training_request(question: Question, ranks: int, dtype: str) -> TrainingRequest:
    """Return the request on `ranks` ranks, in `dtype` unless the question has a dtype."""
    with about("target"):
        target = find_target(question.target or "moetune")
    batch, length = question.global_batch, question.seq
    if question.config is not None:
        decoder = question.config.decoder()
    else:
        model = find_decoder_model(model_name(question), world_size=ranks)
        if model.decoder is None:
            raise InputError(
                f"{question.model} is a single layer of a paper, not a whole model",
                f"plan it:  moetune plan --model {question.model}",
            )
        decoder = model.decoder
        if model.whole is not None:
            batch = batch or model.whole.sequences_per_rank * ranks
            length = length or model.whole.shape.length
    with about("routing"):
        decoder, routing = read_routing(question.routing, decoder)
    if batch is None or length is None:
        raise _unsized(decoder.name, {"--global-batch": batch, "--seq": length})
    job = TrainingJob(
        decoder=decoder, world_size=ranks, global_batch=batch, length=length,
        dtype=read_dtype(full_dtype(question.dtype or dtype)), routing=routing,
        optimizer=question.optimizer or target.optimizers[0], tuning=tuning_of(question, target),
        leaves_room=question.routing is None and decoder.num_moe_layers > 0,
        packing=packing_for(question, length),
    )  # fmt: skip
    return TrainingRequest(
        job=job, pins=layout_pins(question), target=target,
        memory_limit_bytes=question.memory_limit, budget=question.budget,
    )  # fmt: skip


def packing_for(question: Question, length: int) -> Packing | None:
    """Return the packing into sequences of `length` tokens, or None; raise InputError if wrong."""
    if question.seq_lengths is None:
        return None
    with about("seq_lengths"):
        if question.seq_lengths.isdecimal():
            return packing_of_mean(int(question.seq_lengths), length)
        words = read_text(Path(question.seq_lengths), "lengths").split()
        wrong = next((word for word in words if not word.isdecimal()), None)
        if wrong is not None:
            raise InputError(f"{question.seq_lengths}: {shown(wrong)} is no length")
        return packing_of([*map(int, words)], length, question.seq_lengths)


def tuning_of(question: Question, target: Target) -> Tuning:
    """Return which parameters train, with the runtime's usual adapters; or raise InputError."""
    usual = target.adapters[0] if target.adapters else "each"
    return read_tuning(question.train, question.freeze, experts=usual)


def _unsized(name: str, sizes: Mapping[str, int | None]) -> InputError:
    lacking = [flag for flag, size in sizes.items() if size is None]
    return InputError(
        f"a plan for {name} lacks {' and '.join(lacking)}",
        "give the sequences of a step and the tokens of a sequence, "
        "such as --global-batch 1024 --seq 4096",
    )


def layout_pins(question: Question) -> LayoutRequest:
    """Return the question's pins of a layout; raise InputError if they cannot be read."""
    pins: dict[str, Any] = {name: getattr(question, name) for name in PIN_NAMES}
    if question.recompute is not None:
        pins["recompute"] = read_recompute(question.recompute)
    if question.stages is not None:
        with about("stages"):
            pins["stages"] = read_stages(question.stages)
    return LayoutRequest(**pins)


def memory_question(values: Mapping[str, object], *, device_memory: str) -> MemoryQuestion:
    """Return the memory question in values by field, for a device memory such as "80GB".

    Raises:
        InputError: the model is a single layer, or a value is wrong.
    """
    asked = read_question({**read_texts(MEMORY_DEFAULTS), **values})
    question = replace(asked, global_batch=asked.global_batch or 1)
    request = _training_request(question, asked.world_size or 1, "")
    with about("device_memory"):
        device_bytes = process_bytes(device_memory)
    return MemoryQuestion(
        any_job=request.job, world_size=asked.world_size, global_batch=asked.global_batch,
        pins=request.pins, target=request.target, device_bytes=device_bytes,
    )  # fmt: skip


def asks_for_model(arguments: Mapping[str, object]) -> bool:
    """Return whether arguments ask for the plan of a whole model."""
    name = arguments.get("model")
    is_named = isinstance(name, str) and name not in MODELS and known_name(name) is not None
    return is_named or "config" in arguments or "num_layers" in arguments


def served_question(arguments: Mapping[str, object]) -> ServedQuestion:
    """Return the question in arguments of `moetune.plan`.

    Raises:
        InputError: an argument is unknown, or its value is wrong or a path; the message names it.
    """
    rest = dict(arguments)
    profile = rest.pop("profile", None)
    _check_names(rest)
    named = None if profile is None else profile_name(profile)
    question = ask(rest)
    if is_of_model(question):
        _check_sizes({name: getattr(question, name) for name in _LARGEST})
    return ServedQuestion(question, named)


def check_served(arguments: Mapping[str, object], *, is_of_layer: bool = False) -> None:
    """Raise InputError if arguments name files, or ask for a whole model too large to serve."""
    if not is_of_layer:
        _check_sizes(arguments)
    elif routing := arguments.get("routing"):  # the text that plans of layers record, not a file
        LayerRouting.of(str(routing))
        arguments = {**arguments, "routing": None}
    _check_names(arguments)


def _check_names(arguments: Mapping[str, object]) -> None:
    """Raise InputError for an argument that names a file, or is longer than any name."""
    for name, value in arguments.items():
        if isinstance(value, str) and len(value) > LONGEST_NAME:
            raise InputError(f"{name} is longer than {LONGEST_NAME} characters", field=name)
    model, routing = arguments.get("model"), arguments.get("routing")
    if isinstance(model, str) and ("/" in model or not (model in MODELS or known_name(model))):
        raise InputError(
            f"model must be a name of the list, got {shown(model)}",
            "`moetune models list` names them; or send the values of a config.json as config",
            field="model",
        )
    lengths = arguments.get("seq_lengths")
    if lengths is not None and not str(lengths).isdecimal():
        hint = "a file is read by `moetune plan`"
        raise InputError("seq_lengths must be a number", hint, field="seq_lengths")
    if routing is not None and routing not in _ROUTINGS:
        names = " or ".join(_ROUTINGS)
        raise InputError(f"routing must be {names}, got {shown(routing)}", field="routing")


def _check_sizes(arguments: Mapping[str, object]) -> None:
    for name, largest in _LARGEST.items():
        value = arguments.get(name)
        if isinstance(value, int) and value > largest:
            what = f"{flag_of(name)} must be from 1 to {largest}, got {value}"
            raise InputError(what, field=name)
