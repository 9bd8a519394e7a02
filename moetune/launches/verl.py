"""verl's overrides: Megatron's update of the actor, which is the training that is priced.

Rollouts, the reference and the critic are not priced. Defaults are those of volcengine/verl,
`verl/trainer/config/engine/megatron.yaml`, `actor/actor.yaml` and `data/legacy_data.yaml`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from moetune.domain.errors import InputError
from moetune.domain.targets import find_target
from moetune.export.keys import Value
from moetune.huggingface.registry import resolve_name
from moetune.launches.arguments import Launch, check_values
from moetune.launches.expansion import Word
from moetune.launches.megatron import KEYS, MegatronArguments, plain_value, reading_of
from moetune.launches.megatron_checks import core_problems
from moetune.launches.reading import Asked, Given, Problem, Reading

_ROOT = "actor_rollout_ref"
_ACTOR = f"{_ROOT}.actor."
_MEGATRON = (
    f"{_ACTOR}megatron.override_transformer_config.", f"{_ACTOR}megatron.override_ddp_config.",
    f"{_ACTOR}megatron.", f"{_ACTOR}optim.override_optimizer_config.",
)  # fmt: skip
"""Paths whose keys are Megatron's fields."""
_RANKS: Mapping[str, int] = MappingProxyType({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8})
_MODEL, _RESPONSES = f"{_ROOT}.model.path", f"{_ROOT}.rollout.n"
_MINI, _MICRO = f"{_ACTOR}ppo_mini_batch_size", f"{_ACTOR}ppo_micro_batch_size_per_gpu"
_IS_DYNAMIC, _MOST_TOKENS = f"{_ACTOR}use_dynamic_bsz", f"{_ACTOR}ppo_max_token_len_per_gpu"
_NUMBERS: Mapping[str, int] = MappingProxyType({
    "data.max_prompt_length": 512, "data.max_response_length": 512, _MINI: 256, _RESPONSES: 1,
    _MICRO: 1, _MOST_TOKENS: 16384, **_RANKS,
})  # fmt: skip
_RECOMPUTE = ("core_attn",)
_NOTES: Mapping[str, str] = MappingProxyType({
    "param_offload": "parameters wait on the host between updates; the update has them on the GPU",
    "optimizer_offload": "optimizer states wait on the host between updates",
})  # fmt: skip


def is_verl(launch: Launch) -> bool:
    """Return whether a command's overrides are verl's."""
    return any(word.text.lstrip("+").startswith(f"{_ROOT}.") for word in launch.overrides)


