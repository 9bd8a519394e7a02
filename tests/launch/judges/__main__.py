"""Read questions from standard input, one JSON object a line, and write what each judge says."""

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    judge = importlib.import_module(f"tests.launch.judges.{sys.argv[1]}")
    judge.prepare()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # runtimes and their ranks print
    for line in sys.stdin:
        try:
            found = judge.judge(json.loads(line))
        except Exception:  # noqa: BLE001 - a fault of the judge is an answer, too
            found = "the judge failed: " + traceback.format_exc()[-1500:]
        answers.write(json.dumps({"refused": found}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
