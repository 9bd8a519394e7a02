"""Answers to requests for profiles, and for the runs that were observed on them."""

from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from moetune.app.files import parse_toml, profile_in_toml, profile_to_toml
from moetune.app.plan import LONGEST_NAME
from moetune.app.profiles import is_path, list_profiles, named_profile
from moetune.app.views.observed import stored_documents
from moetune.domain.errors import InputError, NotFoundError, ProfileError
from moetune.domain.profile import Profile, profile_from_document
from moetune.service.bodies import (
    JSON,
    TOML,
    Limit,
    PlanCursor,
    RowCursor,
    check_values,
    document,
    page,
    parse_json,
    read_body,
)
from moetune.service.problems import UnreadableBodyError
from moetune.service.workers import WorkerPools

if TYPE_CHECKING:
    from moetune.store import SqlStore


async def profiles(pools: WorkerPools) -> Response:
    """List the profiles of the store, newest first, and the reference machines, in one page."""
    rows = await pools.read(list_profiles, pools.planner.reading)
    return page("moetune.profiles.page/1", rows, limit=len(rows))


async def profile(pools: WorkerPools, request: Request, name: str) -> Response:
    """Return a profile as JSON, or as the TOML of `moetune profiles export` by `Accept`."""
    try:
        named = await pools.read(named_profile, check_name(name), store=pools.planner.reading)
    except ProfileError as error:
        raise NotFoundError(error.what, "GET /v1/profiles lists them") from None
    if TOML in request.headers.get("accept", ""):
        return Response(await pools.read(profile_to_toml, named.profile), media_type=TOML)
    return document(named.profile)


async def add_profile(pools: WorkerPools, request: Request) -> Response:
    """Store a profile in TOML or JSON; the newest of a name is current.

    A profile equal to the current one of its name is not stored again.
    """
    kind, content = await read_body(request, kinds=(TOML, JSON))
    sent = await pools.read(profile_in, kind, content)
    is_new = await pools.write(store_profile, pools.planner.store, sent)
    return document(
        {"schema": "moetune.profiles.import/1", "name": sent.name, "digest": sent.digest},
        status=HTTPStatus.CREATED if is_new else HTTPStatus.OK,
        headers={"Location": f"/v1/profiles/{quote(sent.name)}"},
    )


def check_name(name: str) -> str:
    """Return a profile's name; raise InputError if empty, too long, not printable, or a path."""
    if is_path(name) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise InputError(
            f"{name[:LONGEST_NAME]!r} is not a profile's name",
            "a name has 1 to 200 printable characters, no slash and no .toml at its end",
        )
    return name


def profile_in(kind: str, content: bytes) -> Profile:
    """Return the profile in a body; raise InputError that names the key or the TOML's line."""
    if kind == JSON:
        sent = profile_from_document(parse_json(content))
    else:
        try:
            plain = parse_toml(content.decode(), "the body")
        except UnicodeDecodeError:
            raise UnreadableBodyError("the body is not UTF-8 text") from None
        check_values(plain)
        sent = profile_in_toml(plain)
    check_name(sent.name)
    return sent


def store_profile(store: "SqlStore", profile: Profile) -> bool:
    """Store a profile unless it equals the current profile of its name; return if it is new."""
    current = store.profile(profile.name)
    if current is not None and current.digest == profile.digest:
        return False
    store.save_profile(profile)
    return True


async def runs(
    pools: WorkerPools, plan: PlanCursor = "", after: RowCursor = 0, limit: Limit = 200
) -> Response:
    """List the observed runs of models, of all plans or of a single plan, newest first."""
    read = pools.planner.reading.observed_runs
    rows = await pools.read(read, plan_id=plan or None, after=after, limit=limit + 1)
    return page("moetune.runs.page/1", rows, limit=limit, documents=stored_documents)