def read_verl(launch: Launch, asked: Asked) -> Reading:
    """Return the training of the actor.

    Raises:
        InputError: a value is missing or wrong, or the actor is not Megatron's.
    """
    words = {}
    for word in launch.overrides:
        path, _, text = word.text.lstrip("+").partition("=")
        words[path] = word._replace(text=text.strip("\"'"))
    target = find_target(asked.target or "megatron")
    _check_engine(words, launch)
    given = dict(_given_fields(words))
    numbers = _numbers(words, asked)
    values = {key: place.value for key, place in given.items()}
    ranks = asked.world_size or numbers["trainer.nnodes"] * numbers["trainer.n_gpus_per_node"]
    length = numbers["data.max_prompt_length"] + numbers["data.max_response_length"]
    batch = numbers[_MINI] * numbers[_RESPONSES]
    micro = numbers[_MICRO]
    if words.get(_IS_DYNAMIC, Word("", 0)).text == "True":
        most = numbers[_MOST_TOKENS] * _parallel_size(values, "context") // length
        model_ranks = prod(
            _parallel_size(values, name) for name in ("tensor", "pipeline", "context")
        )
        micro = _largest_divisor(batch * model_ranks // ranks, most)
    defaults: dict[str, Value] = {
        "sequence_parallel": True, "use_distributed_optimizer": True, "bf16": True,
        "recompute_modules": _RECOMPUTE, "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True, "seq_length": length, "global_batch_size": batch,
        "micro_batch_size": micro,
    }  # fmt: skip
    if words.get(f"{_ACTOR}megatron.dtype", Word("", 0)).text == "float16":
        defaults |= {"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}
    arguments = MegatronArguments(
        given=given, values=defaults | values, problems=(*_notes(words), *_of_configuration(launch))
    )
    reading = reading_of(
        arguments, target, ranks, model=_model(words, asked), line=launch.line,
        reads_files=asked.reads_files,
    )  # fmt: skip
    return replace(reading, problems=(*reading.problems, *core_problems(reading)))


def _parallel_size(values: Mapping[str, Value], name: str) -> int:
    """Return the ranks of a kind of parallelism, such as "tensor"; 1 if no key gives them."""
    size = values.get(f"{name}_model_parallel_size", values.get(f"{name}_parallel_size"))
    return size if isinstance(size, int) and size > 0 else 1


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is no more than `most`, and 1 at least."""
    return max(size for size in range(1, max(1, most) + 1) if size == 1 or number % size == 0)


def _model(words: Mapping[str, Word], asked: Asked) -> str:
    """Return the model's name; a known name at the end of a path suffices.

    Raises:
        InputError: the file names no model.
    """
    if asked.model is not None:
        return asked.model
    word = words.get(_MODEL)
    if word is None or not (word.text or word.missing):
        raise InputError(f"the file gives no {_MODEL}", "name the model with --model")
    text = word.text.rstrip("/")
    name = text.rpartition("/")[2]
    if resolve_name(name) is not None:
        return name
    check_values([(_MODEL, word)])
    return text


def _check_engine(words: Mapping[str, Word], launch: Launch) -> None:
    """Raise InputError if another engine trains the actor, or it has adapters."""
    if not any(path.startswith(f"{_ACTOR}megatron.") for path in words):
        raise InputError(
            f"line {launch.line}: verl's actor has no keys of Megatron, and others are not read",
            f"give {_ACTOR}strategy=megatron with its sizes",
        )
    adapters = words.get(f"{_ROOT}.model.lora.rank") or words.get(f"{_ROOT}.model.lora_rank")
    if adapters is not None and adapters.text not in ("", "0"):
        raise InputError(f"line {adapters.line}: adapters of verl are not planned", "use rank 0")


def _given_fields(words: Mapping[str, Word]) -> Iterator[tuple[str, Given]]:
    """Yield Megatron's fields that the actor's keys give."""
    places = {}
    for path, word in words.items():
        root = next((root for root in _MEGATRON if path.startswith(root)), None)
        key = "" if root is None else path.removeprefix(root)
        if key in KEYS:
            places[key] = (path, word)
    check_values(places.values())
    for key, (path, word) in places.items():
        text = word.text.strip("[]")
        is_list = word.text.startswith("[")
        value = tuple(part.strip(" \"'") for part in text.split(",")) if is_list else None
        yield (
            key,
            Given(
                value=plain_value(word.text) if value is None else value,
                written=path,
                line=word.line,
            ),
        )


def _numbers(words: Mapping[str, Word], asked: Asked) -> dict[str, int]:
    """Return the numbers of the batch and the ranks.

    Raises:
        InputError: a variable has no value, or a value is no number from 1 on.
    """
    wanted = [path for path in _NUMBERS if path in words]
    if asked.world_size is not None:
        wanted = [path for path in wanted if path not in _RANKS]
    check_values((path, words[path]) for path in wanted)
    numbers = dict(_NUMBERS)
    for path in wanted:
        text = words[path].text
        if not text.isdigit() or not int(text):
            place = f"line {words[path].line}: {path}"
            raise InputError(f"{place} is {text!r}, which is no number from 1 on", "mend it")
        numbers[path] = int(text)
    return numbers


def _of_configuration(launch: Launch) -> Iterator[Problem]:
    """Yield a note if a command starts from another configuration than verl's default."""
    for argument in launch.arguments:
        name = "".join(word.text for word in argument.values[:1])
        if argument.name == "config-name" and not name.startswith("ppo_"):
            what = f"{name} is not read: what the command does not give has verl's defaults"
            yield Problem(severity="note", line=argument.shown, what=what)


def _notes(words: Mapping[str, Word]) -> Iterator[Problem]:
    yield Problem(
        severity="note", line=None, what="the actor's update is priced, and no rollout",
        why="verl trains the actor in its update alone",
    )  # fmt: skip
    for key, what in _NOTES.items():
        word = words.get(f"{_ACTOR}megatron.{key}")
        if word is not None and word.text == "True":
            yield Problem(severity="note", line=word.line, what=what)
