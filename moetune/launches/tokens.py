"""A shell script as tokens: words with their quotes, arrays and operators, each with its line."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

TokenKind = Literal["word", "array", "here", "operator"]
_OPERATOR = re.compile(r";;|&&|\|\||[;|&()]")
_REDIRECT = re.compile(r"&>>?|<<<|[0-9]*(?:>>|>&|<&|>|<)")
_HERE = re.compile(r"[0-9]*<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_CLOSED = {"(": ")", "{": "}"}


class Token(NamedTuple):
    """A token.

    Args:
        text: as written; for an array its name with `=` or `+=`, for a here-document its body.
        inside: the elements of an array, as they are written.
    """

    kind: TokenKind
    text: str
    line: int
    inside: str = ""


def tokens_of(text: str, line: int = 1) -> Iterator[Token]:
    """Yield the tokens of a script; the end of a line is an operator with that character."""
    return _Lexer(text, line).tokens()


class _Lexer:
    """A position in a script, with its line."""

    def __init__(self, text: str, line: int) -> None:
        self._text, self._position, self._line = text, 0, line
        self._here: list[str] = []  # ends of here-documents that begin after this line
        self._in_test = False

    def tokens(self) -> Iterator[Token]:
        drops = False  # the word after a redirection
        while self._position < len(self._text):
            if self._skip():
                continue
            if not self._in_test and (match := _HERE.match(self._text, self._position)):
                self._here.append(match[2])
                self._position = match.end()
            elif not self._in_test and (bracket := self._bracket()):
                yield from () if drops else (bracket,)
                drops = False
            elif not self._in_test and (match := _REDIRECT.match(self._text, self._position)):
                self._position, drops = match.end(), True
            elif self._text[self._position] == "\n":
                line = self._line
                yield from self._end_line()
                yield Token("operator", "\n", line)
            elif match := self._operator():
                self._position = match.end()
                yield Token("operator", match[0], self._line)
            else:
                token = self._word()
                self._in_test = token.text == "[[" or (self._in_test and token.text != "]]")
                if not drops:
                    yield token
                drops = False

    def _bracket(self) -> Token | None:
        """Return arithmetic in double brackets, or a process substitution; None for neither."""
        start, line = self._position, self._line
        is_computed = self._text.startswith("((", start)
        if not is_computed and not self._text.startswith(("<(", ">("), start):
            return None
        self._position += 1
        self._skip_to(")")
        if is_computed and not self._text.startswith(")", self._position):  # nested subshells
            self._position, self._line = start, line
            return None
        self._position += is_computed
        return Token("word", self._text[start : self._position], line)

    def _operator(self) -> re.Match[str] | None:
        return None if self._in_test else _OPERATOR.match(self._text, self._position)

    def _skip(self) -> bool:
        """Skip white space, a continued line or a comment, and return whether there was any."""
        rest = self._text[self._position : self._position + 2]
        if rest == "\\\n":
            self._position, self._line = self._position + 2, self._line + 1
        elif rest == "\\\r" or rest[0] in " \t\r":
            self._position += 1
        elif rest[0] == "#":
            end = self._text.find("\n", self._position)
            self._position = len(self._text) if end < 0 else end
        else:
            return False
        return True

    def _end_line(self) -> Iterator[Token]:
        """Go to the next line, and yield the here-documents before it."""
        self._position, self._line = self._position + 1, self._line + 1
        for end in self._here:
            start, first = self._position, self._line
            while self._position < len(self._text):
                line, _, _ = self._text[self._position :].partition("\n")
                self._position, self._line = self._position + len(line) + 1, self._line + 1
                if line.strip() == end:
                    break
            yield Token(
                "here", self._text[start : self._position].rstrip().removesuffix(end), first
            )
        self._here = []

    def _word(self) -> Token:
        start, line = self._position, self._line
        while self._position < len(self._text):
            char = self._text[self._position]
            if char in " \t\r\n" or self._operator():
                break
            if not self._in_test and char in "<>":
                break
            self._step()
            word = self._text[start : self._position]
            if self._in_test and word == "]]":
                break
            if _ARRAY.fullmatch(word) and self._text[self._position : self._position + 1] == "(":
                inside = self._position + 1
                self._skip_to(")")
                return Token("array", word, line, self._text[inside : self._position - 1])
        return Token("word", self._text[start : self._position], line)

    def _step(self) -> None:
        """Go past a character, or past the quoted or bracketed text that it begins."""
        char, following = (
            self._text[self._position],
            self._text[self._position + 1 : self._position + 2],
        )
        if char == "\\":
            self._line += following == "\n"
            self._position += 2
        elif char in "'\"`":
            self._skip_to(char)
        elif char == "$" and following in _CLOSED:
            self._position += 1
            self._skip_to(_CLOSED[following])
        else:
            self._line += char == "\n"
            self._position += 1

    def _skip_to(self, end: str) -> None:
        """Go past the end of the text that begins here; single quotes hide other characters."""
        is_plain = end == "'"
        opening = self._text[self._position]
        self._position += 1
        while self._position < len(self._text) and self._text[self._position] != end:
            char = self._text[self._position]
            if end == ")" and char == "#" and self._text[self._position - 1].isspace():
                self._skip()
            elif is_plain or char not in "\\'\"`$(":
                self._line += char == "\n"
                self._position += 1
            elif char == "'" and opening == '"':
                self._position += 1
            elif char == "(":
                if end == ")":
                    self._skip_to(")")
                else:
                    self._position += 1
            else:
                self._step()
        self._position += 1
