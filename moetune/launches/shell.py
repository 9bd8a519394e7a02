"""Reader of a shell script's commands, with its variables expanded.

Functions, loops and branches whose test has no value here are left aside, each with a note.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

from moetune.launches.expansion import Run, Scope, Text, Word, missing_of, plain, text_of
from moetune.launches.script import Note, ShellCommand, ShellScript, SourcedFiles
from moetune.launches.tokens import Token, tokens_of

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_CHANGED = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*]?=(?!=)|\+\+|--)\s*(.*?)\s*", re.DOTALL)
"""A computation that changes a variable."""
_UNSET = re.compile(r"(\$\w+|\$\{\w+\})?")
"""A variable without a value, which a test takes as empty; the output of a command is unknown."""
_FUNCTION = re.compile(r"[A-Za-z_][\w-]*$")
_SBATCH = r"^#SBATCH\s+(?:{})[=: ]\s*(?:[a-z]\w*:)?(\d+)\s*(?:#.*)?$"
_OF_SLURM: Mapping[str, tuple[str, ...]] = {
    "-N|--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node|--gres=gpu": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
"""Slurm's variables, by the options of #SBATCH lines that set them."""
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_SEPARATORS = frozenset({"\n", ";", "&", ";;"})
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
_SHELLS = frozenset({"sbatch", "bash", "sh"})
SOURCED = "a file that the script reads"
_TESTS = frozenset({"[", "[[", "test"})


