"""An installation without torch plans, explains, exports and draws; the rest names the extra."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moetune.domain.errors import EXTRAS, MissingPackageError, needed_by

ROOT = Path(__file__).resolve().parents[2]
ABSENT = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
JOINT = (
    "plan", "--model", "olmoe", "--world-size", "16", "--profile", "h100-x8",
    "--global-batch", "128", "--seq", "4k", "--target", "megatron", "--output", "joint.json",
)  # fmt: skip
LAYER = ("plan", "--model", "bert-l", "--profile", "a100-x4", "--output", "layer.json")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `import torch` fails as it does where torch is not installed."""
    absent = folder / "absent" / "torch"
    absent.mkdir(parents=True, exist_ok=True)
    (absent / "__init__.py").write_text(ABSENT)
    environment = {**os.environ, "PYTHONPATH": f"{absent.parent}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", "moetune", "--db", str(folder / "store.db"), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_plans_are_made_explained_exported_and_drawn(tmp_path: Path) -> None:
    commands = (JOINT, ("explain", "joint.json"), ("export", "joint.json", "--to", "megatron"),
                ("report", "--plan", "joint.json", "--output", "report.html"),
                ("memory", "olmoe"), ("plans", "list"))  # fmt: skip
    for command in commands:
        done = run(tmp_path, *command)
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize("command", [("profile",), ("verify", "layer.json")])
def test_commands_that_run_layers_name_the_extra(command: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, *LAYER).returncode == 0
    done = run(tmp_path, *command)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: moetune {command[0]} needs torch, which is not installed\n"
        "  run `pip install 'moetune[train]'`\n"
    )


def test_doctor_says_what_it_cannot_read_and_ends_well(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["cluster"] is None
    assert "moetune[train]" in report["machine_problem"]["hint"]


def test_every_named_extra_brings_its_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package.replace("_", "-")) for line in extras[extra]), package
    assert not any(line.startswith(tuple(EXTRAS)) for line in project["dependencies"])


def test_a_package_of_no_extra_stays_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), needed_by("a plan"):
        import no_such_package  # type: ignore[import-not-found] # noqa: F401
    with pytest.raises(MissingPackageError, match="a plan needs torch"), needed_by("a plan"):
        raise ModuleNotFoundError(name="torch.nn")
