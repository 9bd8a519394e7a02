"""`moetune profiles`: describe, list, show, export, import and remove profiles."""

import inspect
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from moetune.app.describe import Description, check_new, describe
from moetune.cli.commands import ALL, Between, argument, command, group, option
from moetune.cli.completion import gpu_names, profile_names, stored_profiles
from moetune.cli.session import Session
from moetune.domain.model import find_model
from moetune.report.section import plural

_COUNT = Between(1, 100_000)


def _profile(name: str) -> inspect.Parameter:
    words = "A .toml file, or the name of a profile."
    return argument(name, words, form="FILE|NAME", names=profile_names)


@command(
    "moetune profiles new ours.toml --gpu h100 --gpus-per-node 8 --nodes 4 \\\n"
    "      --nics 8 --nic-rate 400Gbit/s",
    argument("file", "The file to write.", Path, form="FILE.toml"),
    option("--gpu", "GPU of a reference machine, such as h100.", names=gpu_names, required=True),
    option("--gpus-per-node", "GPUs that NVLink or PCIe joins.", _COUNT, required=True),
    option("--nodes", "Nodes.", _COUNT, required=True),
    option("--nics", "Network cards of a node.", _COUNT),
    option("--nic-rate", "Of one card, one way: 400Gbit/s.", form="RATE", default=""),
    option("--memory", "Of one GPU, for a process: 80GB.", form="SIZE", default=""),
    option(
        "--link-rate",
        "Of one GPU to the others of its node, one way: 450GB/s.",
        form="RATE",
        default="",
    ),
    option("--name", "Of the profile. Default: the file's."),
    option("--force", "Replace a file.", bool),
)
def new(
    session: Session,
    file: Path,
    name: str | None,
    *,
    force: bool,
    **asked: Any,  # noqa: ANN401 - of `Description`
) -> None:
    """Describe a machine: write a commented profile file from its GPUs, nodes and network cards.

    A reference machine stands in for what is not described, and the file names what.
    """
    from moetune.app.files import write_text

    check_new(file, force=force)
    described = describe(Description(name=name or file.stem, **asked))
    write_text(file, described.text)
    profile, stand_ins = described.profile, described.stand_ins
    document = {"schema": "moetune.profiles.new/1", "name": profile.name, "file": str(file)}
    session.screen.result(
        {**document, "base": described.base, "stand_ins": stand_ins},
        f"{file} is written: profile {profile.name}, not measured",
        f"{described.base} stands in for:",
        *(f"  {part}" for part in stand_ins),
    )
    _hint_at_plan(session, _model_for(profile.machine.num_devices), str(file))


@command("moetune profiles list")
def list_(session: Session) -> None:
    """List the profiles of the store and the reference machines."""
    from moetune.app.profiles import list_profiles
    from moetune.app.views.profile import profiles_section

    with session.find_store() as store:
        profiles = list_profiles(store)
    document = {"schema": "moetune.profiles/1", "profiles": profiles}
    session.screen.answer((profiles_section(profiles),), document)


@command("moetune profiles show rtx2080ti-x64", _profile("name"), ALL)
def show(session: Session, name: str) -> None:
    """Show a profile: its machine, its fitted lines and their errors."""
    from moetune.app.views.profile import profile_sections

    profile = session.profile(name)
    session.screen.show(profile.profile, lambda: profile_sections(profile))


@command(
    "moetune profiles export lab --output lab.toml",
    _profile("name"),
    option("--output", "Write this file instead of stdout.", Path),
)
def export(session: Session, name: str, output: Path | None) -> None:
    """Print a profile as the TOML that `import` and `plan --profile` read, or write a file."""
    from moetune.app.files import profile_to_toml, write_text

    profile, screen = session.profile(name).profile, session.screen
    if output is not None:
        write_text(output, profile_to_toml(profile))
        document = {"schema": "moetune.profiles.export/1", "name": profile.name}
        screen.result({**document, "file": str(output)})
        screen.hint(f"profile {profile.name} is written to {output}")
    elif session.as_json:
        screen.document(profile)
    else:
        screen.raw(profile_to_toml(profile))


@command(
    "moetune profiles import lab.toml --name lab",
    argument("file", "A profile's TOML file.", Path),
    option("--name", "Store it under this name."),
)
def import_(session: Session, file: Path, name: str | None) -> None:
    """Store a file's profile; the newest of a name is current."""
    from moetune.app.profiles import import_profile

    with session.open_store() as store:
        profile = import_profile(file, name=name, store=store)
        location = store.location
    document = {"schema": "moetune.profiles.import/1", "name": profile.name, "file": str(file)}
    words = f"profile {profile.name} is stored in {location}"
    session.screen.result({**document, "location": location}, words)
    _hint_at_plan(session, "gpt-s", profile.name)


@command(
    "moetune profiles remove lab",
    argument("name", "Name of a profile in the store.", names=stored_profiles),
)
def remove(session: Session, name: str) -> None:
    """Delete all measurements and fits of a name from the store, but no plans made with it."""
    from moetune.app.profiles import remove_profile

    with session.find_store() as existing:  # a command that removes must not make a database
        is_made = existing is not None
    with session.open_store() if is_made else nullcontext() as store:
        count = remove_profile(name, store=store)
    document = {"schema": "moetune.profiles.remove/1", "name": name, "num_runs": count}
    words = f"profile {name} and its {plural(count, 'run')} are removed"
    session.screen.result(document, words)


profiles = group(
    "Profiles: measured speeds of machines.",
    new, list_, show, export, import_, remove,
)  # fmt: skip


def _hint_at_plan(session: Session, model: str, profile: str) -> None:
    command = shlex.join(["moetune", "plan", "--model", model, "--profile", profile])
    session.screen.hint(f"Plan with it:  {command}")


def _model_for(num_devices: int) -> str:
    """Return the name of a model whose number of experts the ranks divide."""
    experts = find_model("gpt-s").layer(num_devices).num_experts
    return "gpt-s" if experts % num_devices == 0 else "tm-1"
