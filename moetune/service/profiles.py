"""Routes of measurements: profiles, their fits, and machines."""

from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from moetune.app.files import bundled_profiles, profile_to_toml
from moetune.app.profile_toml import parse_toml, profile_in_toml
from moetune.app.profiles import ProfileInfo, is_path, list_profiles, named_profile
from moetune.domain.errors import InputError, NotFoundError, ProfileError
from moetune.domain.profile import Profile, profile_from_document
from moetune.service import describe
from moetune.service.bodies import (
    JSON,
    TOML,
    check_values,
    document,
    page,
    parse_json,
    read_body,
)
from moetune.service.describe import Limit, NameCursor, RowCursor
from moetune.service.problems import UnreadableBodyError
from moetune.service.workers import WorkerPools

if TYPE_CHECKING:
    from moetune.store import SqlStore

_MAX_NAME_CHARACTERS = 200


def add_profiles(app: FastAPI, pools: WorkerPools) -> None:
    """Add the routes of machines, fits and profiles."""
    _add_lists(app, pools)
    _add_profile(app, pools)
    _add_upload(app, pools)


def check_name(name: str) -> str:
    """Return the profile's name.

    Raises:
        InputError: it is empty, too long, not printable, or a path to a file of this machine.
    """
    if is_path(name) or not name.isprintable() or not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        raise InputError(
            f"{name[:_MAX_NAME_CHARACTERS]!r} is not a profile's name",
            "a name has 1 to 200 printable characters, no slash and no .toml at its end",
        )
    return name


def _add_lists(app: FastAPI, pools: WorkerPools) -> None:
    reading = pools.planner.reading

    @app.get("/v1/machines", summary="Machines", response_model=describe.PageDocument)
    async def machines(after: RowCursor = 0, limit: Limit = 50) -> Response:
        """List the machines that were measured, newest first."""
        rows = await pools.read(reading.machines, after=after, limit=limit + 1)
        return page("moetune.machines/1", rows, limit=limit, cursor=lambda row: row.id)

    @app.get("/v1/fits", summary="Fits", response_model=describe.PageDocument)
    async def fits(after: RowCursor = 0, limit: Limit = 50) -> Response:
        """List the fits of all profiles, newest first."""
        rows = await pools.read(reading.fits, after=after, limit=limit + 1)
        return page("moetune.fits/1", rows, limit=limit, cursor=lambda row: row.id)

    @app.get("/v1/profiles", summary="Profiles", response_model=describe.PageDocument)
    async def profiles(after: NameCursor = "", limit: Limit = 50) -> Response:
        """List the profiles of the store, newest first, and the reference machines."""
        found = await pools.read(list_profiles, reading)
        places = [_place(row) for row in found]
        if after and after not in places:
            raise InputError(f"after={after!r} is not a cursor", "start again without after")
        rows = found[places.index(after) + 1 :] if after else found
        return page("moetune.profiles.page/1", rows, limit=limit, cursor=_place)


def _add_profile(app: FastAPI, pools: WorkerPools) -> None:
    @app.get(
        "/v1/profiles/{name}",
        summary="A profile",
        response_model=Profile,
    )
    async def profile(request: Request, name: str) -> Response:
        """Return a profile as JSON, or as the TOML of `moetune profiles export` by `Accept`."""
        try:
            found = await pools.read(named_profile, check_name(name), store=pools.planner.reading)
        except ProfileError as error:
            raise NotFoundError(error.what, "GET /v1/profiles lists them") from None
        if TOML in request.headers.get("accept", ""):
            text = await pools.read(profile_to_toml, found.profile)
            return Response(text, media_type=TOML)
        return document(found.profile)


def _add_upload(app: FastAPI, pools: WorkerPools) -> None:
    @app.post(
        "/v1/profiles",
        summary="Store a profile",
        status_code=HTTPStatus.CREATED,
        openapi_extra=describe.profile_body(),
    )
    async def upload(request: Request) -> Response:
        """Store a profile in TOML or JSON; the newest of a name is the current one.

        A profile equal to the current one of its name is not stored again.
        """
        kind, content = await read_body(request, kinds=(TOML, JSON))
        profile = await pools.read(profile_in, kind, content)
        await pools.may_add(request, "profiles")
        is_new = await pools.write(store_profile, pools.planner.store, profile)
        found = {
            "schema": "moetune.profiles.import/1", "name": profile.name, "digest": profile.digest,
        }  # fmt: skip
        return document(
            found,
            status=HTTPStatus.CREATED if is_new else HTTPStatus.OK,
            headers={"Location": f"/v1/profiles/{quote(profile.name)}"},
        )


def _place(row: ProfileInfo) -> str:
    """Return the row's cursor, with the source: a stored profile may have a bundled one's name."""
    return f"{row.source}/{row.name}"


def profile_in(kind: str, content: bytes) -> Profile:
    """Return the profile in a body.

    Raises:
        InputError: it is not a profile; the message names the key, or the line of the TOML.
    """
    if kind == JSON:
        profile = profile_from_document(parse_json(content))
    else:
        try:
            plain = parse_toml(content.decode(), "the body")
        except UnicodeDecodeError:
            raise UnreadableBodyError("the body is not UTF-8 text") from None
        check_values(plain)
        profile = profile_in_toml(plain, references=bundled_profiles())
    check_name(profile.name)
    return profile


def store_profile(store: "SqlStore", profile: Profile) -> bool:
    """Store a profile unless the current one of its name is equal; return whether it is new."""
    current = store.profile(profile.name)
    if current is not None and current.digest == profile.digest:
        return False
    store.save_profile(profile)
    return True
