"""torchtitan, DeepSpeed and transformers: configurations whose keys set a layout and a batch."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moetune.domain.errors import InputError
from moetune.domain.optimizers import optimizer_of
from moetune.domain.pipeline import V_SCHEDULES, StageLetters, even_stages
from moetune.domain.targets import find_target
from moetune.domain.torch_rules import RECIPES
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.tuning import Tuning
from moetune.export.deepspeed import CONFIG
from moetune.export.keys import Setting, Value, names_of, read_settings, size, write_keys
from moetune.export.planned import Planned
from moetune.export.torchtitan import BACKEND, PARALLELISM, TRAINING, stage_modules
from moetune.export.transformers import DISTRIBUTED
from moetune.huggingface.registry import find_decoder_model, model_names, named_model
from moetune.launches.entries import Entry
from moetune.launches.keyed_optimizer import KeyedOptimizer
from moetune.launches.keyed_problems import (
    ALIASES,
    branches,
    engine_problems,
    host_parts,
    misspellings,
    priced_as_else,
    replica_problems,
    shard_problems,
    stage_of,
    titan_problems,
)
from moetune.launches.places import Code
from moetune.launches.reading import (
    Asked,
    Given,
    Problem,
    Reading,
    Severity,
    lines_of,
    rows_of,
)
from moetune.launches.trainer import trainer_tuning

SettingValues = dict[str, Any]
_FULLY_SHARDED = 3
_USUAL_STAGE = 2
"""Default ZeRO stage of accelerate's `--use_deepspeed` (`DeepSpeedPlugin.zero_stage`)."""
_NUMBERS = frozenset({"dp", "tp", "cp", "pp", "ep", "local", "copies", "global_batch", "length"})
_FILLED_IN = {"dp": None, "tp": None}
"""Values of sizes that the file may leave to the number of ranks."""
_MICRO_TOKENS = "num_tokens_per_microbatch_per_dp_rank"
_USUAL_CONTEXT = 2048
_POLICIES = {"full": ("full",), "selective": ("selective",), "none": ()}
COMMAND = "command"
"""Name of the group of keys that the command sets instead of the configuration."""
CHECKPOINTING = "fsdp_activation_checkpointing"
TRAINER = (
    size("length", "seq_len", None),
    Setting(
        name="recompute", read=lambda *are_on: ("full",) if any(are_on) else (),
        keys={"gradient_checkpointing": False, CHECKPOINTING: False,
              "gradient_checkpointing_enable": False},
        write=lambda planned: ("full" in planned.layout.recompute, None, None),
    ),
    Setting(name="total", keys={"train_batch_size": None}, read=lambda total: total,
            write=lambda _: (None,)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form of a runtime's configuration.

    Args:
        groups: settings by the name of the table that has their keys.
        unknown: severity of an unknown key.
        arrange: completes the settings to values of a layout and a job, for a number of ranks.
        problems: yields the keys that stop or surprise, for a number of ranks.
    """

    target: str
    groups: Mapping[str, tuple[Setting, ...]]
    arrange: Callable[[SettingValues, Mapping[str, Any], int], None]
    unknown: Severity = "stops"
    problems: Callable[[Mapping[str, Given], int], Iterator[Problem]] = priced_as_else

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings of all groups."""
        return tuple(setting for group in self.groups.values() for setting in group)

    @property
    def keys_by_table(self) -> Mapping[str, tuple[str, ...]]:
        """The keys of each table, by its name."""
        return {table: names_of(group) for table, group in self.groups.items()}


def _modules(planned: Planned) -> tuple[Value]:
    if planned.layout.pp == 1:
        return (None,)
    recipe = next((recipe for recipe in RECIPES if recipe.is_of(planned.decoder)), None)
    stages = stage_modules(planned, has_tower=recipe is not None and recipe.tower == "kept")
    return (tuple(map(tuple, stages)),)


_MODULES = Setting(
    name="stages", keys={"module_fqns_per_model_part": None}, write=_modules,
    read=lambda names: names,
)  # fmt: skip


_POLICY = Setting(
    name="policy", keys={"activation_checkpoint.mode": None}, read=lambda mode: mode,
    write=lambda planned: (next(iter(planned.layout.recompute), "none"),),
)  # fmt: skip
"""The policy as TOML and arguments have it; programs assign a class to `activation_checkpoint`."""


def _titan(settings: SettingValues, values: Mapping[str, Any], ranks: int) -> None:
    shards, stages = settings["dp"], settings.pop("stages")
    del settings["policy"]  # read below, as it is written in two ways
    sharers = settings["tp"] * settings["cp"] * settings["pp"]
    copies = settings.pop("copies")
    settings["dp"] = max(1, ranks // sharers) if shards == -1 else shards * copies
    schedule, micro_batch = settings.pop("schedule")
    local, is_piped = settings.pop("local"), settings["pp"] > 1
    settings["micro_batch"] = micro_batch if is_piped else local
    if settings["global_batch"] == -1:
        settings["global_batch"] = local * settings["dp"]
    settings["zero"] = 2 if is_piped else settings["zero"] or 3
    if is_piped:
        if schedule is None:
            given = values.get("pipeline_parallel_schedule")
            raise InputError(f"schedule {given} is not planned", "use 1F1B or Interleaved1F1B")
        settings["schedule"] = schedule
        settings["stages"] = stages
        several = schedule in V_SCHEDULES or schedule == "interleaved"
        settings["vpp"] = 2 if several else 1  # torchtitan's default
    if settings.get("dispatcher", "") is None:
        kind = values.get("moe_comm_backend")
        raise InputError(f"moe_comm_backend {kind} is not planned", "use standard or deepep")
    policy = values.get("activation_checkpoint") or values.get("activation_checkpoint.mode")
    is_left_out = "activation_checkpoint" in values and policy is None
    name = "none" if is_left_out else str(policy).removesuffix("AC.Config").lower()
    settings["recompute"] = _POLICIES.get(name, ("selective",))
    if re.search(r"(?i)mxfp8|\bmx\b", str(values.get("converters", ""))):
        settings["dtype"] = "mxfp8"


def hugging_face(settings: SettingValues, _: Mapping[str, Any], ranks: int) -> None:
    """Complete the values of Trainer's keys.

    Raises:
        InputError: no key gives the batch, or the ZeRO stage is wrong.
    """
    settings["tp"] = settings["tp"] or 1
    settings["dp"] = max(1, ranks // settings["tp"])
    steps, total = settings.pop("accumulated"), settings.pop("total")
    steps = 1 if steps == "auto" else steps  # the default of TrainingArguments
    if not isinstance(settings["micro_batch"], int) and isinstance(total, int):
        settings["micro_batch"] = max(1, total // (steps * settings["dp"]))
    if not isinstance(settings["micro_batch"], int) or not isinstance(steps, int):
        raise InputError(
            "nothing says the sequences of a micro-batch, or the steps that are accumulated",
            "-- --per_device_train_batch_size 1 --gradient_accumulation_steps 8",
        )
    settings["global_batch"] = settings["micro_batch"] * steps * settings["dp"]
    stage = str(settings.setdefault("zero", 3)).removeprefix("ZERO_")  # as oumi has it
    if stage not in ("0", "1", "2", "3"):
        raise InputError(f"stage {stage} of ZeRO is none", "give a stage from 0 to 3")
    settings["zero"] = int(stage)


TITAN = Dialect(
    target="torchtitan", arrange=_titan, problems=titan_problems,
    groups={"parallelism": (*PARALLELISM, _MODULES), "training": TRAINING, "": (BACKEND, _POLICY)},
)  # fmt: skip
DEEPSPEED = Dialect(
    target="deepspeed", groups={"": CONFIG, COMMAND: TRAINER}, arrange=hugging_face,
    unknown="note", problems=engine_problems,  # it ignores unknown keys
)  # fmt: skip
REPLICATED = replace(DEEPSPEED, problems=replica_problems)
TRANSFORMERS = Dialect(
    target="transformers", arrange=hugging_face, problems=shard_problems,
    groups={"distributed": DISTRIBUTED, "": (*CONFIG[:2], *TRAINER)},
)  # fmt: skip


def read_keyed(dialect: Dialect, entries: tuple[Entry, ...], asked: Asked) -> Reading:
    """Return the training that a configuration describes.

    Raises:
        InputError: a value is missing or wrong, or the model is not named.
    """
    given = {key: Given(value=value, written=entry.path, line=entry.line, file=entry.file)
             for entry in entries for key, value in _keys(dialect, entry)}  # fmt: skip
    given |= _in_sequences(given)
    values = _with_stage({key: place.value for key, place in given.items()})
    ranks = asked.world_size or _ranks(values)
    if ranks is None:
        raise InputError("the file does not say how many ranks there are", "give --world-size N")
    settings = read_settings(dialect.settings, values)
    for name, number in settings.items():
        if number is None and name == "length":
            raise InputError("nothing says the tokens of a sequence", "-- --max_seq_length 4096")
    for name in _NUMBERS & settings.keys():
        if not isinstance(settings[name], int) and settings[name] != _FILLED_IN.get(name, settings):
            hint = "give a number, here or as an argument behind --"
            raise InputError(f"{name} is {settings[name]!r}, which is no number", hint)
    dialect.arrange(settings, values, ranks)
    named = asked.model or _model(values)
    if named is None:
        raise InputError("the file does not name its model", "name it with --model")
    model = find_decoder_model(named, world_size=ranks, reads_files=asked.reads_files)
    if model.decoder is None:
        raise InputError(f"{named} is a single layer, not a model", "name a whole model")
    tuning, remarks = trainer_tuning(given, model.decoder)
    target = find_target(asked.target or _runtime(dialect, tuning, settings))
    keyed = KeyedOptimizer(
        given=given, target=target, decoder=model.decoder, tuning=tuning,
        zero=settings.get("zero", 1), ranks=settings["dp"],
    )  # fmt: skip
    optimizer = keyed.optimizer
    facts = {"hides_gradients": settings.pop("hides_gradients", target.hides_gradients)}
    if optimizer_of(optimizer.name, target.adam) != optimizer:
        facts["adam"] = optimizer
    job = TrainingJob(
        decoder=model.decoder, world_size=ranks, global_batch=settings.pop("global_batch"),
        length=settings.pop("length"), dtype=settings.pop("dtype", "bfloat16"),
        leaves_room=model.decoder.num_moe_layers > 0, optimizer=optimizer.name,
        tuning=tuning,
    )  # fmt: skip
    if settings.get("pp", 1) > 1:
        settings["stages"] = _stages(settings.get("stages"), settings, model.decoder)
        settings["vpp"] = max(1, len(settings["stages"]) // settings["pp"])
    layout = FoldedLayout(**settings)
    return Reading(
        target=target, decoder=model.decoder, model_words=f"{model.title}, by its name", job=job,
        layout=layout, given=given, values=values, facts=facts,
        rows=(*rows_of(dialect.settings, given, layout, job), *keyed.rows),
        lines=lines_of(dialect.settings, given), on_host=host_parts(given),
        problems=(
            *misspellings(entries, [key for setting in dialect.settings for key in setting.keys],
                          dialect.unknown, f"{target.label}: {target.source}"),
            *dialect.problems(given, ranks), *keyed.problems, *remarks, *branches(entries),
        ),
    )  # fmt: skip


def _with_stage(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the ZeRO stage from the engine's name, or from accelerate's launcher."""
    engine = values.get("deepspeed")
    usual = _USUAL_STAGE if values.get("use_deepspeed") else None
    stage = stage_of(engine) if isinstance(engine, str) else usual
    return values if stage is None else {"zero_optimization.stage": stage, **values}


def _runtime(dialect: Dialect, tuning: Tuning, settings: SettingValues) -> str:
    """Return the runtime to price: transformers for adapters, whose optimizer states are small.

    With adapters a ZeRO stage below 3 shards nothing else, so that the ranks are replicas.
    """
    if tuning.adapters is None:
        return dialect.target
    settings["zero"] = settings["zero"] if settings["zero"] == _FULLY_SHARDED else 0
    return TRANSFORMERS.target


def _in_sequences(given: Mapping[str, Given]) -> dict[str, Given]:
    """Return batches in sequences for a file that has them in tokens, as torchtitan after 0.3.

    Source: `TrainingConfig` of torchtitan/config/configs.py.
    """
    tokens, length = given.get(_MICRO_TOKENS), given.get("max_context_length")
    if tokens is None:
        return {}
    width = length.value if length is not None else _USUAL_CONTEXT
    batches = given.get("num_pp_microbatches")
    step = given.get("num_tokens_per_train_step")
    numbers = tokens.value, width, 1 if batches is None else batches.value
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise InputError(f"line {tokens.line}: {_MICRO_TOKENS} needs whole numbers", "give numbers")
    micro = max(1, tokens.value // width)  # type: ignore[operator] # checked
    in_sequences = {
        "local_batch_size": replace(tokens, value=micro * numbers[2]),  # type: ignore[operator]
        "pipeline_parallel_microbatch_size": replace(tokens, value=micro),
        "seq_len": replace(length or tokens, value=width),
    }
    if step is not None and isinstance(step.value, int) and step.value > 0:
        in_sequences["global_batch_size"] = replace(step, value=step.value // width)  # type: ignore[operator]
    return in_sequences


def _keys(dialect: Dialect, entry: Entry) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a dialect that an entry sets, by its path or the end of its path."""
    leaf = entry.path.rpartition(".")[2]
    leaf = ALIASES.get(leaf, leaf)
    keys = {key for setting in dialect.settings for key in setting.keys}
    dotted = next((key for key in keys if f".{entry.path}".endswith(f".{key}")), None)
    yield dotted or (leaf if leaf in keys or "." not in leaf else entry.path), entry.value
    if "." in entry.path or leaf != entry.path:
        yield entry.path, entry.value
    if leaf in keys and leaf != dotted:
        yield leaf, entry.value


def _ranks(values: Mapping[str, Any]) -> int | None:
    """Return the ranks that an accelerate file gives; None if it gives none."""
    if isinstance(values.get("num_processes"), int):
        return int(values["num_processes"])
    return None


def _model(values: Mapping[str, Any]) -> str | None:
    """Return the model that a file names: a flavor of torchtitan, or a Hugging Face model."""
    module = str(values.get("import.model_registry", ""))
    family = values.get("model.name") or module.rpartition(".")[2]
    flavor = values.get("model.flavor") or values.get("model_spec.0")
    recipes = [recipe for recipe in RECIPES if recipe.flavor == flavor]
    if len(recipes) > 1:  # a registry's file names its family by its folder
        recipes = [recipe for recipe in recipes if recipe.family == family]
    for recipe in recipes:
        decoders = (named_model(name).decoder for name in model_names())
        return next((row.name for row in decoders if recipe.is_of(row)), None)
    named = values.get("model_name")
    return str(named) if named else None


def _stages(names: Any, settings: SettingValues, decoder: Any) -> StageLetters:  # noqa: ANN401
    """Return the stages from torchtitan's module names, or even stages for the schedule."""
    predictions = 0
    if not names:
        return even_stages(decoder.num_layers, predictions, settings["pp"] * settings["vpp"])
    words = []
    for part in names:
        count = sum(name.startswith("layers.") for name in part)
        begins, ends = "tok_embeddings" in part, "lm_head" in part or "output" in part
        words.append("E" * begins + "t" * count + "L" * ends)
    return tuple(words)


def keyed_changes(dialect: Dialect, reading: Reading, layout: FoldedLayout) -> dict[str, Value]:
    """Return the keys whose value differs in another layout; None for a key to remove."""
    before, after = (
        write_keys(dialect.settings, Planned(plan_id="", job=reading.job, target=reading.target,
                                          layout=row.explicit(reading.decoder)))
        for row in (reading.layout, layout)
    )  # fmt: skip
    keys = dict.fromkeys((*before, *after))
    changes = {key: after.get(key) for key in keys if before.get(key) != after.get(key)}
    for setting in dialect.settings:  # other keys may say the same
        if changes.keys() & setting.keys.keys() and setting.of(
            {**reading.values, **changes}
        ) != setting.of(after):
            said = (key for key in setting.keys if key in reading.given and key not in changes)
            changes |= dict.fromkeys(said)
    usual = {key: value for setting in dialect.settings for key, value in setting.keys.items()}
    return {key: value for key, value in changes.items()
            if key in reading.given or value != usual[key]}  # fmt: skip


def short_value(value: Value) -> str:
    """Return a value as JSON; for a list of lists only their number."""
    if isinstance(value, Code):
        return value
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return f"{len(value)} lists of modules"
    return json.dumps(value)


def key_as_written(key: str, given: Mapping[str, str]) -> str:
    """Return a key as the file writes it, if the file has another name for it, as axolotl's."""
    written = given.get(key, key)
    return key if written.rpartition(".")[2] == key.rpartition(".")[2] else written
