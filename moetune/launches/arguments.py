"""The command of a script that starts the training: its launcher, its arguments and its ranks."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from moetune.domain.errors import InputError
from moetune.launches.expansion import Word
from moetune.launches.foreign import check_command
from moetune.launches.reading import Asked, Placed, Problem
from moetune.launches.script import Note, ShellCommand, ShellScript
from moetune.launches.slurm import STEP_TASKS

_FLAG = re.compile(r"--?[A-Za-z_]")
_SWITCHES = ("", "true", "false")
_ALL_OF_A_NODE = frozenset({"gpu", "auto"})
_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate",
    "accelerate.commands.launch",
)  # fmt: skip
_MPI = ("mpirun", "mpiexec")
_ASCEND = re.compile("HCCL_|ASCEND_|NPU_|PYTORCH_NPU_")
_OF_ASCEND = frozenset({"use-fused-rotary-pos-emb", "swap-attention", "use-ascend-mc2",
                        "moe-tp-extend-ep", "use-cp-send-recv-overlap"})  # fmt: skip
_NODES, _PER_NODE = ("nnodes", "num_nodes"), ("nproc_per_node", "num_gpus")
_ACTORS = ("actor-num-nodes", "actor-num-gpus-per-node")
_ALL_RANKS = "num_processes"
"""Argument of accelerate's launcher."""
PER_DEVICE = "per_device_train_batch_size"
"""Argument that identifies the arguments of transformers' Trainer."""
TITAN_STARTER = "run_train.sh"
"""torchtitan's script that starts NGPU ranks on a node."""
_TITAN_RANKS = 8
RECIPE_FILE = "config"
"""Argument of TRL's programs that names a YAML with Trainer's arguments."""
RECIPE_NAMES = frozenset({"model_recipe_name", "mr"})
"""Argument of Megatron-Bridge's performance scripts that names a recipe."""
_SWIFT = frozenset({"megatron", "swift"})
_STARTING = frozenset({*_SWIFT, "deepspeed", TITAN_STARTER})
"""Programs and launchers that start the ranks of a node."""
_NO_LAUNCHERS = frozenset({"echo", "printf", "pip", "git", "cd", "docker", "mkdir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument(Placed):
    """An argument with its values.

    Args:
        name: the name as written, without leading dashes.
    """

    name: str
    values: tuple[Word, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts a training.

    Args:
        program: the Python file or module that it runs; "" if it runs neither.
        starter: the launcher of the ranks, such as "torchrun"; "" if there is none.
        launcher: arguments of the launcher.
        arguments: arguments of the program.
        overrides: words `name=value` of the program.
    """

    program: str
    line: int
    launcher: tuple[Argument, ...]
    arguments: tuple[Argument, ...]
    overrides: tuple[Word, ...]
    environment: Mapping[str, Word]
    notes: tuple[Note, ...]
    starter: str = ""

    @property
    def is_slime(self) -> bool:
        """Whether slime trains an actor (`slime/backends/megatron_utils/arguments.py`)."""
        return any(argument.name == _ACTORS[1] for argument in self.arguments)

    @property
    def packing(self) -> str:
        """The hint to add sizes if slime packs sequences into micro-batches; "" if it does not."""
        words = (row.values[0].text for row in self.arguments
                 if row.name == "max-tokens-per-gpu" and row.values)  # fmt: skip
        hint = "--max-tokens-per-gpu packs sequences: add -- --micro-batch-size 1 --seq-length"
        return next((f"{hint} {word or 4096}" for word in words), "")

    @property
    def is_mindspeed(self) -> bool:
        """Whether MindSpeed patches Megatron-LM's program for Ascend devices."""
        names = {argument.name for argument in self.arguments}
        return bool(names & _OF_ASCEND) or any(_ASCEND.match(name) for name in self.environment)

    def ranks(self, asked: Asked) -> int:
        """Return the number of ranks that are started.

        Raises:
            InputError: the launcher's numbers have no value.
        """
        if asked.world_size is not None:
            return asked.world_size
        if "accelerate" in self.starter:
            return self._count((_ALL_RANKS,), (), asked.devices_per_node)
        if self.is_slime:
            names = {row.name: row.values[0].text for row in self.arguments if row.values}
            counts = [names.get(name, "") for name in _ACTORS]
            if all(map(str.isdigit, counts)):
                return int(counts[0]) * int(counts[1])
        if self.starter in _MPI:
            return self._count(("np", "n"), (), 0)
        is_started = self.starter or {self.program} & _STARTING
        if not is_started and (tasks := self.environment.get(STEP_TASKS)) is not None:
            return self._number(tasks, "srun")
        nodes = self._count(_NODES, ("NNODES",), 1)
        variables = ("NPROC_PER_NODE", "NGPU")
        return nodes * self._count(_PER_NODE, variables, asked.devices_per_node)

    def _count(self, names: Collection[str], variables: tuple[str, ...], all_of_them: int) -> int:
        """Return a number of the launcher: nodes, or ranks of a node."""
        values = [(argument.values[0], f"--{argument.name}") for argument in self.launcher
                  if argument.name.replace("-", "_") in names and argument.values]  # fmt: skip
        is_launched = bool(self.launcher) and names in (_NODES, _PER_NODE)
        if not values and not is_launched:
            values = [(self.environment[key], key) for key in variables if key in self.environment]
        if not values:
            if self.starter == "deepspeed" and names is _PER_NODE:
                return all_of_them
            if self.program == TITAN_STARTER and names is _PER_NODE:
                return _TITAN_RANKS
            is_of_a_node = bool(_STARTING & {self.program, self.starter})
            if is_launched or (names is _NODES and is_of_a_node):
                return 1
            hint = "give the ranks: --world-size N"
            raise InputError(f"line {self.line}: no launcher says how many ranks there are", hint)
        word, written = values[-1]
        if word.text in _ALL_OF_A_NODE and not word.missing:
            return all_of_them
        return self._number(word, written)

    def _number(self, word: Word, written: str) -> int:
        """Return the number that a word gives.

        Raises:
            InputError: it is no number.
        """
        if written == "srun" and not word.text and not word.missing:
            what = f"line {self.line}: nothing says how many processes srun starts"
            hint = "give #SBATCH --ntasks-per-node, or the ranks: --world-size N"
            raise InputError(what, hint)
        if word.missing or not word.text.isdigit() or not int(word.text):
            place = word.place if word.line or word.file else f"line {self.line}"
            what = f"{place}: {written} has {word.missing or word.text}"
            lacks = "which has no value here" if word.missing else "which is no number of ranks"
            raise InputError(f"{what}, {lacks}", "give the ranks: --world-size N")
        return int(word.text)


def check_values(values: Iterable[tuple[str, Word]]) -> None:
    """Check that every variable in the values is set.

    Args:
        values: arguments as they are written, each with the word after it.

    Raises:
        InputError: variables are not set; it names all of them, and the flags that set them.
    """
    lacking = [(written, word) for written, word in values if word.missing]
    if not lacking:
        return
    first, word = lacking[0]
    what = f"{word.place}: {first} has {word.missing}, which has no value here"
    if len(lacking) > 1:
        lacking_values = ", ".join(f"{name} {word.missing}" for name, word in lacking)
        what = f"{len(lacking)} arguments have no value here: {lacking_values}"
    raise InputError(what, _values_wanted(word.missing for _, word in lacking))


def _values_wanted(missing: Iterable[str]) -> str:
    """Return the flags that give values to variables: "give --set TP=VALUE --set PP=VALUE"."""
    names = list(dict.fromkeys(text.strip("${}") for text in missing))
    flags = " ".join(f"--set {name}=VALUE" for name in names if name.isidentifier())
    words = ", ".join(f"${name}" for name in names if name.isdigit())
    expressions = [name for name in names if not name.isidentifier() and not name.isdigit()]
    ways = (
        f"the script's words behind --, for {words}" if words else "", flags,
        f"a value in place of {expressions[0]}" if expressions else "",
    )  # fmt: skip
    return f"give {'; '.join(way for way in ways if way)}"


def find_launch(script: ShellScript, fields: Collection[str]) -> tuple[Launch, list[Problem]]:
    """Return a script's command with the most known arguments, and the problems that break it.

    Words after the script's name that it does not pass on are further arguments of that command.

    Raises:
        InputError: no command has a known argument.
    """
    mended, cuts = _mend(script.commands)
    commands = [row for row in mended if row.words[0].text not in _NO_LAUNCHERS]
    launches = [_launch(command, (*script.notes, *command.notes)) for command in commands]
    numbers = [
        sum(
            _is_known(argument.name, fields) or _names_file(argument)
            for argument in launch.arguments
        )
        + len(launch.overrides)
        for launch in launches
    ]
    chosen = commands if not any(numbers) else [commands[numbers.index(max(numbers))]]
    for command in chosen:
        check_command(" ".join(word.text for word in command.words), command.line)
    if not any(numbers):
        notes = "; ".join(f"line {note.line}: {note.text}" for note in script.notes)
        raise InputError(
            "no command in the file starts a training with arguments that are known",
            f"give the script whose last command starts the ranks{f' ({notes})' if notes else ''}",
        )
    return _with_more(launches[numbers.index(max(numbers))], script.more, fields), cuts


def _with_more(launch: Launch, more: tuple[Word, ...], fields: Collection[str]) -> Launch:
    """Return a launch with further arguments and overrides.

    Raises:
        InputError: a word is neither, or is an unknown argument.
    """
    arguments, overrides = tuple(arguments_of(more)), tuple(_overrides(more))
    is_trainer = any(argument.name == PER_DEVICE for argument in launch.arguments)
    unknown = [f"--{argument.name}" for argument in arguments
               if not is_trainer and not _is_known(argument.name, fields)]  # fmt: skip
    lone = takewhile(lambda word: not _FLAG.match(word.text), more)
    unknown += [word.text for word in lone if word not in overrides]
    if unknown:
        what = f"the script does not pass on {unknown[0]} behind --, and it is no known argument"
        raise InputError(what, "leave it out, or spell it as the runtime does")
    return replace(
        launch, arguments=(*launch.arguments, *arguments),
        overrides=(*launch.overrides, *overrides),
    )  # fmt: skip


def _overrides(words: tuple[Word, ...]) -> Iterator[Word]:
    return (word for word in words if re.match(r"\+{0,2}[A-Za-z_][\w.]*=", word.text))


def _is_known(name: str, fields: Collection[str]) -> bool:
    """Return whether an argument is Megatron's, the Trainer's batch, or a torchtitan path."""
    field = name.replace("-", "_")
    is_read = field in fields or field in RECIPE_NAMES or field == PER_DEVICE
    return is_read or name.startswith(("parallelism.", "training."))


def _names_file(argument: Argument) -> bool:
    """Return whether an argument may name a YAML of Trainer's arguments, as in TRL's programs."""
    words = [word.text for word in argument.values[:1]]
    return argument.name == RECIPE_FILE and any(text.endswith((".yaml", ".yml")) for text in words)


def _mend(commands: tuple[ShellCommand, ...]) -> tuple[list[ShellCommand], list[Problem]]:
    """Return commands with their cut-off arguments restored, and a problem for each cut.

    A line that begins with an argument was cut off from the command of the line before it.
    """
    mended: list[ShellCommand] = []
    cuts = []
    for command in commands:
        first = command.words[0]
        if not mended or first.missing or not re.match(r"--?[A-Za-z]", first.text):
            mended.append(command)
            continue
        mended[-1] = replace(mended[-1], words=(*mended[-1].words, *command.words))
        cuts.append(
            Problem(
                severity="stops", line=command.line,
                what=f"line {command.line} begins a command with {first.text}",
                why="the line before it does not end in a backslash, or a comment ends the command",
                fix="a backslash at the end of the line before it, with nothing behind",
            )
        )  # fmt: skip
    return mended, cuts


def _launch(command: ShellCommand, notes: tuple[Note, ...]) -> Launch:
    words = command.words
    place = _program_at(words)
    program = words[place].text.rpartition("/")[2] if place < len(words) else ""
    before, after = words[: min(place, len(words))], words[place + 1 :]
    names = (word.text.rpartition("/")[2] for word in before)
    starters = [name for name in names if name in (*_LAUNCHERS, *_MPI)]
    starter = next((name for name in starters if name not in _MPI), "".join(starters[:1]))
    return Launch(
        program=program, line=command.line, starter=starter,
        launcher=tuple(arguments_of(before)) if starter else (),
        arguments=tuple(arguments_of(after)),
        overrides=tuple(_overrides(after)),
        environment=command.environment, notes=notes,
    )  # fmt: skip


def _program_at(words: tuple[Word, ...]) -> int:
    """Return the place of the program among words: a Python file, a module, or `megatron sft`."""
    if words[0].text in _SWIFT:
        return 0
    for number, word in enumerate(words):
        if word.text.endswith((".py", TITAN_STARTER)):
            return number
        is_module = number and words[number - 1].text in ("-m", "--module")
        if is_module and word.text not in _LAUNCHERS:
            return number
    return len(words)


def arguments_of(words: tuple[Word, ...]) -> Iterator[Argument]:
    """Yield the arguments among words; the words up to the next argument are its values."""
    name, values, head = "", list[Word](), Word("", 0)
    for word in (*words, None):
        if word is None or _FLAG.match(word.text):
            if name:
                yield Argument(name=name, values=tuple(values), line=head.line, file=head.file)
            if word is None:
                return
            head = word
            name, equals, value = word.text.lstrip("-").partition("=")
            values = [word._replace(text=value)] if equals else []
        elif name:
            values.append(word)
