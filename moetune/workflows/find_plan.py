"""Plans that were made before."""

from pathlib import Path

from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.workflows.files import load_plan_file
from moetune.workflows.wiring import StoreFinder


def find_plan(wanted: str, *, stores: StoreFinder) -> Plan:
    """Return the plan of a file, else of an id or the beginning of one in the store.

    Args:
        wanted: an id prefix, or a path that ends in .json or has a folder.

    Raises:
        InputError: the file is missing or broken, or no or several plans have such an id.
    """
    if wanted.endswith(".json") or "/" in wanted:
        return load_plan_file(Path(wanted))
    with stores() as store:
        plan = store.plan(wanted) if store and wanted else None
        newest = store.plan_page(limit=1) if store and plan is None else ()
    if plan is not None:
        return plan
    hint = (
        f"the newest is {newest[0].id[:6]}" if newest else "make one:  moetune plan --model gpt-s"
    )
    raise InputError(f"no plan has an id that begins with {wanted!r}", hint)
