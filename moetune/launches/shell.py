"""Reader of a shell script's commands, with its variables expanded.

Loops are read turn by turn, and functions where they are called. Branches whose test has no value
here are left aside, each with a note.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

from moetune.launches.commands import ASSIGNED, CommandReader
from moetune.launches.conditions import join_results
from moetune.launches.expansion import Run, Scope, Text, Word, missing_of, plain, text_of
from moetune.launches.script import Note, ShellScript, SourcedFiles
from moetune.launches.slurm import batch_variables
from moetune.launches.tokens import Token, tokens_of

_FUNCTION = re.compile(r"[A-Za-z_][\w:-]*$")
_SEPARATORS = frozenset({"\n", ";", "&", ";;"})
_DONE = frozenset({"done"})
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)\}|[$`]\(?seq (\S+)(?: (\S+))?(?: (\S+))?[)`]")
"""Numbers that a loop goes over, as `{1..4}`, `$(seq 4)` or `$(seq 1 2 7)`."""
_COUNTING = re.compile(r"\(\(([^;]*);([^;]*);([^;]*)\)\)")
_MOST_TURNS = 200
"""Largest number of turns that are read of a script's loops."""


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
    given = {"PWD": ".", **(values or {})}
    reader = _ScriptReader(
        scope=Scope(positional=tuple(plain(word, 0) for word in extra)),
        sources=SourcedFiles(folder), given=given,
    )  # fmt: skip
    reader.set_variables({**batch_variables(text, given), **given})
    reader.read([*tokens_of(text)])
    more = () if reader.scope.is_passed_on else tuple(Word(word, 0) for word in extra)
    commands, notes = tuple(reader.commands), tuple(dict.fromkeys(reader.notes))
    return reader.sources.named(ShellScript(commands=commands, notes=notes, more=more))


