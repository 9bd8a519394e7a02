"""Fields of a configuration: read with checks under every spelling, and accounted for at the end.

A field that looks as if it changed a size or a cost and that nobody read is an error, so that a
configuration of an unknown variant is never read as a known one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moetune.domain.errors import InputError

WIDTH = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head")
_MATTERS = re.compile(
    r"expert|moe|layer|shared|latent|head|inter|rank|dim|num_|(^|_)n_|size|width|window|group|block"
    r"|top_?k|period|offset|interval|freq|step|pattern|bias|mtp|nextn|gate|index|conv|state|tie_"
)
_HARMLESS = re.compile(
    r"_id$|_ids$|_token$|dropout|_drop$|^initializer|init_|_init$|_std$|_eps(ilon)?$|_coef(ficient)?$"
    r"|aux_loss|z_loss|^output_|^return_|cache|rope|rotary|position_embeddings?$|^max_(position|seq|"
    r"sequence|window)|^torch_|^dtype|_dtype$|^transformers_|quantization|^auto_map|^architectures"
    r"|^is_encoder|_hidden_states$|initial_context|^pretraining_|^ep_size$|^num_logits_to_keep$"
    r"|chunk_size$|kernels?$|_in_fp32$|_multiplier$|_scale$|_scaling(_factor)?$|_limit$|capacity"
    r"|^id2label|^label2id|^problem_type|^task_|^num_labels|^mscale|_alpha$|_theta$|^bos_|^eos_"
    r"|^pad_|jitter|^layer_?norm_|^norm_|^logit|^seq_aux|lightning_|_implementation$|_lr_|^mup_"
    r"|^time_step|^layerdrop|^embedding_|^use_grouped|^pad_token|_overlap$|^expert_dtype|beta_factor$"
    r"|^temporal|^hidden_act|^chunk|token_index|^vision|^image|^video|^audio|^bias_update|^model_max"
    r"|^num_beam|ngram|^num_return_|^tie_encoder|^top_k$|^top_p$|^bad_words|^pruned_heads"
    r"|^attn_factor|^attn_scale|^floor_scale|attn_temperature|^first_token|^n_ctx$|^n_positions$"
)


@dataclass(slots=True, kw_only=True)
class Fields:
    """A configuration's fields, and which of them were read.

    Args:
        values: of the language model, unnested.
        where: the configuration's file or name, for errors.
        overrides: of these fields, those that hold for one block alone.
    """

    values: Mapping[str, object]
    where: str
    read: set[str] = field(default_factory=set)
    overrides: Mapping[str, object] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        """Return whether one of the spellings is present and not null."""
        return any(self.values.get(name) is not None for name in names)

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`.

        Args:
            names: spellings; those that are present must agree.
            default: of the configuration's class; None where the field must be present.

        Raises:
            InputError: it is missing, is no such number, or spellings contradict each other.
        """
        found = self.optional(*names, least=least)
        if found is not None:
            return found
        if default is None:
            raise self.missing(*names)
        return default

    def optional(self, *names: str, least: int = 1) -> int | None:
        """Return a whole number of at least `least`, None where it is absent or null."""
        name, value = self._one(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                f"{self.where}: {name} must be a whole number of at least {least}, got {value!r}",
                "correct the field in the configuration",
            )
        return value

    def or_null(self, *names: str, null: int | None, least: int = 1) -> int | None:
        """Return a whole number, or `null` for a field that is there and null.

        Raises:
            InputError: it is absent: its class has another default than null.
        """
        self.read.update(names)
        if not any(name in self.values for name in names):
            raise self.missing(*names)
        found = self.optional(*names, least=least)
        return null if found is None else found

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a truth value; `default` is that of the configuration's class."""
        name, value = self._one(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(
                f"{self.where}: {name} must be true or false, got {value!r}",
                "correct the field in the configuration",
            )
        return value

    def text(self, *names: str, default: str = "") -> str:
        """Return a word; `default` is that of the configuration's class."""
        name, value = self._one(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise InputError(
                f"{self.where}: {name} must be a word, got {value!r}",
                "correct the field in the configuration",
            )
        return value

    def sequence(self, *names: str) -> tuple[object, ...] | None:
        """Return a list's values, None where it is absent or null."""
        name, value = self._one(names)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InputError(
                f"{self.where}: {name} must be a list, got {value!r}",
                "correct the field in the configuration",
            )
        return tuple(value)

    def of_layers(self, name: str, num_layers: int) -> tuple[object, ...] | None:
        """Return a list with a value for each layer, None where it is absent.

        Longer lists also hold the layers of multi-token prediction.
        """
        found = self.sequence(name)
        if found is not None and len(found) < num_layers:
            raise InputError(
                f"{self.where}: {name} has {len(found)} entries for {num_layers} layers",
                f"give {name} an entry for each layer, or correct num_hidden_layers",
            )
        return None if found is None else found[:num_layers]

    def of_block(self, at: int) -> "Fields":
        """Return the fields of block `at`, counted from 0: with its own values where it has some.

        Raises:
            InputError: a list has no entry for the block.
        """
        nested = self.values.get("per_layer_config")
        own: dict[str, object] = {}
        if isinstance(nested, Mapping):
            self.skip("per_layer_config")
            found = nested.get(str(at), nested.get(f"{at:02d}"))
            own |= found if isinstance(found, Mapping) else {}
        heads = self.of_layers("num_attention_heads_per_layer", at + 1)
        if heads is not None:
            own["num_attention_heads"] = heads[at]
        if not own:
            return self
        return replace(self, values={**self.values, **own}, overrides=own)

    def skip(self, *names: str) -> None:
        """Count fields as read that change neither size nor cost in this family."""
        self.read.update(names)

    def missing(self, *names: str) -> InputError:
        """Return the error of a field that must be present."""
        return InputError(
            f"{self.where}: {' or '.join(names)} is missing",
            "add the field: sizes have no default that would hold for every model",
        )

    def contradiction(self, what: str, todo: str) -> InputError:
        """Return the error of fields that cannot both be true."""
        return InputError(f"{self.where}: {what}", todo)

    def unread(self) -> tuple[str, ...]:
        """Return the fields that look as if they mattered and that nobody read.

        None of something, null, zero or false, is as good as its absence.
        """
        return tuple(
            name
            for name, value in sorted(self.values.items())
            if name not in self.read and value not in (None, 0, {}, []) and looks_relevant(name)
        )

    def _one(self, names: Sequence[str]) -> tuple[str, object]:
        self.read.update(names)
        present = [name for name in names if self.values.get(name) is not None]
        if not present:
            return names[0], None
        value = self.values[present[0]]
        for other in present[1:]:
            if self.values[other] != value:
                raise self.contradiction(
                    f"{present[0]} ({value!r}) and {other} ({self.values[other]!r}) are names of "
                    "the same field and differ",
                    "keep the one that is right",
                )
        return present[0], value


def looks_relevant(name: str) -> bool:
    """Return whether a field's name looks as if it changed a size or a cost."""
    return bool(_MATTERS.search(name)) and not _HARMLESS.search(name)
