"""Readers of Megatron-Bridge's keys, torchtitan's arguments, and Megatron's arguments in YAML."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from moetune.domain.errors import InputError
from moetune.domain.megatron_models import RECIPES
from moetune.domain.targets import find_target
from moetune.export.keys import Value, names_of
from moetune.huggingface.registry import resolve_name
from moetune.launches.arguments import TITAN_STARTER, Argument, Launch, check_values
from moetune.launches.entries import Entry
from moetune.launches.expansion import Scope, Word, plain
from moetune.launches.keyed import TITAN
from moetune.launches.keyed_problems import TITAN_FILE, branches, misspellings
from moetune.launches.megatron import (
    KEYS,
    MegatronArguments,
    plain_value,
    reading_of,
    resolve,
)
from moetune.launches.megatron_checks import UNEVEN, core_problems
from moetune.launches.megatron_precision import recipe_values
from moetune.launches.reading import Asked, Given, Problem, Reading
from moetune.launches.tuning import bridge_adapters, bridge_frozen, names_adapters

_RECIPE = "megatron.bridge.recipes"
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
_HOOK = "register_pre_wrap_hook"
_HOOKED = "what a hook freezes or changes in the model is not read"
_COMMON: Mapping[str, Value] = MappingProxyType({
    "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
})  # fmt: skip
PERFORMANCE = "_benchmark_common"
_BASES: Mapping[str, Mapping[str, Value]] = MappingProxyType({
    "_pretrain_common": {
        **_COMMON, "global_batch_size": 32, "micro_batch_size": 2, "seq_length": 4096,
    },
    "_sft_common": {
        **_COMMON, "global_batch_size": 128, "micro_batch_size": 1, "seq_length": 2048,
    },
    PERFORMANCE: {
        **_COMMON, "micro_batch_size": 1, "seq_length": 4096, "grad_reduce_in_bf16": True,
        "expert_tensor_parallel_size": 1, "moe_permute_fusion": True,
        "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te",
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
})  # fmt: skip
"""Values that recipes start from: `recipes/common.py` and `perf_recipes`, Megatron-Bridge 0.6."""
_USUAL: Mapping[str, Value] = MappingProxyType({
    "bf16": True, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
})  # fmt: skip
"""Values that Bridge's model providers and NeMo's configurations start from."""
_NEMO = "MegatronStrategy"
_TRAINER = ("num_nodes", "devices")
_NAMING = ("recipe", "_target_")
"""Last names of keys that name a recipe's function."""
_SAYS = MappingProxyType({"peft_scheme": "peft", "mode": "peft", "recipe": "recipe"})
"""Arguments of Bridge's scripts that are no overrides, with the keys that they set."""
_SECTIONS = frozenset({
    "model", "train", "ddp", "optimizer", "comm_overlap", "mixed_precision", "checkpoint", "peft",
    "dataset", "scheduler", "tokenizer", "logger", "rng", "dist", "profiling", "validation",
})  # fmt: skip
"""Sections of Bridge's configuration that overrides begin with."""
_OF_TOKENIZER = "tokenizer."
"""Section of a null tokenizer, whose vocabulary at most pads that of the model."""
_LAYOUT = "_pipeline_model_parallel_layout"
"""Suffix of functions that set a layout of pipeline stages."""
_FLEX, _SHARED = "apply_flex_dispatcher_backend", "moe_shared_expert_overlap"
"""Bridge's function that sets the dispatcher, and the field that it switches off."""
_ALL = (None, "none", "None", "", "pretrain", "sft", "finetune")
"""Schemes and modes that train all parameters."""
_OF_RECIPE = re.compile(r"(\w+?)_(pretrain|sft|peft|finetune|lora)_\w*config")
_FROM_RECIPE = "values that the recipe sets and the file does not are read as Megatron's defaults"


