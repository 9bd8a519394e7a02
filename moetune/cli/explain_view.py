"""Why a plan is as it is, in words and tables."""

from moetune.cli.model_view import model_title, show_layouts, show_parts
from moetune.cli.plan_view import how_sure, is_one_chunk, is_tensor, sentence, title
from moetune.cli.render import Screen, plural, seconds_span
from moetune.domain.plan import Plan, TransformerPlan
from moetune.domain.terms import PhaseTerms
from moetune.domain.units import format_bytes, format_seconds
from moetune.solve.layer.words import HOW
from moetune.workflows.explain import Explanation


def show_explanation(screen: Screen, explanation: Explanation) -> None:
    """Print why, the terms, what lost, the degrees for other sizes, and how sure it is."""
    plan = explanation.plan
    whole = plan.transformer
    screen.say((model_title if whole else title)(explanation), style="bold")
    screen.say(f"Plan {plan.id[:6]}, made with profile {plan.inputs.profile}.")
    for flag, value in sorted(plan.inputs.constraints.items()):
        screen.say(f"--{flag} {value}", indent=2)
    _paragraph(screen, "Why", plan.decision.why)
    if whole is not None:
        _show_model(screen, plan, whole)
    if whole is None or whole.moe_every:
        _show_layer(screen, explanation)
        _show_trust(screen, plan)
    else:
        _show_warnings(screen, plan)


def _show_layer(screen: Screen, explanation: Explanation) -> None:
    plan = explanation.plan
    if plan.transformer is not None:
        ranks = plural(plan.workload.world_size, "rank")
        tokens = plural(plan.workload.tokens_per_rank, "token")
        screen.say(f"One MoE layer, {ranks}, {tokens} of a micro-batch:", style="bold")
        screen.say()
    _show_terms(screen, explanation)
    _show_strategies(screen, explanation)
    _show_alternatives(screen, explanation)
    _show_ranges(screen, plan)


def _show_model(screen: Screen, plan: Plan, whole: TransformerPlan) -> None:
    screen.say("What the model's step consists of", style="bold")
    show_parts(screen, whole)
    screen.say("Layouts", style="bold")
    show_layouts(screen, plan, whole)
    screen.say()


def _show_terms(screen: Screen, explanation: Explanation) -> None:
    screen.say("What the time consists of", style="bold")
    forward, backward = explanation.forward, explanation.backward
    if explanation.note:
        screen.say(sentence(explanation.note), indent=2)
        screen.say()
    if forward is None or backward is None:
        return
    header = ("phase", "chunks", "transfer", "experts", "all experts", "exposed", "planned")
    rows = [_terms("forward", forward), _terms("backward", backward)]
    screen.table(header, rows, right=range(1, 7))
    screen.say(
        f"transfer: {_transfer(explanation.plan)}; experts: one chunk's; "
        "exposed: communication that the experts do not hide.",
        indent=2,
    )
    if explanation.plan.workload.gathers:
        screen.say(
            f"Before the first chunk one all-gather of all tokens takes "
            f"{format_seconds(forward.gathering_seconds)} forward, and one of the output's "
            f"gradient {format_seconds(backward.gathering_seconds)} backward: both are exposed.",
            indent=2,
        )
    hidden = forward.hidden_seconds + backward.hidden_seconds
    transfers = forward.total_transfer_seconds + backward.total_transfer_seconds
    if transfers == 0:
        screen.say("Nothing can be hidden: one rank sends nothing.", indent=2)
    elif is_one_chunk(explanation.plan):
        screen.say(
            f"Nothing is hidden: all {format_seconds(transfers)} of transfers are waited for.",
            indent=2,
        )
    else:
        screen.say(
            f"{format_seconds(hidden)} of {format_seconds(transfers)} of transfers are hidden.",
            indent=2,
        )
    screen.say()


def _transfer(plan: Plan) -> str:
    if not is_tensor(plan):
        return "one chunk's dispatch, and the same again for its combine"
    name = "reduce-scatter" if plan.workload.sequence_parallel else "all-reduce"
    return f"one chunk's {name}, of the output or of the input's gradient"


