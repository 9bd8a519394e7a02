"""`moetune compare`: machines and numbers of GPUs side by side, by time and cost."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from moetune.cli.commands import argument, command, option
from moetune.cli.completion import model_names, profile_names
from moetune.cli.options import fields, texts_of, words_in
from moetune.cli.progress import StatusLine
from moetune.cli.session import Session
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.spelling import AS_FLAGS, about, spelled
from moetune.domain.units import parse_count

_SPELLING = replace(
    AS_FLAGS, names={**AS_FLAGS.names, "profile": "--profiles", "world_size": "--world-sizes"}
)
_DEFAULTS = {"global_batch": "1024", "seq": "4k", "train_tokens": "1T"}


@command(
    "moetune compare qwen3-30b-a3b --profiles h100-x8,b200-x8 --world-sizes 64,128",
    argument(
        "model", "A name, or a Hugging Face config.json.", form="PATH|NAME", names=model_names
    ),
    option("--profiles", "Machines, as of --profile of `moetune plan`.", form="NAME,…",
           names=profile_names, required=True),
    option("--world-sizes", "Numbers of GPUs.", form="N,…", required=True),
    option("--target", "Runtimes, as of `moetune plan`.", form="TARGET,…", default="megatron"),
    option("--price", "Of a GPU-hour: 2.5, or h100-x8=2.5,b200-x8=3.2.", form="PRICE"),
    *fields("global_batch", "seq", "dtype", "optimizer", "train_tokens", "utilization",
            "uncalibrated", defaults=_DEFAULTS),
    option("--output", "Also draw it in a page: machines.html.", Path),
)  # fmt: skip
def compare(
    session: Session, model: str, *, profiles: str, world_sizes: str, target: str,
    price: str | None, output: Path | None, **asked: str | None,
) -> int:  # fmt: skip
    """Compare machines, numbers of GPUs and runtimes for a model's training.

    Each choice has its best plan. Two plans that are there: `moetune plans diff`.
    """
    from moetune.app.machine_choice import compare_machines
    from moetune.app.requests import ask, is_of_model
    from moetune.app.views.machine_choice import (
        check_page,
        choice_document,
        choice_sections,
        write_choices,
    )
    from moetune.domain.budget import read_prices
    from moetune.domain.question import read_texts

    names, screen = words_in(profiles), session.screen
    if output is not None:
        check_page(output)  # before the plans are made
    if not is_of_model(ask({"model": model})):  # before its defaults, which a layer does not have
        what = f"{model} is a layer, and machines are compared by a whole model's training"
        raise InputError(what, "name such a model: qwen3-30b-a3b", field="model")
    question = ask(read_texts({"model": model, **_DEFAULTS, **texts_of(asked)}))
    targets, prices = words_in(target), read_prices(price, names)
    with (
        spelled(_SPELLING), session.planner(None) as planner, closing(StatusLine(screen)) as line
    ):  # fmt: skip
        with about("world_size"):
            sizes = [parse_count(size, least=1) for size in words_in(world_sizes)]
        advance = line.counter("plans", len(names) * len(sizes) * len(targets))
        compared = compare_machines(
            planner, question, profiles=names, world_sizes=sizes, targets=targets, prices=prices,
            advance=lambda choice: advance(choice.name),
        )  # fmt: skip
    if output is not None:
        write_choices(output, compared)
    screen.answer(choice_sections(compared), choice_document(compared))
    if output is not None:
        screen.note(f"Drawn in {output}.")
    return 0 if compared.solved else InfeasiblePlanError.exit_code