def bridge_entries(launch: Launch) -> tuple[Entry, ...]:
    """Return the overrides of a command, such as `model.tensor_model_parallel_size=4`."""
    split = {word: word.text.lstrip("+").partition("=") for word in launch.overrides}
    named = {word: parts for word, parts in split.items()
             if parts[0].partition(".")[0] in _SECTIONS}  # fmt: skip
    wanted = ((path, word) for word, (path, _, _) in named.items()
              if path.rpartition(".")[2] in KEYS)  # fmt: skip
    check_values(wanted)
    pairs = [(parts, word.line) for word, parts in named.items()]
    entries = tuple(Entry(path, plain_value(value), line) for (path, _, value), line in pairs)
    said = tuple(
        Entry(_SAYS[argument.name.replace("-", "_")], argument.values[0].text, argument.line)
        for argument in launch.arguments
        if argument.values and argument.name.replace("-", "_") in _SAYS
    )
    return (*entries, *said) if any(_leaf(entry) in KEYS for entry in entries) else ()


def titan_entries(launch: Launch) -> tuple[Entry, ...]:
    """Return the paths of torchtitan's arguments, such as `--training.seq_len`; else ()."""
    entries = tuple(
        Entry(argument.name, plain_value(argument.values[0].text), argument.line, argument.file)
        for argument in launch.arguments if "." in argument.name and argument.values
    )  # fmt: skip
    keys, file = names_of(TITAN.settings), launch.environment.get("CONFIG_FILE")
    check_values((f"--{row.name}", row.values[0]) for row in launch.arguments if row.values
                 and (row.name in keys or row.name.rpartition(".")[2] in keys)
                 and "." in row.name)  # fmt: skip
    if launch.program == TITAN_STARTER and file is not None and not file.missing:
        entries = (Entry(TITAN_FILE, file.text, file.line), *entries)
    is_titan = "torchtitan" in launch.program or launch.program == TITAN_STARTER
    is_titan = is_titan or any(_leaf(entry) in keys for entry in entries)
    return entries if is_titan or any(entry.path in keys for entry in entries) else ()


def yaml_launch(entries: tuple[Entry, ...], asked: Asked) -> Launch:
    """Return a launch with the Megatron arguments that a YAML file has under MODEL_ARGS."""
    scope = Scope({name: (plain(value, 0),) for name, value in asked.values.items()})
    arguments, environment = [], {}
    for entry in entries:
        section, _, key = entry.path.partition(".")
        if section == "ENV_VARS":
            environment[key] = Word(str(entry.value), entry.line)
        elif key.startswith("--") and entry.value is not False:
            parts = entry.value if isinstance(entry.value, tuple) else (entry.value,)
            texts = [text for part in parts if part is not True for text in str(part).split()]
            words = [word for text in texts for word in scope.words(text, entry.line)]
            arguments.append(
                Argument(name=key.removeprefix("--"), values=tuple(words), line=entry.line)
            )
    return Launch(
        program="", line=1, launcher=(), arguments=tuple(arguments), overrides=(),
        environment=environment, notes=(),
    )  # fmt: skip


