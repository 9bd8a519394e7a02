"""The address of a plan service, as settings and callers may write it."""

from urllib.parse import urlsplit

from moetune.domain.errors import InputError

_HINT = "such as http://planner.example.org:8642"


def check_service_url(text: str) -> str:
    """Return the address without a slash at its end.

    Raises:
        InputError: it is no http or https address, or it holds more than a host, a port and a
            path. A password in it is not repeated.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_port = parts.port != 0
    except ValueError:
        is_address = has_port = False
    else:
        if parts.username is not None or parts.password is not None:
            raise InputError(
                "the url of the plan service holds a name or a password",
                "omit it: a token belongs in MOETUNE_TOKEN",
            )
        if parts.query or parts.fragment:
            raise InputError(
                "the url of the plan service holds more than host, port and path", _HINT
            )
    if not (is_address and has_port and text.isprintable() and text.isascii() and " " not in text):
        raise InputError(f"url {text!r} is no address of a plan service", _HINT)
    return text.rstrip("/")
