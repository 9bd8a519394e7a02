"""Routes of measurements: profiles, their fits, machines, and observed steps."""

from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError, NotFoundError, ProfileError
from moetune.domain.ports import Store
from moetune.domain.profile import Profile, profile_from_document
from moetune.domain.records import MAX_OBSERVATIONS, OBSERVATIONS_SCHEMA, Observation, Stored
from moetune.service import describe
from moetune.service.bodies import (
    JSON,
    TOML,
    check_values,
    document,
    page,
    parse_json,
    read_body,
    read_document,
)
from moetune.service.describe import Limit, NameCursor, PlanCursor, RowCursor
from moetune.service.problems import UnreadableBodyError
from moetune.service.workers import WorkerPools
from moetune.workflows.files import parse_toml, profile_to_toml
from moetune.workflows.profiles import ProfileInfo, is_path, list_profiles, named_profile

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

    @app.get("/v1/machines", summary="Machines", responses=describe.answers(describe.Page))
    async def machines(after: RowCursor = 0, limit: Limit = 50) -> Response:
        """List the machines that were measured, newest first."""
        rows = await pools.read(reading.machines, after=after, limit=limit + 1)
        return page("moetune.machines/1", rows, limit=limit, cursor=lambda row: row.id)

    @app.get("/v1/fits", summary="Fits", responses=describe.answers(describe.Page))
    async def fits(after: RowCursor = 0, limit: Limit = 50) -> Response:
        """List the fits of all profiles, newest first."""
        rows = await pools.read(reading.fits, after=after, limit=limit + 1)
        return page("moetune.fits/1", rows, limit=limit, cursor=lambda row: row.id)

    @app.get("/v1/profiles", summary="Profiles", responses=describe.answers(describe.Page))
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
        responses=describe.answers(Profile, HTTPStatus.NOT_FOUND),
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
        responses=describe.answers(dict[str, object], HTTPStatus.CREATED, takes_body=True),
        openapi_extra=describe.profile_body(),
    )
    async def upload(request: Request) -> Response:
        """Store a profile in TOML or JSON; the newest of a name is the current one.

        A profile equal to the current one of its name is not stored again.
        """
        kind, content = await read_body(request, kinds=(TOML, JSON))
        profile = await pools.read(_profile_in, kind, content)
        is_new = await pools.write(_store, pools.planner.store, profile)
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


def _profile_in(kind: str, content: bytes) -> Profile:
    """Return the profile in a body.

    Raises:
        InputError: it is not a profile; the message names the key, or the line of the TOML.
    """
    if kind == JSON:
        plain = parse_json(content)
    else:
        try:
            plain = parse_toml(content.decode(), "the body")
        except UnicodeDecodeError:
            raise UnreadableBodyError("the body is not UTF-8 text") from None
        check_values(plain)
    profile = profile_from_document(plain)
    check_name(profile.name)
    return profile


def _store(store: Store, profile: Profile) -> bool:
    """Store a profile unless the current one of its name is equal; return whether it is new."""
    current = store.profile(profile.name)
    if current is not None and current.digest == profile.digest:
        return False
    store.save_profile(profile)
    return True


_MAX_SECONDS = 10_000
_MAX_SOURCE_CHARACTERS = 64


def add_observations(app: FastAPI, pools: WorkerPools) -> None:
    """Add the routes of observations."""

    @app.post(
        "/v1/observations",
        summary="Store measured steps",
        status_code=HTTPStatus.CREATED,
        responses=describe.answers(dict[str, object], HTTPStatus.CREATED, takes_body=True),
        openapi_extra=describe.json_body(describe.Observations),
    )
    async def store_observations(request: Request) -> Response:
        """Store 1 to 1,000 observations of stored plans, all or none."""
        body = await read_document(request, pools, schema=OBSERVATIONS_SCHEMA)
        found = await pools.read(observations_in, body)
        await pools.write(pools.planner.store.add_observations, found)
        pools.metrics.observed(found)
        return document(
            {"schema": "moetune.observations.kept/1", "num_observations": len(found)},
            status=HTTPStatus.CREATED,
        )

    @app.get(
        "/v1/observations", summary="Measured steps", responses=describe.answers(describe.Page)
    )
    async def observations(
        plan: PlanCursor = "", after: RowCursor = 0, limit: Limit = 200
    ) -> Response:
        """List the observations of all plans, or of one, newest first."""
        rows = await pools.read(
            pools.planner.reading.observation_page, plan or None, after=after, limit=limit + 1
        )
        items = tuple(_row(row) for row in rows)
        return page("moetune.observations.page/1", items, limit=limit, cursor=lambda row: row["id"])


def observations_in(body: dict[str, object]) -> tuple[Observation, ...]:
    """Return the observations in a body.

    Raises:
        InputError: none or too many of them, an unknown or missing key, or a value of the wrong
            type or out of range; the message names its place.
    """
    rows = body.pop("observations", None)
    if body:
        raise InputError(f"the body has the unknown key {shown(next(iter(body)))}")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_OBSERVATIONS:
        raise InputError(f"observations must be a list of 1 to {MAX_OBSERVATIONS:,} entries")
    return tuple(_observation(row, f"observations[{index}]") for index, row in enumerate(rows))


def _observation(plain: object, where: str) -> Observation:
    found = decode(Observation, plain, where)
    if len(found.seconds) > _MAX_SECONDS:
        raise InputError(f"{where}.seconds has more than {_MAX_SECONDS:,} entries")
    if not 0 < len(found.source) <= _MAX_SOURCE_CHARACTERS or not found.source.isprintable():
        raise InputError(
            f"{where}.source must have 1 to {_MAX_SOURCE_CHARACTERS} printable characters"
        )
    return found


def _row(row: Stored[Observation]) -> dict[str, object]:
    return {"id": row.id, "created_at": row.created_at, **encode(row.value)}
