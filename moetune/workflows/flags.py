"""Flags that several commands share, parsed into values of the domain."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from moetune.domain.errors import InputError
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.model import WHOLE_MODELS, Transformer
from moetune.domain.training import RECOMPUTES, Recompute

T = TypeVar("T")
_SIZE_FLAGS = {
    "num_layers": "--num-layers", "num_heads": "--num-heads", "length": "--seq",
    "vocab_size": "--vocab", "moe_every": "--moe-every",
}  # fmt: skip


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


def shape_of(
    model: str | None,
    layer: LayerShape | None,
    *,
    num_layers: int | None,
    num_heads: int | None,
    length: int | None,
    vocab: int | None,
    moe_every: int | None,
) -> Transformer | None:
    """Return the whole model of these sizes; None without any but --seq.

    Args:
        model: a paper's whole model, whose other sizes stay.
        layer: with experts, where no model is named; in a dense one, of a single expert.
        length: of --seq.

    Raises:
        InputError: sizes are missing, or the named model has no others.
    """
    sizes = {
        "num_layers": num_layers, "num_heads": num_heads, "vocab_size": vocab,
        "moe_every": moe_every, "length": length,
    }  # fmt: skip
    given = {name: size for name, size in sizes.items() if size is not None}
    if given.keys() <= {"length"}:
        return None
    if model is not None:
        if model not in WHOLE_MODELS:
            flag = _SIZE_FLAGS[next(iter(given))]
            raise InputError(
                f"{flag} is for a model by its sizes, and {model} has its own",
                f"omit it, or give --d-model, --d-hidden and --num-experts instead of {model}",
            )
        shape = WHOLE_MODELS[model].shape
        return replace(shape, moe=shape.moe, **given)
    missing = [flag for name, flag in _SIZE_FLAGS.items() if name not in {*given, "moe_every"}]
    if missing or layer is None:
        lacks = missing or ["--d-model", "--d-hidden", "--num-experts"]
        raise InputError(
            f"a whole model lacks {', '.join(lacks)}",
            "or name one with --model, such as ppmoe-6.7b",
        )
    return Transformer(moe=layer, **given)


def tokens_of(tokens: int | None, batch: int | None, length: int | None) -> int | None:
    """Return the tokens of one step on each rank; None for the model's.

    Args:
        tokens: value of --tokens.
        length: of --seq.

    Raises:
        InputError: the flags contradict each other.
    """
    if tokens is not None:
        if batch is not None or length is not None:
            raise InputError("--tokens and --batch with --seq exclude each other")
        return tokens
    if batch is None and length is None:
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
