"""Fields of a configuration: read with checks under each spelling, and all accounted for.

A field that was not read and that is not known to be harmless is an error. So a configuration of an
unknown variant is never read as a known variant. Errors are gathered, not raised: reading goes on
with a stand-in value, and a single error names all wrong fields.

A field is harmless if its meaning is known by its whole name. An ending decides only for values
that cannot be a size: an index of a token, a probability, a name of a precision. Sources:
`PreTrainedConfig` and the configuration classes of transformers 5.24, and configurations of the
Hub that have more fields than their classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

WIDTH = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("num_key_value_heads", "kv_n_heads", "num_attention_groups")
_LONGEST = 40
Named = TypeVar("Named")
_CORRECT = "correct the field in the configuration"


@dataclass(slots=True, kw_only=True)
class Fields:
    """A configuration's fields, the names that were read, and the problems.

    Args:
        values: fields of the language model, unnested.
        read: names of the fields that were read.
        overrides: the fields in `values` that hold only for a single block.
        problems: what to do about each problem, by the problem.
        lacking: missing fields.
        stand_ins: missing or wrong fields, which were read with a stand-in value.
        parts: nested configurations by field.
        path: prefix of the names of a nested configuration, such as "linear_attn_config.".
    """

    values: Mapping[str, object]
    read: set[str] = field(default_factory=set)
    overrides: Mapping[str, object] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, None] = field(default_factory=dict)
    stand_ins: set[str] = field(default_factory=set)
    parts: dict[str, "Fields"] = field(default_factory=dict)
    path: str = ""

    def report(self, what: str, todo: str) -> None:
        """Remember a problem, and what to do about it."""
        self.problems.setdefault(what, todo)

    def has(self, *names: str) -> bool:
        """Return whether any of the spellings is present and not null."""
        return any(self.values.get(name) is not None for name in names)

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`.

        A missing field, another value and contradicting spellings are reported.

        Args:
            names: spellings; those that are present must agree.
            default: default of the configuration's class; None if the field must be present.
        """
        count = self.optional(*names, least=least)
        if count is not None:
            return count
        if default is None:
            self.missing(*names)
            return max(least, 1)
        return default

    def optional(self, *names: str, least: int = 1) -> int | None:
        """Return a whole number of at least `least`; None if it is absent, null or false."""
        name, value = self._value(names)
        if value is None or value is False:
            return None
        return self.whole(name, value, least=least)

    def whole(self, name: str, value: object, *, least: int = 1) -> int:
        """Return a value as a whole number of at least `least`; report any other value."""
        if not isinstance(value, bool) and isinstance(value, int) and value >= least:
            return value
        self.stand_ins.add(name)
        self.report(
            f"{self.path}{name} must be a whole number of at least {least}, got {value!r}", _CORRECT
        )
        return max(least, 1)

    def or_null(self, *names: str, null: int | None, least: int = 1) -> int | None:
        """Return a whole number, or `null` for a field that is present and null.

        An absent field is reported, because its class has another default than null.
        """
        self.read.update(names)
        if not any(name in self.values for name in names):
            self.missing(*names)
            return null
        count = self.optional(*names, least=least)
        return null if count is None else count

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a boolean; `default` is the default of the configuration's class."""
        return self._value_of(names, bool, "true or false", default)

    def text(self, *names: str, default: str = "") -> str:
        """Return a word; `default` is the default of the configuration's class."""
        return self._value_of(names, str, "a word", default)

    def _value_of(
        self, names: Sequence[str], kind: type[Named], words: str, default: Named
    ) -> Named:
        """Return a value of a type; report a value of another type."""
        name, value = self._value(names)
        if isinstance(value, kind):
            return value
        if value is not None:
            self.report(f"{self.path}{name} must be {words}, got {value!r}", _CORRECT)
        return default

    def sequence(self, *names: str) -> tuple[object, ...] | None:
        """Return a list's values; None if the list is absent or null."""
        name, value = self._value(names)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            self.report(f"{self.path}{name} must be a list, got {value!r}", _CORRECT)
            return None
        return tuple(value)

    def of_layers(self, name: str, num_layers: int) -> tuple[object, ...] | None:
        """Return a list with a value for each layer; None if it is absent.

        Longer lists also hold the layers of multi-token prediction, which are left out.
        """
        values = self.sequence(name)
        if not values:
            return None
        if any(isinstance(value, Mapping | list) for value in values):
            self.report(f"{self.path}{name} must be a list of words or numbers", _CORRECT)
            return None
        if len(values) < num_layers:
            self.report(
                f"{self.path}{name} has {len(values)} entries for {num_layers} layers",
                f"give {name} an entry for each layer, or correct num_hidden_layers",
            )
            return None
        return values[:num_layers]

    def named_layers(
        self, name: str, num_layers: int, meanings: Mapping[object, Named]
    ) -> tuple[Named, ...] | None:
        """Return the meanings of the entries of `of_layers`; None if any entry is unknown."""
        values = self.of_layers(name, num_layers)
        unknown = [value for value in dict.fromkeys(values or ()) if value not in meanings]
        if unknown:
            words = ", ".join(map(str, meanings))
            self.report(f"{self.path}{name} has unknown entries: {unknown}", f"known are {words}")
        return None if unknown or values is None else tuple(meanings[value] for value in values)

    def nested_fields(self, name: str) -> "Fields | None":
        """Return the fields of a nested configuration; None if there is none."""
        self.read.add(name)
        values = self.values.get(name)
        if not isinstance(values, Mapping):
            return None
        if name not in self.parts:
            self.parts[name] = Fields(
                values=values, problems=self.problems, lacking=self.lacking,
                stand_ins=self.stand_ins,
                path=f"{self.path}{name}.",
            )  # fmt: skip
        return self.parts[name]

    def of_block(self, number: int) -> "Fields":
        """Return the fields of a block, counted from 0, with the block's values where it has some.

        The block's keys are accounted for in the same way as fields of the model.
        """
        changed: dict[str, object] = {}
        blocks = self.nested_fields("per_layer_config")
        if blocks is not None:
            block = blocks.nested_fields(str(number)) or blocks.nested_fields(f"{number:02d}")
            if block is not None:
                block.read = self.read
                changed |= block.values
        heads = self.of_layers("num_attention_heads_per_layer", number + 1)
        if heads is not None:
            changed["num_attention_heads"] = heads[number]
        if not changed:
            return self
        return replace(self, values={**self.values, **changed}, overrides=changed)

    def skip(self, *names: str) -> None:
        """Mark fields as read that change neither size nor cost in this family."""
        self.read.update(names)

    def only(self, name: str, allowed: tuple[object, ...]) -> None:
        """Read a field that must be absent, null or among these values; report other values."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None and value not in allowed:
            words = " or ".join(_as_json(word) for word in allowed)
            self.report(
                f"{self.path}{name} is {_as_json(value)}, and only {words} is supported",
                f"take a model whose {name} is {words}: others have other sizes",
            )

    def missing(self, *names: str) -> None:
        """Report a field that must be present, by its first spelling."""
        self.lacking[f"{self.path}{names[0]}"] = None
        self.stand_ins.add(names[0])

    @property
    def is_flawed(self) -> bool:
        """Whether any field is wrong or missing."""
        return bool(self.problems or self.lacking)

    def unread(self) -> dict[str, object]:
        """Return the fields that may change sizes and that were not read, with their values.

        A field that is null, zero, false or empty counts as absent.
        """
        unknown = {
            f"{self.path}{name}": value
            for name, value in sorted(self.values.items())
            if name not in self.read
            and value not in (None, 0, {}, [], "")
            and not is_harmless(name, value)
        }
        for part in self.parts.values():
            unknown |= part.unread()
        return unknown

    def _value(self, names: Sequence[str]) -> tuple[str, object]:
        self.read.update(names)
        present = [name for name in names if self.values.get(name) is not None]
        if not present:
            return names[0], None
        value = self.values[present[0]]
        for name in present[1:]:
            if self.values[name] != value:
                self.report(
                    f"{present[0]} ({_as_json(value)}) and {name} ({_as_json(self.values[name])}) "
                    "are names of the same field and differ",
                    "keep the name that is right",
                )
        return present[0], value


def name_fields(fields: Mapping[str, object]) -> str:
    """Return fields and their values in words, such as "memory_slots (64), use_residual (true)"."""
    return ", ".join(f"{name} ({_as_json(value)})" for name, value in fields.items())


def _as_json(value: object) -> str:
    """Return a value as JSON writes it; cut a long value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_GENERAL = """
_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation
_name_or_path architectures attn_implementation auto_map chat_template dtype finetuning_task
id2label label2id license model_name model_type num_labels output_attentions
output_hidden_states output_router_logits output_scores prefix problem_type quantization
quantization_config return_dict return_dict_in_generate save_dtype tags task_specific_params
tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
transformers_weights unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
chunk_size_feed_forward is_decoder seed gradient_checkpointing use_flash_attn
use_flash_attention use_flash_attention_2 use_sdpa keys_to_ignore_at_inference
base_model_tp_plan base_model_pp_plan base_model_ep_plan compression_config sparsity_config
"""
_GENERATION = """
bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty generation_config length_penalty
max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
num_logits_to_keep num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
temperature top_k top_p typical_p ignore_index
"""
_POSITIONS = """
attn_temperature_tuning attn_scale compress_rope_theta floor_scale global_rope_theta
initial_context_length layer_rope_theta local_rope_theta log_scaling_alpha log_scaling_n_floor
max_position_embeddings max_seq_len max_sequence_length model_max_length mrope_section
max_model_len n_ctx original_max_position_embeddings partial_rotary_factor
partial_rotary_factors rope_interleave rope_interleaved rope_local_base_freq rope_parameters
rope_scaling rope_theta rope_type rope_traditional rotary_dim rotary_emb_base rotary_pct
rotary_percent rotary_base seq_length seq_len swa_rope_theta use_mrope yarn_only_types
mrope_interleaved original_seq_len rope_factor beta_fast beta_slow mscale mscale_all_dim
no_rope_layers no_rope_layer_interval use_nope rope_head_dim_interleaved swa_rope_parameters
"""
_SCALES = """
attention_multiplier attention_softmax_in_fp32 attention_value_scale attn_logit_softcapping
attn_output_multiplier clip_qkv embedding_multiplier embedding_multiplier_scale embedding_scale
final_logit_softcapping hc_eps hc_magnitude hc_sinkhorn_iters kda_lower_bound
learnable_sink_init linear_lower_bound logit_scale logits_mup_width_multiplier logits_scaling
logits_scale max_attn_value moe_router_logit_softcapping moe_routed_scaling_factor
moe_router_scaling_factor norm_head norm_softmax output_multiplier output_multiplier_scale
qk_scale_factor query_pre_attn_scalar residual_multiplier route_norm route_scale
routed_scaling_factor router_scaling_factor scale_attn_weights scale_attn_by_inverse_layer_idx
scale_depth scale_emb softcap swiglu_alpha swiglu_limit swiglu_limits swiglu_limits_shared
reorder_and_upcast_attn activation_situ_beta activation_situ_linear_beta
residual_gate_temperature norm_topk_prob moe_renormalize norm_expert_weight mla_scale_q_lora
mla_scale_kv_lora
"""
_TRAINING = """
load_balance_coeff mup_enabled mtp_share_parameters aux_loss_alpha bias_update_speed embd_pdrop
emb_pdrop attn_pdrop resid_pdrop ep_size init_method init_std initializer_factor
initializer_range input_jitter_noise rescale_prenorm_residual router_jitter_noise jitter_eps
moe_capacity_factor moe_drop_tokens moe_eval_capacity_factor moe_jitter_eps
moe_random_routing_dropped_token mtp_loss_scaling_factor mtp_loss_weight mup_base_width
need_fp32_gate norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_norm_eps
pretraining_tp residual_in_fp32 route_bias_update_speed router_aux_loss_coef aux_loss_coef
router_dtype router_z_loss_coef z_loss_coef seq_aux time_step_floor time_step_limit
time_step_max time_step_min use_associative_scan use_mamba_kernels mamba_chunk_size chunk_size
mamba_hidden_act mamba_ssm_cache_dtype mamba_ssm_dtype moe_router_dtype
moe_shared_expert_overlap output_gate_type expert_dtype fp32_lm_head calc_aux_loss_in_router
layerdrop enable_moe_fp32_combine moe_impl use_grouped_mm use_grouped_gemm
"""
_HARMLESS = frozenset(f"{_GENERAL} {_GENERATION} {_POSITIONS} {_SCALES} {_TRAINING}".split())
_VALUES = {
    "position_embedding_type": ("rope", "rotary", "nope", "none", "alibi"),
    "normalization_function": ("rmsnorm",),
    "norm_type": ("rms", "rmsnorm", "RMSNorm"),
    "attention_method": ("MLA", "GQA", "MHA"),
    "attn_type": ("softmax",),
}
"""Values that match what the reader counts anyway; other values would have other sizes."""
_INDEXES = ("_token_id", "_token_ids", "_token_index")
_WORDS = ("_dtype", "_version", "_implementation")
_FRACTIONS = ("dropout", "dropout_prob", "_eps", "_epsilon", "_loss_coef", "_pdrop")


def is_harmless(name: str, value: object) -> bool:
    """Return whether a field changes neither sizes nor costs."""
    if name in _HARMLESS:
        return True
    if name in _VALUES:
        return value in _VALUES[name]
    if isinstance(value, str):
        return name.endswith(_WORDS)
    if isinstance(value, float):
        return name.endswith(_FRACTIONS) and 0 < value < 1
    return name.endswith(_INDEXES)