def _terms(name: str, terms: PhaseTerms) -> tuple[str, ...]:
    seconds = (
        terms.transfer_seconds,
        terms.compute_seconds,
        terms.total_compute_seconds,
        terms.exposed_communication_seconds,
        terms.seconds,
    )
    return name, str(terms.degree), *map(format_seconds, seconds)


def _show_strategies(screen: Screen, explanation: Explanation) -> None:
    if not explanation.strategies:
        return
    screen.say("Ways to keep activations", style="bold")
    rows = [
        (
            one.strategy + (" *" if one.is_chosen else ""),
            f"{one.forward_degree} and {one.backward_degree}",
            format_bytes(one.needed_bytes),
            format_bytes(one.peak_bytes),
            format_bytes(one.host_bytes) if one.host_bytes else "",
            format_seconds(one.step_seconds),
            format_seconds(one.paper_seconds) + (" *" if one.is_paper_choice else ""),
        )
        for one in explanation.strategies
    ]
    header = ("strategy", "chunks", "device", "peak", "host", "step", "Eq. 10")
    screen.table(header, rows, right=range(2, 7))
    for one in explanation.strategies:
        lost = f": {one.lost_because}" if one.lost_because else ""
        screen.say(f"{one.strategy}: {HOW[one.strategy]}{lost}", indent=2)
    missing = [one for one in HOW if one not in {each.strategy for each in explanation.strategies}]
    if missing:
        screen.say(
            f"{', '.join(missing)}: no price, the profile has no copies to the host and back.",
            indent=2,
        )
    screen.say(
        "device: by the formulas, which the limit is held against; peak: of a step as the layer "
        "runs it, with the rings and the routing data that they leave out.",
        indent=2,
    )
    screen.say(
        "Eq. 10 is MPipeMoE's own rule: * is what it takes where memory is reused. It knows no "
        "start-up times and does not decide here.",
        indent=2,
    )
    screen.say()


def _show_alternatives(screen: Screen, explanation: Explanation) -> None:
    plan = explanation.plan
    screen.say("What lost", style="bold")
    rows = [
        (
            f"{one.forward_degree} and {one.backward_degree}",
            one.strategy,
            format_seconds(one.step_seconds),
            one.lost_because,
        )
        for one in plan.alternatives
        if one.layout is None
        and (not explanation.strategies or one.strategy == plan.memory.strategy)
    ]
    if rows:
        screen.table(("chunks", "strategy", "step", "because"), rows, right=(2,))
    else:
        screen.say("The bounds leave no other choice.", indent=2)
    screen.say()


def _show_ranges(screen: Screen, plan: Plan) -> None:
    screen.say("Chunks for other numbers of tokens", style="bold")
    rows = [
        (f"{low:,}–{high:,}", str(forward), str(backward))
        for low, high, forward, backward in plan.pipeline.ranges
    ]
    tokens = "tokens on every rank" if is_tensor(plan) else "tokens per rank"
    if plan.workload.sequence_parallel:
        tokens = "tokens of all ranks"
    screen.table((tokens, "forward", "backward"), rows, right=(0, 1, 2))
    screen.say()


def _show_trust(screen: Screen, plan: Plan) -> None:
    times = plan.predicted
    span = seconds_span(times.step_seconds, times.p05_step_seconds, times.p95_step_seconds)
    screen.say("How far to trust it", style="bold")
    screen.say(f"One step: {span}, 90 % of the fits that the noise allows. ", indent=2)
    screen.say(f"The least trusted number behind it is {times.trust}.", indent=2)
    screen.say(how_sure(plan), indent=2)
    _say_warnings(screen, plan)


def _show_warnings(screen: Screen, plan: Plan) -> None:
    screen.say("How far to trust it", style="bold")
    _say_warnings(screen, plan)


def _say_warnings(screen: Screen, plan: Plan) -> None:
    for warning in plan.warnings:
        screen.say(sentence(warning), indent=2)


def _paragraph(screen: Screen, name: str, text: str) -> None:
    screen.say()
    screen.say(name, style="bold")
    screen.say(text, indent=2)
    screen.say()
