"""Prices of a GPU-hour in a text: the same for all machines, or by profile."""

from collections.abc import Sequence

from moetune.domain.errors import InputError
from moetune.domain.question import ASKS
from moetune.domain.spelling import about


def read_prices(text: str | None, profiles: Sequence[str]) -> dict[str, float]:
    """Return the price of a GPU-hour by profile.

    Args:
        text: "2.5" for all, or "h100-x8=2.5,b200-x8=3.2"; None for no price.

    Raises:
        InputError: the text has no price, or prices of only some profiles.
    """
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(profiles, _price(text))
    pairs = [pair.partition("=") for pair in text.split(",")]
    prices = {name.strip(): _price(price) for name, _, price in pairs}
    for name in profiles:
        if name not in prices:
            raise _wrong_prices(f"has none for {name}")
    for name in prices:
        if name not in profiles:
            raise _wrong_prices(f"names {name!r}, which is not asked")
    return prices


def _wrong_prices(what: str) -> InputError:
    return InputError(f"--price {what}", "give a single price, or NAME=PRICE for each profile")


def _price(text: str) -> float:
    price = ASKS["price"].read(text.strip())
    with about("price"):
        ASKS["price"].check(price)
    return float(str(price))