def read_script(
    text: str, *, extra: tuple[str, ...] = (), values: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> ShellScript:  # fmt: skip
    """Return the commands of a script.

    Args:
        extra: words after the script's name, its `$@`.
        values: variables that the script takes from its environment.
        folder: folder of the script, for files that it reads; None to read no such file.
    """
    reader = _Reader(
        sources=SourcedFiles(folder),
        tokens=[*tokens_of(text)],
        scope=Scope(positional=tuple(plain(word, 0) for word in extra)),
    )
    given = {"PWD": ".", **(values or {})}
    for options, names in _OF_SLURM.items():
        if head := re.search(_SBATCH.format(options), text, re.MULTILINE):
            given = {**dict.fromkeys(names, head[1]), **given}
    for name, value in given.items():
        reader.scope.variables[name] = (plain(value, 0),)
        reader.exported.add(name)
    while reader.position < len(reader.tokens):
        reader.block(frozenset(), active=True)
        reader.position += 1
    more = () if reader.scope.is_passed_on else tuple(Word(word, 0) for word in extra)
    commands, notes = tuple(reader.commands), tuple(reader.notes)
    return reader.sources.named(ShellScript(commands=commands, notes=notes, more=more))


@dataclass(slots=True, kw_only=True)
class _Reader:
    """A position among a script's tokens, with the commands and notes read so far."""

    tokens: list[Token]
    scope: Scope
    sources: SourcedFiles
    position: int = 0
    exported: set[str] = field(default_factory=set)
    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def _token(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def block(self, ends: frozenset[str], *, active: bool) -> str:
        """Read commands up to any of the words, and return that word; "" at the script's end."""
        result: bool | None = True
        joint = ""
        while (token := self._token) is not None:
            if token.text in ends:
                self.position += 1
                return token.text
            if token.kind == "operator" and token.text in {*_SEPARATORS, "&&", "||", "|"}:
                joint = token.text if token.text in ("&&", "||") else ""
                self.position += 1
                continue
            runs = active
            if joint and active:
                runs = result is (joint == "&&")
                if result is None:
                    self._leave(token.line, "what follows a test that has no value here")
            start = self.position
            following = self._statement(active=runs)
            if active and not runs and result is not None:
                self._forget(start)
            result = following if runs or not joint else result
        return ""

    def _statement(self, *, active: bool) -> bool | None:
        token = self.tokens[self.position]
        following = (
            self.tokens[self.position + 1].text if self.position + 1 < len(self.tokens) else ""
        )
        match token.text:
            case "if" if token.kind == "word":
                self._if(active=active)
            case "for" | "while" | "until" | "select" if token.kind == "word":
                self._aside(token, "a loop", "done", active=active)
            case "case" if token.kind == "word":
                self._case(active=active)
            case "function":
                self._aside(token, "a function", "}", active=active)
            case "(" | "{":
                self.position += 1
                self.block(frozenset({"}" if token.text == "{" else ")"}), active=active)
            case _ if following == "(" and _FUNCTION.match(token.text):
                self._aside(token, "a function", "}", active=active)
            case _:
                return self._simple(active=active)
        return True

    def _aside(self, token: Token, what: str, end: str, *, active: bool) -> None:
        """Skip a construct with its contents, and note it."""
        self.position += 1
        opening, depth = {"done": "do", "}": "{"}[end], 0
        while (inner := self._token) is not None:
            self.position += 1
            if inner.text == opening:
                depth += 1
            elif inner.text == end:
                depth -= 1
                if not depth:
                    break
        if active:
            self._leave(token.line, what)

    def _leave(self, line: int, what: str) -> None:
        self.notes.append(Note(f"{what} is left aside", line))

    def _if(self, *, active: bool) -> None:
        """Read the branch whose test is true; if a test has no value, read none after it."""
        line, ends = self.tokens[self.position].line, frozenset({"elif", "else", "fi"})
        self.position += 1
        is_open, is_known, end = active, active, "if"
        while end and end != "fi":
            test: bool | None = True
            if end in ("if", "elif"):
                test = self._condition(active=bool(is_open))
            start = self.position
            takes = bool(is_open and test)
            end = self.block(ends, active=takes)
            if takes:
                is_open = False
            elif is_open and test is None:
                self._leave(line, "a branch whose test has no value here")
                is_open = is_known = False
            elif is_known:
                self._forget(start)

    def _case(self, *, active: bool) -> None:
        """Read the branch whose pattern matches the word; if the word has no value, read none."""
        token = self.tokens[self.position + 1]
        text, is_open, is_known = self.scope.text(token.text, token.line), active, active
        if active and missing_of(text):
            self._leave(token.line, "a case whose word has no value here")
            is_open = is_known = False
        self.position += 3  # case, its word, in
        while (token := self.tokens[min(self.position, len(self.tokens) - 1)]).text != "esac":
            if self.position >= len(self.tokens):
                return
            if token.text in ("\n", "("):
                self.position += 1
                continue
            patterns = [*takewhile(lambda token: token.text != ")", self.tokens[self.position :])]
            self.position += len(patterns) + 1
            names = (text_of(self.scope.text(pattern.text, pattern.line)) for pattern in patterns)
            fits = any(fnmatchcase(text_of(text), name) for name in names)
            start, takes = self.position, is_open and fits
            end = self.block(frozenset({";;", "esac"}), active=takes)
            is_open = is_open and not takes
            if is_known and not takes:
                self._forget(start)
            if end != ";;":
                return
        self.position += 1

    def _forget(self, start: int) -> None:
        """Mark the variables that a branch assigns as empty, because it is not taken."""
        for token in self.tokens[start : self.position]:
            if match := _ASSIGNED.match(token.text):
                self.scope.empty.add(match[1])

    def _condition(self, *, active: bool) -> bool | None:
        """Read the commands up to `then`, and return whether they succeed."""
        result: bool | None = True
        joint = "&&"
        while (token := self._token) is not None:
            if token.text == "then":
                self.position += 1
                break
            if token.kind == "operator":
                joint = token.text if token.text in ("&&", "||") else joint
                self.position += 1
                continue
            succeeds = self._simple(active=active, is_test=True)
            result = _join_results(joint, result, succeeds)
        return result

    def _simple(self, *, active: bool, is_test: bool = False) -> bool | None:
        """Read a command up to its end, and return whether it succeeds; None if unknown."""
        tokens = [*takewhile(_is_inside, self.tokens[self.position :])]
        self.position += len(tokens) or 1
        if not active or not tokens:
            return True
        if tokens[0].text in _TESTS or tokens[0].text.startswith("(("):
            return self._test_result(tokens)
        if tokens[0].text in ("true", "false", ":"):
            for token in tokens[1:]:  # : "${NAME:=usual}" sets a variable
                self.scope.words(token.text, token.line)
            return tokens[0].text != "false"
        if is_test:
            return None
        assigned = [*takewhile(_is_assignment, tokens)]
        rest = tokens[len(assigned) :]
        if rest and rest[0].text in _DECLARING:
            assigned = [token for token in rest if _is_assignment(token)]
            if rest[0].text == "export":
                self.exported |= {token.text.partition("=")[0] for token in rest[1:]}
            rest = []
        if not rest:
            for token in assigned:
                self._assign(token)
            return True
        self._command(assigned, rest)
        return True

    def _compute(self, token: Token) -> bool | None:
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
        name, adds, raw = _ASSIGNED.fullmatch(token.text).groups()  # type: ignore[union-attr]
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
        if not words or self._is_of_shell(words, here):
            return
        environment = {
            name: _as_word(self.scope.variables[name][0])
            for name in self.exported if self.scope.variables.get(name)
        }  # fmt: skip
        for token in assigned:
            name, _, raw = token.text.partition("=")
            environment[name] = _as_word(self.scope.text(raw, token.line) or plain("", token.line))
        line = rest[0].line
        self.commands.append(ShellCommand(words=tuple(words), line=line, environment=environment))

    def _is_of_shell(self, words: list[Word], here: list[Token]) -> bool:
        """Read a shell built-in, or a script in a command; return whether the command is such."""
        texts = [word.text for word in words]
        shell = next((place for place, text in enumerate(texts) if text in _SHELLS), len(texts))
        if "-c" in texts[shell:-1]:
            script = words[texts.index("-c", shell) + 1]
            self._inner(script.text, script.line)
            return True
        is_fed = texts[0] in _SHELLS or (
            shell < len(texts) and all(text[:1] == "-" for text in texts[shell + 1 :])
        )
        match texts:
            case _ if here and is_fed:  # such as srun bash << EOF
                self._inner(here[0].text, here[0].line)
            case ["shift", *by]:
                number = int(by[0]) if by and by[0].isdigit() else 1
                self.scope.positional = self.scope.positional[number:]
            case ["read", *_, name] if here:
                self.scope.variables[name] = (self.scope.text(here[0].text, here[0].line),)
            case ["unset", *names]:
                for name in names:
                    self.scope.variables.pop(name, None)
            case ["source" | ".", *_]:
                text = self.sources.text_of(words[1]) if words[1:] else None
                if text is None:
                    self._leave(words[0].line, SOURCED)
                else:
                    self._inner(text, self.sources.first_line(words[1]))
            case _:
                return False
        return True

    def _inner(self, text: str, line: int) -> None:
        """Read a script inside the script, with the same variables."""
        tokens, position = self.tokens, self.position
        self.tokens, self.position = [*tokens_of(text, line)], 0
        while self.position < len(self.tokens):
            self.block(frozenset(), active=True)
            self.position += 1
        self.tokens, self.position = tokens, position

    def _test_result(self, tokens: list[Token]) -> bool | None:
        """Return whether a test is true; None if it has no value here."""
        if tokens[0].text.startswith("(("):
            return self._compute(tokens[0])
        inside = [token for token in tokens if token.text not in ("[", "[[", "test", "]", "]]")]
        signs = [token.text for token in inside]
        for joint in ("||", "&&"):
            if joint in signs:
                place = signs.index(joint)
                return _join_results(
                    joint, self._test_result(inside[:place]), self._test_result(inside[place + 1 :])
                )
        is_not = bool(inside) and inside[0].text == "!"
        texts = [self.scope.text(token.text, token.line) for token in inside[is_not:]]
        result = self._comparison(texts)
        return result if result is None else result is not is_not

    def _comparison(self, texts: list[Text]) -> bool | None:
        words = [*map(text_of, texts)]
        is_known = not any(map(missing_of, texts))
        is_run = any(not _UNSET.fullmatch(missing_of(text)) for text in texts)
        match words:
            case ["-z" | "-n", value] if not is_run:
                return bool(value) is (words[0] == "-n")
            case [left, "=" | "==" | "!=", right] if is_known or (not is_run and "" in words):
                return fnmatchcase(left, right) is (words[1] != "!=")
            case _ if not is_known:
                return None
            case [value]:
                return bool(value)
            case [left, sign, right] if sign in _NUMBERS:
                number = self.scope.number(f"({left}) {_NUMBERS[sign]} ({right})")
                return None if number is None else bool(number)
            case _:
                return None


def _join_results(joint: str, *results: bool | None) -> bool | None:
    """Return the result of tests joined by && or ||; None if it is unknown."""
    decides = joint == "||"
    if decides in results:
        return decides
    return None if None in results else not decides


def _is_inside(token: Token) -> bool:
    return token.kind != "operator"


def _is_assignment(token: Token) -> bool:
    return token.kind == "array" or bool(_ASSIGNED.fullmatch(token.text))


def _as_word(text: Text) -> Word:
    runs = text or (Run("", 0),)
    return Word(text_of(runs), runs[0].line, missing_of(runs))
