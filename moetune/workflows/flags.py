"""Flags that several commands share, parsed into values of the domain."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from moetune.domain.constraints import TransformerSizes
from moetune.domain.errors import InputError
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.model import find_model
from moetune.domain.training import RECOMPUTES, Recompute

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlags:
    """The sizes of a layer; None where a flag was not given."""

    d_model: int | None
    d_hidden: int | None
    num_experts: int | None
    top_k: int | None
    activation: Activation | None

    def layer(self, model: str | None) -> LayerShape | None:
        """Return the layer; None without any of these flags.

        Args:
            model: value of `--model`.

        Raises:
            InputError: some sizes are missing, or a model is named as well.
        """
        sizes = {
            "--d-model": self.d_model,
            "--d-hidden": self.d_hidden,
            "--num-experts": self.num_experts,
        }
        given = [flag for flag, value in sizes.items() if value is not None]
        others = {"--top-k": self.top_k, "--activation": self.activation}
        extra = [flag for flag, value in others.items() if value is not None]
        if model is not None and (given or extra):
            raise InputError(
                f"--model {model} and {(given + extra)[0]} exclude each other",
                "name a model, or give --d-model, --d-hidden and --num-experts",
            )
        if not given and not extra:
            return None
        if self.d_model is None or self.d_hidden is None or self.num_experts is None:
            missing = ", ".join(flag for flag, value in sizes.items() if value is None)
            raise InputError(f"the layer lacks {missing}", "give them, or a model with --model")
        return LayerShape(
            d_model=self.d_model,
            d_hidden=self.d_hidden,
            num_experts=self.num_experts,
            top_k=self.top_k or 1,
            activation=self.activation or "gelu",
        )


def model_sizes(
    model: str | None,
    *,
    num_layers: int | None,
    num_heads: int | None,
    length: int | None,
    vocab: int | None,
    moe_every: int | None,
) -> TransformerSizes:
    """Return the sizes of a whole model.

    Args:
        length: of --seq; without other sizes of a whole model it goes with --batch, and the
            sizes are empty.

    Raises:
        InputError: no model has this name.
    """
    others = (num_layers, num_heads, vocab, moe_every)
    is_named = model is not None and find_model(model).transformer is not None
    is_whole = is_named or any(one is not None for one in others)
    return TransformerSizes(
        num_layers=num_layers,
        num_heads=num_heads,
        length=length if is_whole else None,
        vocab_size=vocab,
        moe_every=moe_every,
    )


def tokens_of(
    tokens: int | None, batch: int | None, length: int | None, *, is_whole: bool
) -> int | None:
    """Return the tokens of one step on each rank; None for the model's.

    Args:
        tokens: value of --tokens.
        length: of --seq.
        is_whole: whether the plan is for a whole model, which takes --seq without --batch.

    Raises:
        InputError: the flags contradict each other.
    """
    if tokens is not None:
        if batch is not None or (length is not None and not is_whole):
            raise InputError("--tokens and --batch with --seq exclude each other")
        return tokens
    if batch is None and (length is None or is_whole):
        return None
    if batch is None or length is None:
        raise InputError("--batch and --seq go together", "or give --tokens")
    return batch * length


def parsed(text: str | None, parse: Callable[[str], T], flag: str) -> T | None:
    """Return a flag's parsed value; None where it was not given.

    Raises:
        InputError: the value is wrong; the text names the flag.
    """
    return None if text is None else read_flag(text, parse, flag)


def read_flag(text: str, parse: Callable[[str], T], flag: str) -> T:
    """Return a flag's parsed value.

    Raises:
        InputError: the value is wrong; the text names the flag.
    """
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{flag}: {error.what}", error.hint) from None


def modules_of(text: str) -> tuple[Recompute, ...]:
    """Return the modules of `--recompute`.

    Raises:
        InputError: one is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in RECOMPUTES]
    if unknown or not names:
        raise InputError(
            f"--recompute {text!r}: {unknown[0] if unknown else 'nothing'} is no module",
            f"use none, or a comma-separated list of {', '.join(RECOMPUTES)}",
        )
    return tuple(one for one in RECOMPUTES if one in names)
