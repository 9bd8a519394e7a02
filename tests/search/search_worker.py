"""A search that another process kills: `python search_worker.py FILE`."""

import sys
from pathlib import Path

from moetune.app.tuning import TuningStudy
from tests.search.test_study import NAME, SPACE, seconds


def main() -> None:
    study = TuningStudy(file=Path(sys.argv[1]), name=NAME, space=SPACE)
    while (decision := study.ask()) is not None:
        goes_on = True
        while goes_on:
            goes_on = study.report(seconds(decision))
            sys.stdout.write("step\n")
            sys.stdout.flush()
            sys.stdin.readline()


if __name__ == "__main__":
    main()