@dataclass(slots=True, kw_only=True)
class _ScriptReader(CommandReader):
    """A position among a script's tokens, with what is read so far.

    Args:
        turns: turns of loops that are read so far.
    """

    tokens: list[Token] = field(default_factory=list)
    position: int = 0
    turns: int = 0

    def read(self, tokens: list[Token]) -> None:
        """Read statements."""
        before = self.tokens, self.position
        self.tokens, self.position = tokens, 0
        while self.position < len(self.tokens):
            self.block(frozenset(), active=True)
            self.position += 1
        self.tokens, self.position = before

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
            runs = active and not self.jump
            if joint and runs:
                runs = result is (joint == "&&")
                if result is None:
                    self.leave(token.line, "what follows a test that has no value here")
            start = self.position
            following = self._statement(active=runs)
            if active and not (runs or self.jump) and result is not None:
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
            case "for" | "select" if token.kind == "word":
                self._for(active=active)
            case "while" | "until" if token.kind == "word":
                self.position += 1
                turns = self._test_turns(token.text, active=active)
                self._loop(token.line, turns, active=active)
            case "case" if token.kind == "word":
                self._case(active=active)
            case "(" | "{":
                self.position += 1
                self.block(frozenset({"}" if token.text == "{" else ")"}), active=active)
            case _ if token.text == "function" or (
                following == "(" and _FUNCTION.match(token.text)
            ):
                self._function(active=active)
            case _:
                return self._simple(active=active)
        return True

    def _function(self, *, active: bool) -> None:
        """Skip a function, and keep its body."""
        self.position += self.tokens[self.position].text == "function"
        name = self.tokens[self.position].text
        self.position += 1
        while (token := self._token) is not None and token.text in ("(", ")", "\n"):
            self.position += 1
        start = self.position
        if token is not None:
            self._statement(active=False)
        if active:
            self.functions[name] = self.tokens[start : self.position]

    def _for(self, *, active: bool) -> None:
        """Read a loop over words, or over numbers, such as `for ((i = 0; i < 3; i++))`."""
        head = [*takewhile(lambda token: token.text != "do", self.tokens[self.position :])]
        self.position += len(head) + 1
        line, name = head[0].line, head[min(1, len(head) - 1)]
        if parts := _COUNTING.fullmatch(name.text):
            turns = self._count_turns(
                *(name._replace(text=f"(({part}))") for part in parts.groups())
            )
        else:
            words = [token for token in head[3:] if token.kind == "word"]
            turns = self._word_turns(name.text, self._texts(words) if head[3:] else [])
        self._loop(line, turns, active=active)

    def _texts(self, words: list[Token]) -> Iterator[Text]:
        """Yield what a loop goes over."""
        for token in words:
            if (match := _RANGE.fullmatch(token.text)) and (numbers := self._numbers(match)):
                yield from (plain(str(number), token.line) for number in numbers)
                continue
            for word in self.scope.words(token.text, token.line):
                yield (Run(word.text, word.line, word.missing),)

    def _numbers(self, match: re.Match[str]) -> range:
        """Return the numbers of a range or of seq; none if a bound has no value."""
        bounds = [self.scope.number(bound) for bound in match.groups() if bound is not None]
        first, *rest = (1, *bounds) if len(bounds) == 1 else bounds
        step, last = rest if len(rest) > 1 else (1, *rest)
        if first is None or step is None or last is None or not step:
            return range(0)
        return range(first, last + (1 if step > 0 else -1), step)

    def _word_turns(self, name: str, texts: Iterable[Text]) -> Iterator[str]:
        """Set a variable to each text in turn, and yield what it is set to."""
        body = self.position
        for text in texts:
            self.position, self.scope.variables[name] = body, (text,)
            if missing := missing_of(text):
                line = self.tokens[body - 1].line
                self.notes.append(Note(f"a loop over {missing} is read once", line))
            yield f"{name}={text_of(text)}"
        self.position = body

    def _count_turns(self, start: Token, test: Token, step: Token) -> Iterator[str]:
        """Count a variable as the arithmetic of a loop does, and yield how it begins."""
        body = self.position
        self.compute(start)
        while self.compute(test):
            self.position = body
            yield start.text[2:-2].strip()
            self.compute(step)
        self.position = body

    def _test_turns(self, word: str, *, active: bool) -> Iterator[str]:
        """Test whether a loop goes on, and yield "" if it does, up to a turn that sets nothing."""
        start = self.position
        before: object = None
        while before != (state := (dict(self.scope.variables), self.scope.positional)):
            self.position, before = start, state
            result = self._condition("do", active=active)
            if active and result is (word == "until"):
                return
            if result is None:
                line = self.tokens[start].line
                self.notes.append(Note("a loop whose test has no value here is read once", line))
            yield ""
            if result is None:
                break
        self.position = start
        self._condition("do", active=False)

    def _loop(self, line: int, turns: Iterator[str], *, active: bool) -> None:
        """Read a loop turn by turn, and note at its commands in which turn they are."""
        starts: list[tuple[int, str]] = []
        for said in turns:
            body = self.position
            if not active:
                break
            starts.append((len(self.commands), said))
            self.block(_DONE, active=True)
            self.turns += 1
            is_over, self.jump = self.jump == "break", ""
            if is_over or self.turns > _MOST_TURNS:
                break
        else:
            body = self.position
        self.position = body
        self.block(_DONE, active=False)
        if self.turns > _MOST_TURNS:
            self.leave(line, f"a loop's turn after {_MOST_TURNS}")
        self._mark(line, starts)

    def _mark(self, line: int, starts: list[tuple[int, str]]) -> None:
        """Note at the commands of a loop with several turns in which turn they are."""
        if len(starts) == 1:
            return
        for number, (start, said) in enumerate(starts, 1):
            end = starts[number][0] if number < len(starts) else len(self.commands)
            what = f"turn {number} of {len(starts)} of a loop is checked"
            note = Note(f"{what}, with {said}" if said else what, line)
            for place in range(start, end):
                command = self.commands[place]
                self.commands[place] = replace(command, notes=(*command.notes, note))

    def _if(self, *, active: bool) -> None:
        """Read the branch whose test is true; if a test has no value, read none after it."""
        line, ends = self.tokens[self.position].line, frozenset({"elif", "else", "fi"})
        self.position += 1
        is_open, is_known, end = active, active, "if"
        while end and end != "fi":
            test: bool | None = True
            if end in ("if", "elif"):
                test = self._condition("then", active=bool(is_open))
            start = self.position
            takes = bool(is_open and test)
            end = self.block(ends, active=takes)
            if takes:
                is_open = False
            elif is_open and test is None:
                self.leave(line, "a branch whose test has no value here")
                is_open = is_known = False
            elif is_known:
                self._forget(start)

    def _case(self, *, active: bool) -> None:
        """Read the branch whose pattern matches the word; if the word has no value, read none."""
        token = self.tokens[self.position + 1]
        text, is_open, is_known = self.scope.text(token.text, token.line), active, active
        if active and missing_of(text):
            self.leave(token.line, "a case whose word has no value here")
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
            if match := ASSIGNED.match(token.text):
                self.scope.empty.add(match[1])

    def _condition(self, end: str, *, active: bool) -> bool | None:
        """Read the commands up to `then` or `do`, and return whether they succeed."""
        result: bool | None = True
        joint = "&&"
        while (token := self._token) is not None:
            if token.text == end:
                self.position += 1
                break
            if token.kind == "operator":
                joint = token.text if token.text in ("&&", "||") else joint
                self.position += 1
                continue
            succeeds = self._simple(active=active, is_test=True)
            result = join_results(joint, result, succeeds)
        return result

    def _simple(self, *, active: bool, is_test: bool = False) -> bool | None:
        """Read a command up to its end, and return whether it succeeds; None if unknown."""
        start = self.position
        while (token := self._token) is not None and token.kind != "operator":
            self.position += 1
        tokens = self.tokens[start : self.position]
        self.position += not tokens
        return self.run(tokens, is_test=is_test) if active and tokens else True
