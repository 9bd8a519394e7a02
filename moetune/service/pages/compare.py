"""Two plans or two profiles beside each other."""

from moetune.domain.errors import InputError
from moetune.report.degrees import degree_picture
from moetune.report.picture import Picture
from moetune.report.steps import phases_picture
from moetune.report.tables import Table
from moetune.service.pages.library import Library
from moetune.service.pages.plans import plan_words
from moetune.service.pages.sheet import Sheet, address
from moetune.workflows.comparison import compare_machines, compare_plans, overlays


def compare_sheet(library: Library, *, what: str, first: str, second: str) -> Sheet:
    """Return the form, and with two names the comparison.

    Args:
        what: "plans" or "profiles".
        first, second: ids, or the beginning of one; or names.

    Raises:
        InputError: `what` is something else.
        NotFoundError: one of them is not there.
    """
    if what not in {"plans", "profiles"}:
        raise InputError(f"what must be plans or profiles, got {what!r}")
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    names = first, second
    if first and second:
        compare = _plans if what == "plans" else _profiles
        names, pictures, table = compare(library, first, second)
    return Sheet(
        template="compare.html",
        context={
            "title": "Compare",
            "here": "compare",
            "what": what,
            "first": first,
            "second": second,
            "names": names,
            "plans": {one.id[:12]: plan_words(one) for one in library.newest_plans()},
            "profiles": library.profile_names(),
            "pictures": pictures,
            "table": table,
            "links": [address(what, first), address(what, second)],
            "csv": lambda picture: address(
                "compare", f"{picture.name}.csv", what=what, first=first, second=second
            ),
        },
        pictures=pictures,
    )


_Comparison = tuple[tuple[str, str], tuple[Picture, ...], Table]


def _plans(library: Library, first: str, second: str) -> _Comparison:
    left, right = library.plan(first), library.plan(second)
    names = left.id[:6], right.id[:6]
    if left.id == right.id:
        return names, (), compare_plans(left, right, names=names)
    plans = {names[0]: left, names[1]: right}
    pictures = phases_picture(plans), degree_picture(plans)
    return names, pictures, compare_plans(left, right, names=names)


def _profiles(library: Library, first: str, second: str) -> _Comparison:
    left, right = (library.profile(name).profile for name in (first, second))
    return (left.name, right.name), overlays(left, right), compare_machines(left, right)