def read_bridge(entries: tuple[Entry, ...], asked: Asked, *, line: int) -> Reading:
    """Return the training that Megatron-Bridge's keys describe.

    Raises:
        InputError: a value is missing or wrong, or neither the file nor `--model` names the model.
    """
    is_nemo = any(_NEMO in str(entry.value) for entry in entries)
    target = find_target(asked.target or ("megatron" if is_nemo else "bridge"))
    _check_all_trained(entries)
    given = {
        _leaf(entry): Given(
            value=_value(entry), written=entry.path, line=entry.line, file=entry.file
        )
        for entry in entries if _leaf(entry) in KEYS and _OF_TOKENIZER not in entry.path
    }  # fmt: skip
    name = asked.model or next(_recipes(entries), None)
    if name is None:
        raise InputError("the file names no recipe that is known", "name the model with --model")
    ranks = asked.world_size or _ranks(entries)
    if ranks is None:
        raise InputError("the file does not say how many ranks there are", "give --world-size N")
    usual = _COMMON if is_nemo or any(_recipes(entries)) else {}
    base = next((_BASES[entry.value] for entry in entries if entry.value in _BASES), None)
    values = {**(base or usual), **{key: place.value for key, place in given.items()}}
    reduces = next((entry for entry in entries if _leaf(entry) == "grad_reduce_in_fp32"), None)
    if reduces is not None:
        values["grad_reduce_in_bf16"] = not reduces.value
    notes = (
        ()
        if base
        else (Problem(severity="note", line=None, what=_FROM_RECIPE, why="the recipe is not run"),)
    )
    said: dict[str, Value] = {
        key: value
        for key, value in {**_USUAL, **recipe_values(entries), **values}.items()
        if value is not None
    }
    frozen = bridge_frozen(entries)
    hooks = [entry.line for entry in entries if _leaf(entry) == _HOOK and not frozen]
    arguments = MegatronArguments(
        given=given, values=resolve(said),
        problems=(*misspellings(entries, KEYS, "stops", f"{target.label}: {target.source}"), *notes,
                  *branches(entries),
                  *(Problem(severity="note", line=line, what=_HOOKED) for line in hooks[:1])),
        adapters=bridge_adapters(entries), frozen=frozen,
    )  # fmt: skip
    reading = reading_of(
        arguments, target, ranks, model=name, line=line, reads_files=asked.reads_files
    )
    refused = core_problems(reading) if base or is_nemo else ()  # else a recipe may say more
    if any(_LAYOUT in entry.path for entry in entries):  # set by a function that is not read
        refused = (problem for problem in refused if problem.what != UNEVEN)
    if any(entry.path == f"import.{_FLEX}" for entry in entries):  # which switches the field off
        refused = (problem for problem in refused if _SHARED not in problem.what)
    return replace(reading, problems=(*reading.problems, *refused))


def _check_all_trained(entries: tuple[Entry, ...]) -> None:
    """Raise InputError if adapters train and only a recipe sets their rank and modules."""
    for entry in () if names_adapters(entries) else entries:
        leaf, match = _leaf(entry), _OF_RECIPE.fullmatch(str(entry.value).rpartition(".")[2])
        has_adapters = leaf in _NAMING and match is not None and match[2] in ("peft", "lora")
        if (leaf == "peft" and entry.value not in _ALL) or has_adapters:
            what = f"line {entry.line}: {entry.path} {entry.value} trains adapters"
            raise InputError(
                f"{what}, and nothing says their rank and modules",
                "give it cfg.peft = LoRA(target_modules=[…], dim=16)",
            )


def _leaf(entry: Entry) -> str:
    """Return the last name of an entry's path, as Megatron spells it."""
    leaf = entry.path.rpartition(".")[2]
    return "seq_length" if leaf == "sequence_length" else leaf


def _value(entry: Entry) -> Value:
    value: Value = _DTYPES.get(str(entry.value), entry.value)
    return value


def _ranks(entries: tuple[Entry, ...]) -> int | None:
    """Return the ranks of NeMo's trainer, nodes times devices; None if it lacks either."""
    numbers = {_leaf(entry): entry.value for entry in entries if _leaf(entry) in _TRAINER}
    counts = [number for number in numbers.values() if isinstance(number, int)]
    return prod(counts) if len(counts) == len(_TRAINER) else None


def _recipes(entries: tuple[Entry, ...]) -> Iterator[str]:
    """Yield the models of the recipes that a file names."""
    names = {recipe.function: name for name, recipe in RECIPES.items()}
    for entry in entries:
        for value in (entry.path.removeprefix("import."), entry.value):
            word = value.rpartition(".")[2] if isinstance(value, str) else ""
            if word in names:
                yield names[word]
            elif match := _OF_RECIPE.fullmatch(word):
                model = resolve_name(match[1].replace("_", "-"))
                yield from () if model is None else (model,)
        if entry.path.endswith(".0") and isinstance(entry.value, str) and "/" in entry.value:
            yield entry.value
