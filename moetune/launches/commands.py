"""Simple commands of a shell script: assignments, tests, built-ins, and commands to keep."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from moetune.launches.conditions import TESTS, test_result
from moetune.launches.expansion import Run, Scope, Text, Word, missing_of, plain, text_of
from moetune.launches.script import Note, ShellCommand, SourcedFiles
from moetune.launches.slurm import STEP_TASKS, batch_variables, step_tasks
from moetune.launches.tokens import Token, tokens_of

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
SOURCED = "a file that the script reads"
_CHANGED = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*]?=(?!=)|\+\+|--)\s*(.*?)\s*", re.DOTALL)
"""A computation that changes a variable."""
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_SHELLS = frozenset({"sbatch", "bash", "sh"})
_DEEPEST = 20


@dataclass(slots=True, kw_only=True)
class CommandReader(ABC):
    """Reader of simple commands, with the variables, commands and notes read so far.

    Args:
        given: variables that the script takes from its environment.
        functions: tokens of each function's body.
        jump: "break" or "continue" in the rest of a turn that either ends; else "".
    """

    scope: Scope
    sources: SourcedFiles
    given: Mapping[str, str]
    exported: set[str] = field(default_factory=set)
    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    functions: dict[str, list[Token]] = field(default_factory=dict)
    jump: str = ""
    depth: int = 0

    @abstractmethod
    def read(self, tokens: list[Token]) -> None:
        """Read statements, such as those of a script inside the script."""

    def leave(self, line: int, what: str) -> None:
        """Note a part that is left aside."""
        self.notes.append(Note(f"{what} is left aside", line))

    def set_variables(self, values: Mapping[str, str]) -> None:
        """Set exported variables."""
        for name, value in values.items():
            self.scope.variables[name] = (plain(value, 0),)
            self.exported.add(name)

    def run(self, tokens: list[Token], *, is_test: bool) -> bool | None:
        """Read a command, and return whether it succeeds; None if unknown."""
        match tokens[0].text:
            case "!" if tokens[1:]:
                result = self.run(tokens[1:], is_test=is_test)
                return None if result is None else not result
            case text if text.startswith("(("):
                return self.compute(tokens[0])
            case text if text in TESTS:
                return test_result(tokens, self.scope)
            case "true" | "false" | ":" as text:
                for token in tokens[1:]:  # : "${NAME:=usual}" sets a variable
                    self.scope.words(token.text, token.line)
                return text != "false"
            case _:
                self._run_plain(tokens, is_test=is_test)
                return None if is_test else True

    def _run_plain(self, tokens: list[Token], *, is_test: bool) -> None:
        assigned = [*takewhile(is_assignment, tokens)]
        rest = tokens[len(assigned) :]
        if rest and rest[0].text in _DECLARING:
            assigned = [token for token in rest if is_assignment(token)]
            if rest[0].text == "export":
                self.exported |= {token.text.partition("=")[0] for token in rest[1:]}
            rest = []
        if rest:
            self._command(assigned, rest)
        else:
            for token in () if is_test else assigned:
                self._assign(token)

    def compute(self, token: Token) -> bool | None:
        """Run the arithmetic in double brackets; return whether it is not 0, or None if unknown."""
        inside, name = token.text[2:-2], ""
        if changed := _CHANGED.fullmatch(inside):
            name, sign, value = changed.groups()
            before = "" if sign == "=" else f"{name} {sign[0]} "
            inside = f"{before}({value or 1})"
        number = self.scope.number(inside)
        if name:
            self.scope.variables.pop(name, None)
            if number is not None:
                self.scope.variables[name] = (plain(str(number), token.line),)
        return None if number is None else bool(number)

    def _assign(self, token: Token) -> None:
        name, adds, raw = ASSIGNED.fullmatch(token.text).groups()  # type: ignore[union-attr]
        variables = self.scope.variables
        before = variables.get(name, ())
        if token.kind == "array":
            added = self.scope.elements(token.inside, token.line)
            variables[name] = (*before, *added) if adds else added
            return
        value = self.scope.text(raw, token.line)
        if adds and before:
            variables[name] = ((*before[0], *value), *before[1:])
        else:
            variables[name] = (value, *before[1:]) if len(before) > 1 else (value,)

    def _command(self, assigned: list[Token], rest: list[Token]) -> None:
        here = [token for token in rest if token.kind == "here"]
        plain_words = [token for token in rest if token.kind != "here"]
        words = [word for token in plain_words for word in self.scope.words(token.text, token.line)]
        if words and words[0].text == "eval":
            words = [word._replace(text=word.text.strip("'\"")) for word in words[1:]]
        step = next((place for place, word in enumerate(words) if word.text == "srun"), None)
        tasks = None if step is None else step_tasks(words[step:], self._value)
        if not words or self._is_of_shell(words, here, tasks):
            return
        environment = {name: word for name in self.exported if (word := self._value(name))}
        for token in assigned:
            name, _, raw = token.text.partition("=")
            environment[name] = _as_word(self.scope.text(raw, token.line) or plain("", token.line))
        environment |= {} if tasks is None else {STEP_TASKS: tasks}
        line = rest[0].line
        self.commands.append(ShellCommand(words=tuple(words), line=line, environment=environment))

    def _value(self, name: str) -> Word | None:
        """Return a variable's value; None if it has none."""
        texts = self.scope.variables.get(name)
        return _as_word(texts[0]) if texts else None

    def _is_of_shell(self, words: list[Word], here: list[Token], tasks: Word | None) -> bool:
        """Read a script in a command, or a built-in; return whether the command is such."""
        texts = [word.text for word in words]
        shell = next((place for place, text in enumerate(texts) if text in _SHELLS), len(texts))
        is_fed = texts[0] in _SHELLS or (
            shell < len(texts) and all(text[:1] == "-" for text in texts[shell + 1 :])
        )
        if "-c" in texts[shell:-1]:
            script = words[texts.index("-c", shell) + 1]
            self._inner(script.text, script.line, tasks)
        elif here and is_fed:  # such as srun bash << EOF
            lines = text_of(self.scope.text(here[0].text, here[0].line))
            self.set_variables(batch_variables(lines, self.given))
            self._inner(here[0].text, here[0].line, tasks)
        elif texts[0] in self.functions:
            self._call(texts[0], words[1:])
        else:
            return self._is_built_in(words, texts, here)
        return True

    def _is_built_in(self, words: list[Word], texts: list[str], here: list[Token]) -> bool:
        """Read a built-in of the shell; return whether the command is such."""
        variables = self.scope.variables
        match texts:
            case ["break" | "continue" as jump, *_]:
                self.jump = jump
            case ["shift", *by]:
                number = int(by[0]) if by and by[0].isdigit() else 1
                self.scope.positional = self.scope.positional[number:]
            case ["read", *_, name] if here:
                variables[name] = (self.scope.text(here[0].text, here[0].line),)
            case ["printf", "-v", name, form, value] if form.count("%s") == 1:
                run = Run(form.replace("%s", value), words[0].line, words[-1].missing)
                variables[name] = ((run,),)
            case ["unset", *names]:
                for name in names:
                    variables.pop(name, None)
            case ["source" | ".", *_]:
                self._source(words)
            case _:
                return False
        return True

    def _source(self, words: list[Word]) -> None:
        """Read a file of commands, if it is there."""
        text = self.sources.text_of(words[1]) if words[1:] else None
        if text is None:
            self.leave(words[0].line, SOURCED)
        else:
            self._inner(text, self.sources.first_line(words[1]))

    def _inner(self, text: str, line: int, tasks: Word | None = None) -> None:
        """Read a script inside the script, with the same variables.

        Args:
            tasks: the number of processes, if srun starts the inner script.
        """
        if tasks is not None:
            self.scope.variables[STEP_TASKS] = ((Run(tasks.text, tasks.line, tasks.missing),),)
            self.exported.add(STEP_TASKS)
        self.read([*tokens_of(text, line)])
        if tasks is not None:
            self.exported.discard(STEP_TASKS)

    def _call(self, name: str, words: list[Word]) -> None:
        """Read the body of a function that is called, with its words."""
        if self.depth == _DEEPEST:
            return
        scope = self.scope
        before = scope.positional, scope.is_passed_on
        scope.positional = tuple((Run(word.text, word.line, word.missing),) for word in words)
        self.depth += 1
        self.read(self.functions[name])
        self.depth -= 1
        scope.positional, scope.is_passed_on = before


def is_assignment(token: Token) -> bool:
    """Return whether a token assigns a variable."""
    return token.kind == "array" or bool(ASSIGNED.fullmatch(token.text))


def _as_word(text: Text) -> Word:
    runs = text or (Run("", 0),)
    return Word(text_of(runs), runs[0].line, missing_of(runs))
