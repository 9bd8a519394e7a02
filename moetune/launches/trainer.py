"""Commands with arguments of transformers' Trainer, and the files that they name for its engine.

LLaMA-Factory, TRL and ms-swift pass such arguments. A DeepSpeed JSON, an accelerate YAML or an
FSDP configuration is read if it is next to the launch, or under the current folder.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from moetune.domain.architecture import Decoder
from moetune.domain.errors import InputError
from moetune.domain.tuning import TRAINS_ALL, AdaptedParts, Adapters, Tuning
from moetune.export.keys import Value
from moetune.launches.arguments import PER_DEVICE, RECIPE_FILE, Argument, Launch, check_values
from moetune.launches.entries import Entry, entries_of
from moetune.launches.megatron import plain_value
from moetune.launches.reading import LARGEST_BYTES, Asked, Given, Problem

_NAMING = (RECIPE_FILE, "config_file", "deepspeed", "deepspeed_config_file", "fsdp_config")
"""Keys whose value is a file of the Trainer's arguments, of an engine, or of accelerate."""
_SAYS = re.compile(
    "batch|accum|seq|length|cutoff|deepspeed|fsdp|^model|config|lora|module|type|size|bit|stage|"
    "checkpointing|optim|num_|peft|adapter|liger|parallel"
)
"""Arguments that affect a step, and so need their values."""
_PREFERENCES = re.compile("dpo|kto|orpo|grpo|ppo|reward")
"""Names of programs that train on preferences or rewards."""
_ENDINGS = (".json", ".yaml", ".yml", ".toml")
_KINDS = ("finetuning_type", "tuner_type", "train_type", "use_peft", "adapter")
_RANKS = ("lora_rank", "lora_r", "r")
_MODULES = ("lora_target", "target_modules", "lora_target_modules")
_BITS = ("quantization_bit", "quant_bits", "load_in_4bit", "q_lora")
_DEFAULT_RANK, _DEFAULT_MODULES = 8, "all"
"""Defaults of LLaMA-Factory and ms-swift."""
_TRL_RANK, _TRL_MODULES = 16, ("q_proj", "v_proj")
"""Defaults of TRL (`trl/trainer/model_config.py`), whose modules are PEFT's for most families."""
_ATTENTION, _FFNS = {f"{name}_proj" for name in "qkvo"}, {"gate_proj", "up_proj", "down_proj"}


def trainer_entries(launch: Launch, asked: Asked) -> tuple[Entry, ...]:
    """Return a command's arguments of the Trainer, after those of the files that it names.

    Raises:
        InputError: a variable has no value, or a named file cannot be read.
    """
    arguments = [*launch.launcher, *launch.arguments]
    names, recipe = {*map(_field, launch.arguments)}, _of_recipe(launch, asked)
    if PER_DEVICE not in {*names, *(entry.path for entry in recipe)}:
        return ()
    arguments = [row for row in arguments if _SAYS.search(_field(row)) or not _is_missing(row)]
    check_values((f"--{row.name}", row.values[0]) for row in arguments if row.values)
    given = tuple(Entry(_field(row), _value(row), row.line, row.file) for row in arguments)
    is_usual = launch.program == "swift" and not names & {*_KINDS}
    defaults = (Entry("tuner_type", "lora", 0),) if is_usual else ()
    if _PREFERENCES.search(launch.program):
        defaults = (*defaults, Entry("rlhf_type", launch.program, launch.line))
    return with_named_files((*defaults, *recipe, *given), asked)


def _of_recipe(launch: Launch, asked: Asked) -> list[Entry]:
    """Return the values of the YAML that TRL's programs take as `--config`, if it exists."""
    named = (Entry(RECIPE_FILE, argument.values[0].text, argument.line)
             for argument in launch.arguments
             if argument.name == RECIPE_FILE and argument.values)  # fmt: skip
    files = (_file(entry, asked) for entry in named)
    return [row for file in files if file is not None for row in _read(file)]


def with_named_files(entries: tuple[Entry, ...], asked: Asked) -> tuple[Entry, ...]:
    """Return entries without names of files, after the entries of these files.

    A missing file stays named, for a note that says so.
    """
    named: list[Entry] = []
    rest: list[Entry] = []
    for entry in _with_model(entries):
        file = _file(entry, asked)
        if file is None:
            rest.append(entry)
        else:
            inner = _read(file)  # accelerate's file names DeepSpeed's, which names no other
            innermost = (_file(deeper, asked) for deeper in inner)
            named += [row for deeper in innermost if deeper is not None for row in _read(deeper)]
            named += [row for row in inner if _file(row, asked) is None]
    return (*named, *rest)


