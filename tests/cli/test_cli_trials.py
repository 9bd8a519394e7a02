"""Progress of a search over layouts: Ctrl-C ends the search, and a second one the program."""

import signal

import pytest

from moetune.cli.render import Screen
from moetune.cli.trials import TrialsProgress


def test_the_first_interrupt_ends_the_search_and_the_second_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with TrialsProgress(Screen(), 200) as progress:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # nothing is tried yet
        assert progress.goes_on(0)
        assert progress.goes_on(1)
        signal.raise_signal(signal.SIGINT)
        assert not progress.goes_on(2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "the best after 2 of 200 layouts" in capsys.readouterr().err
