"""Names of a request's keys, as each caller writes them."""

from types import MappingProxyType

import pytest

from moetune.domain.spelling import Spelling

FORM = Spelling(
    key="{}", constraint="{}",
    names=MappingProxyType({"tp": "Tensor parallel", "memory_limit_bytes": "Memory of a GPU"}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "respelled"),
    [
        ("use --tp 1 or --zero 1", "use Tensor parallel 1 or --zero 1"),
        ("nearest: --tp 8 --pp 1", "nearest: Tensor parallel 8, --pp 1"),
        ("a larger --memory-limit", "a larger Memory of a GPU"),
        ("measure it:  moetune profile --tp 2\nor --tp 1",
         "measure it:  moetune profile --tp 2\nor Tensor parallel 1"),
        ("run `moetune plan --tp 1`, or --tp 2", "run `moetune plan --tp 1`, or Tensor parallel 2"),
        ("measure it:  torchrun --nnodes 2 -m moetune profile --tp 1",
         "measure it:  torchrun --nnodes 2 -m moetune profile --tp 1"),
    ],
)  # fmt: skip
def test_flags_in_a_solvers_words_get_the_callers_names(words: str, respelled: str) -> None:
    assert FORM.respell(words) == respelled
