"""The layers of the package, proved on its imports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_imports_go_one_way() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        (program, "--no-cache"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
