"""Forms that add a profile: their fields, who may send them, and the profile in a file.

The body is `multipart/form-data` (RFC 7578) of a few fields, as browsers send it. A form needs no
Content-Type that other sites could not send, too, so that it has to come from this service's page.
"""

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.requests import Request

from moetune.domain.document import is_pointer, refuse_zip
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.profile import Profile
from moetune.domain.units import format_bytes
from moetune.service.access import Access
from moetune.service.bodies import TOML
from moetune.service.middleware import may_write
from moetune.service.problems import ForbiddenError
from moetune.service.profiles import check_name, profile_in
from moetune.workflows.open_planner import ServicePlanner

MAX_FILE_BYTES = 2**20


def check_own_page(request: Request) -> None:
    """Raise ForbiddenError unless a page of this service sends the form, as its browser says."""
    headers = request.headers
    origin = urlsplit(headers.get("origin", "")).netloc
    if headers.get("sec-fetch-site") != "same-origin" and origin != headers.get("host", "-"):
        raise ForbiddenError(
            "this form is taken from a page of this service only",
            "programs send the profile itself:  POST /v1/profiles",
        )


def check_write(request: Request, access: Access, fields: Mapping[str, bytes]) -> None:
    """Raise ForbiddenError where neither the request nor the form has the write token."""
    if not may_write(request.scope, access, text_of(fields, "token")):
        raise ForbiddenError(
            "adding a profile needs the write token, and this is not it",
            "give it in the field Write token",
        )


def text_of(fields: Mapping[str, bytes], name: str) -> str:
    """Return the text of a field, "" where it was not sent."""
    return fields.get(name, b"").decode(errors="replace").strip()


def uploaded_profile(fields: Mapping[str, bytes], planner: ServicePlanner) -> Profile:
    """Return the profile in a form's file, under the form's name where it has one.

    Raises:
        InputError: the file is none, too large, or no profile, or its name is another machine's.
    """
    content = fields.get("file", b"")
    _check_file(content)
    name = text_of(fields, "name")
    profile = profile_in(TOML, content)
    if name:
        profile = replace(profile, name=check_name(name))
    check_same_machine(profile, planner)
    return profile


def _check_file(content: bytes) -> None:
    if not content:
        raise InputError("no file was chosen, or it is empty", "choose a profile in TOML")
    if len(content) > MAX_FILE_BYTES:
        raise InputError(
            f"the file has {format_bytes(len(content))}, more than {format_bytes(MAX_FILE_BYTES)}",
            "import it on the server:  moetune profiles import FILE",
        )
    refuse_zip(content, "the file", "unpack it, and send the .toml in it")
    if is_pointer(content):
        raise InputError(
            "the file is a pointer of Git LFS, not the profile itself", "fetch it:  git lfs pull"
        )


def check_same_machine(profile: Profile, planner: ServicePlanner) -> None:
    """Raise InputError where the name is that of another machine's profile."""
    try:
        known = planner.sources.profile(profile.name).profile
    except ProfileError:
        return
    same = known.machine == profile.machine
    if not same or known.fingerprint.hardware != profile.fingerprint.hardware:
        raise InputError(
            f"{profile.name!r} is the profile of another machine: {known.machine.num_devices} × "
            f"{known.machine.device}",
            "give it another name in the field Name",
        )
