"""`moetune profiles`: describe, list, show, export, import, compare and remove profiles."""

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.app import wiring
from moetune.cli.completers import profile_names, stored_profiles
from moetune.cli.profiles_new import new
from moetune.cli.session import All, Json, Session, example, session_of
from moetune.domain.document import encode
from moetune.report.section import plural

if TYPE_CHECKING:
    from moetune.app.profiles import FoundProfile

app = typer.Typer(help="Profiles: measured speeds of machines.", rich_markup_mode=None)

app.command(
    "new",
    epilog=example(
        "moetune profiles new ours.toml --gpu h100 --gpus-per-node 8 --nodes 4 \\\n"
        "      --nics 8 --nic-rate 400Gbit/s"
    ),
)(new)

Name = Annotated[
    str,
    typer.Argument(
        metavar="FILE|NAME",
        autocompletion=profile_names,
        help="A .toml file, or the name of a profile.",
    ),
]


@app.command("list", epilog=example("moetune profiles list"))
def list_(context: typer.Context, *, json: Json = False) -> None:
    """List the profiles of the store and the reference machines."""
    from moetune.app.profiles import list_profiles
    from moetune.app.views.profile import profiles_section

    session = session_of(context)
    with session.find_store() as store:
        found = list_profiles(store)
    document = {"schema": "moetune.profiles/1", "profiles": found}
    session.screen.answer((profiles_section(found),), document, as_json=json)


@app.command("show", epilog=example("moetune profiles show rtx2080ti-x64"))
def show(context: typer.Context, name: Name, *, all_: All = False, json: Json = False) -> None:
    """Show a profile: its machine, its fitted lines and their errors."""
    from moetune.app.views.profile import profile_sections

    session = session_of(context, all_rows=all_)
    found = _find(session, name)
    if json:
        session.screen.document(found.profile)
    else:
        session.screen.answer(profile_sections(found))


@app.command("check", epilog=example("moetune profiles check lab"))
def check(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(autocompletion=stored_profiles, help="A profile in the store.")
    ],
    *,
    json: Json = False,
) -> None:
    """Measure a few points again, for ten seconds, and say whether the profile still holds.

    Use it after an update of torch or a driver. Under torchrun every rank runs this command.
    """
    from moetune import config
    from moetune.app.profile_request import MeasurementSetting
    from moetune.app.staleness import check_profile

    session = session_of(context)
    environ = config.environment()
    setting = MeasurementSetting(environment=environ, launch=config.launch(environ))
    profile = _find(session, name).profile
    if not setting.is_writer:
        check_profile(profile, setting, store=None)
        return
    with wiring.open_store(session.settings) as store:
        found = check_profile(profile, setting, store=store)
    assert found is not None  # noqa: S101 - this is rank 0
    if json:
        document = {"schema": "moetune.profile-check/1", "name": profile.name, **encode(found)}
        session.screen.document(document)
    else:
        session.screen.say(found.words(profile))
    if found.verdict == "measure":
        raise typer.Exit(1)


@app.command("export", epilog=example("moetune profiles export lab --output lab.toml"))
def export(
    context: typer.Context,
    name: Name,
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write this file instead of stdout.")
    ] = None,
    json: Json = False,
) -> None:
    """Print a profile as the TOML that `import` and `plan --profile` read, or write a file."""
    from moetune.app.files import profile_to_toml, write_text

    session = session_of(context)
    profile = _find(session, name).profile
    if output is not None:
        write_text(output, profile_to_toml(profile))
    if json and output is None:
        session.screen.document(profile)
    elif json:
        document = {"schema": "moetune.profiles.export/1", "name": profile.name}
        session.screen.document({**document, "file": str(output)})
    elif output is None:
        typer.echo(profile_to_toml(profile), nl=False)
    else:
        session.screen.note(f"profile {profile.name} is written to {output}")


@app.command("import", epilog=example("moetune profiles import lab.toml --name lab"))
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A profile's TOML file.")],
    *,
    name: Annotated[
        str | None, typer.Option(help="Store it under this name instead of its own.")
    ] = None,
    json: Json = False,
) -> None:
    """Store a file's profile; the newest of a name is the current one."""
    from moetune.app.profiles import import_profile

    session = session_of(context)
    with wiring.open_store(session.settings) as store:
        profile = import_profile(file, name=name, store=store)
        location = store.location
    document = {"schema": "moetune.profiles.import/1", "name": profile.name, "file": str(file)}
    words = f"profile {profile.name} is stored in {location}"
    session.screen.said({**document, "location": location}, words, as_json=json)
    if not json:
        quoted = shlex.quote(profile.name)
        session.screen.note(f"Plan with it:  moetune plan --model gpt-s --profile {quoted}")


@app.command("diff", epilog=example("moetune profiles diff rtx2080ti-x32 rtx2080ti-x64"))
def diff(
    context: typer.Context, first: Name, second: Name, *, all_: All = False, json: Json = False
) -> None:
    """Show every number and fact in which two profiles differ."""
    from moetune.app.profiles import compare_profiles
    from moetune.app.views.comparison import machine_sections

    session = session_of(context, all_rows=all_)
    left, right = (_find(session, name).profile for name in (first, second))
    found = [{**encode(one), "ratio": one.ratio} for one in compare_profiles(left, right)]
    document = {"schema": "moetune.profiles.diff/1", "first": first, "second": second}
    session.screen.answer(
        machine_sections(left, right, names=(first, second)),
        {**document, "differences": found},
        as_json=json,
    )


@app.command("remove", epilog=example("moetune profiles remove lab"))
def remove(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(autocompletion=stored_profiles, help="Name of a profile in the store."),
    ],
    *,
    json: Json = False,
) -> None:
    """Delete all measurements and fits of a name from the store, but no plans made with it."""
    from moetune.app.profiles import remove_profile

    session = session_of(context)
    with session.find_store() as existing:  # a command that removes must not make a database
        exists = existing is not None
    with wiring.open_store(session.settings) if exists else nullcontext() as store:
        count = remove_profile(name, store=store)
    document = {"schema": "moetune.profiles.remove/1", "name": name, "num_runs": count}
    words = f"profile {name} and its {plural(count, 'run')} are removed"
    session.screen.said(document, words, as_json=json)


def _find(session: Session, name: str) -> "FoundProfile":
    from moetune.app.profiles import find_profile

    return find_profile(name, stores=session.find_store)
