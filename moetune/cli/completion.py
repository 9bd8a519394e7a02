"""Shell completion: its script, and names of models, profiles and plans.

When something is wrong there are no names and no message: the user has not run a command.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import typer

from moetune.cli.commands import argument, command
from moetune.domain.errors import MoetuneError

if TYPE_CHECKING:
    from moetune.cli.session import Session
    from moetune.store import SqlStore

VARIABLE = "_MOETUNE_COMPLETE"
"""Environment variable that a shell sets to ask for completions."""
_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Environment variables with the line so far: bash's, and that of zsh and fish."""
ID_LETTERS = 8
"""Letters of a plan's id: as unique as a store needs, and still readable."""


@command(
    "moetune completion bash",
    argument("shell", "The shell that you type in.", ("bash", "zsh", "fish")),
)
def completion(session: "Session", shell: str) -> None:
    """Print the script that completes commands and names.

    bash: add `source <(moetune completion bash)` to ~/.bashrc. zsh: add the same with zsh to
    ~/.zshrc, behind compinit. fish: write it to ~/.config/fish/completions/moetune.fish.
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="moetune", complete_var=VARIABLE, shell=shell)
    if session.as_json:
        document = {"schema": "moetune.completion/1", "shell": shell, "script": script}
        session.screen.document(document)
    else:
        session.screen.raw(f"{script}\n")


def prepare_answer(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Set up typer's completion, and return the words of the line to complete."""
    from typer._completion_classes import completion_init

    completion_init()
    line = next((environ[name] for name in _LINES if name in environ), "")
    try:
        return tuple(shlex.split(line))
    except ValueError:  # a quote is still open
        return tuple(line.split())


def model_names(_context: typer.Context, _letters: str) -> Iterable[str]:
    """Return the names of models, of the papers and of Hugging Face."""
    from moetune.domain.model import MODELS, WHOLE_MODELS
    from moetune.huggingface.registry import model_names as registered

    return *MODELS, *WHOLE_MODELS, *registered()


def profile_names(context: typer.Context, letters: str) -> Iterable[str]:
    """Return the names of the store's profiles and of the reference machines."""
    from moetune.app.files import bundled_profiles

    return *stored_profiles(context, letters), *bundled_profiles()


def gpu_names(_context: typer.Context, _letters: str) -> Iterable[str]:
    """Return the names of the reference machines' GPUs."""
    from moetune.app.describe import gpus

    return gpus()


def stored_profiles(context: typer.Context, _letters: str) -> Iterable[str]:
    """Return the names of the store's profiles, newest first."""
    return _stored(context, lambda store: [run.name for run in store.runs()])


def plan_ids(context: typer.Context, letters: str) -> Iterable[str]:
    """Return short ids of the stored plans, newest first; whole ids if more letters are typed."""
    length = None if len(letters) > ID_LETTERS else ID_LETTERS
    return _stored(context, lambda store: [plan.id[:length] for plan in store.plans()])


def _stored(context: typer.Context, names: Callable[["SqlStore"], list[str]]) -> list[str]:
    """Return names from the store; [] if there is no store or it cannot be read."""
    from moetune.app import wiring

    before = context.find_root().params
    try:
        settings = wiring.configure(
            db=before.get("db"), file=before.get("config"), no_files=bool(before.get("no_config"))
        ).settings
        with wiring.find_store(settings, upgrades=False) as store:
            return names(store) if store else []
    except MoetuneError:
        return []