def _with_model(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return entries with the model under Trainer's key; ms-swift's `model_name` is no model.

    If a program loads a model, that is its model, and not a value named `model`.
    """
    loads = {entry.path for entry in entries if str(entry.value).endswith(".from_pretrained")}
    loaded = (entry for entry in entries if entry.path.endswith(".0") and "model" in entry.path
              and entry.path[:-2] in loads and isinstance(entry.value, str))  # fmt: skip
    names = {entry.path: entry for entry in entries if isinstance(entry.value, str)}
    model = next(loaded, None) or names.get("model")
    if model is None or (model.path == "model" and loads):
        return entries
    named = model._replace(path="model_name_or_path")
    return (named, *(entry for entry in entries if entry.path not in ("model", "model_name")))


def trainer_tuning(given: Mapping[str, Given], decoder: Decoder) -> tuple[Tuning, list[Problem]]:
    """Return which parts of a model train, and notes on parts that are priced differently.

    Raises:
        InputError: the training is neither of all parameters nor by LoRA.
    """
    kind = next((given[key] for key in _KINDS if key in given), None) or _peft_of(given)
    is_of_factory = "cutoff_len" in given or "stage" in given
    name = ("lora" if is_of_factory else None) if kind is None else kind.value
    if name in (None, False, "", "full"):
        return TRAINS_ALL, []
    if name not in ("lora", "qlora", True) and not _is_peft(name):
        what = f"line {kind.line if kind else 0}: {kind.written if kind else ''} {name}"
        raise InputError(
            f"{what} trains in a way that is not read here",
            "plan it:  moetune plan --train lora:rank=8 --target transformers",
        )
    default = _TRL_RANK if "use_peft" in given else _DEFAULT_RANK
    rank = next((given[key].value for key in _RANKS if key in given), default)
    if not isinstance(rank, int) or rank < 1:
        raise InputError(f"the rank of the adapters is {rank!r}", "give a number from 1 on")
    bits = next((given[key].value for key in _BITS if key in given), None)
    targets, remark = _adapted_parts(given, decoder)
    line = next((given[key].line for key in _MODULES if key in given), None)
    problems = [Problem(severity="note", line=line, what=remark)] if remark else []
    if (parameters := given.get("target_parameters")) is not None:
        what = f"{parameters.written}: adapters of experts are not priced"
        problems.append(Problem(severity="note", line=parameters.line, what=what))
    tuning = Tuning(
        adapters=Adapters(rank=rank, targets=targets),
        base="nf4" if bits in (True, 4) else "bfloat16",
    )
    return tuning, problems


def _peft_of(given: Mapping[str, Given]) -> Given | None:
    """Return the call by which a program makes PEFT's adapters; None if there is none."""
    return next((place for place in given.values() if _is_peft(place.value)), None)


def _is_peft(value: object) -> bool:
    """Return whether a call is PEFT's or unsloth's for adapters."""
    return isinstance(value, str) and value.rpartition(".")[2] in ("LoraConfig", "get_peft_model")


def _adapted_parts(given: Mapping[str, Given], decoder: Decoder) -> tuple[AdaptedParts, str]:
    """Return the parts whose adapters are priced, and a remark if the launch adapts others.

    transformers stores experts as parameters, which "all" and "all-linear" do not select.
    """
    default = _TRL_MODULES if "use_peft" in given else _DEFAULT_MODULES
    named = next((given[key].value for key in _MODULES if key in given), default)
    words = named if isinstance(named, tuple) else str(named).split(",")
    modules = {str(word).strip() for word in words} - {"all", "all-linear"}
    has_ffns = not modules or modules & _FFNS
    targets: AdaptedParts = "all" if has_ffns and not decoder.num_moe_layers else "attention"
    if modules and not modules >= _ATTENTION:
        return targets, f"adapters on {', '.join(sorted(modules))} are priced as on all {targets}"
    if has_ffns and decoder.num_moe_layers:
        return targets, "experts have no adapters: transformers keeps them as parameters"
    return targets, ""


def _value(argument: Argument) -> Value:
    """Return the value of an argument, a tuple if it has several words."""
    words = tuple(word.text for word in argument.values)
    if len(words) > 1:
        return words
    return plain_value(words[0]) if words else True


def _is_missing(argument: Argument) -> bool:
    return any(word.missing for word in argument.values[:1])


def _field(argument: Argument) -> str:
    return argument.name.replace("-", "_")


def _file(entry: Entry, asked: Asked) -> Path | None:
    """Return the file that an entry names; None if it names none that exists."""
    value, key = entry.value, entry.path.rpartition(".")[2]
    if asked.folder is None or key not in _NAMING or not str(value).endswith(_ENDINGS):
        return None
    places = (asked.folder / str(value), Path(str(value)))
    return next((place for place in places if place.is_file()), None)


def _read(file: Path) -> list[Entry]:
    """Return the values of a named file except "auto"; raise InputError if it cannot be read."""
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise InputError(f"{file} is larger than 1 MiB", "give the engine's configuration")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}", "mend the file, or its name") from None
    entries = entries_of(file.name, text)
    return [row._replace(line=0, file=file.name) for row in entries if row.value != "auto"]
