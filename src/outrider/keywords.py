"""Other libraries' names for what `outrider.load` takes: vLLM's, transformers' and our own.

    outrider.load(target, **load_arguments({"model": draft, "num_speculative_tokens": 5}))
    outrider.load(target, **load_arguments({"method": "ngram", "prompt_lookup_max": 4}))
    outrider.load(target, **load_arguments({"assistant_model": draft, "num_assistant_tokens": 5}))

What cannot be honoured is an error, never dropped.
"""

from collections.abc import Mapping
from typing import Any

from outrider.errors import ConfigurationError, UnknownName

SHAPE = ("num_speculative_tokens", "branching", "width", "total_tokens", "acceptance", "coupled")
OURS = ("draft", "drafter", *SHAPE, "rule", "ngram", "table")
METHODS = {
    "draft_model": "draft_model",
    "ngram": "prompt_lookup",
    "prompt_lookup": "prompt_lookup",
    "ngram_table": "ngram_table",
    "root": "root",
}
RULES = {"standard": "rejection", "strict": "rejection", "block": "block"}
#: Names that a generation configuration of transformers carries.
CONFIGURED = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)
KNOWN = (
    *OURS,
    "model",
    "draft_model",
    "method",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
    "draft_sample_method",
    "assistant_model",
    *CONFIGURED,
)


def load_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `outrider.load` from a `speculative_config` or transformers' keywords.

    >>> load_arguments({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3})
    {'num_speculative_tokens': 6, 'drafter': 'prompt_lookup', 'ngram': (1, 3)}
    """
    for key in given:
        if key not in KNOWN:
            raise UnknownName("speculative setting", key, KNOWN)
    asked = {key: value for key, value in given.items() if value is not None}
    found = {key: asked[key] for key in OURS if key in asked}

    def put(name: str, value: Any, source: str) -> None:
        if name in found and found[name] is not value and found[name] != value:
            raise ConfigurationError(
                f"{source}={value!r} contradicts {name}={found[name]!r}; give one of them"
            )
        found[name] = value

    for name in ("model", "draft_model", "assistant_model"):
        if name in asked:
            put("draft", asked[name], name)
    if "num_assistant_tokens" in asked:
        put("num_speculative_tokens", int(asked["num_assistant_tokens"]), "num_assistant_tokens")
    if "method" in asked:
        method = str(asked["method"])
        if method not in METHODS:
            raise UnknownName("speculative method", method, METHODS)
        put("drafter", METHODS[method], "method")
    if "prompt_lookup_num_tokens" in asked:
        put("drafter", "prompt_lookup", "prompt_lookup_num_tokens")
        count = int(asked["prompt_lookup_num_tokens"])
        put("num_speculative_tokens", count, "prompt_lookup_num_tokens")
    most = asked.get("prompt_lookup_max", asked.get("max_matching_ngram_size"))
    least = asked.get("prompt_lookup_min")
    if most is not None or least is not None:
        most = int(most) if most is not None else max(4, int(least or 1))
        put("ngram", (int(least or 1), most), "prompt_lookup_max")
    if "rejection_sample_method" in asked:
        method = str(asked["rejection_sample_method"])
        if method not in RULES:
            raise UnknownName("rejection_sample_method", method, RULES)
        put("rule", RULES[method], "rejection_sample_method")
    _refuse(asked)
    return found


def _refuse(asked: Mapping[str, Any]) -> None:
    if asked.get("draft_sample_method", "probabilistic") != "probabilistic":
        raise ConfigurationError(
            "draft_sample_method must be 'probabilistic': drafts are drawn from the draft model's "
            f"own law; got {asked['draft_sample_method']!r}; leave it out"
        )
    if asked.get("num_assistant_tokens_schedule", "constant") != "constant":
        raise ConfigurationError(
            "num_assistant_tokens_schedule must be 'constant'; got "
            f"{asked['num_assistant_tokens_schedule']!r}; set num_assistant_tokens alone"
        )
    if asked.get("assistant_confidence_threshold", 0):
        raise ConfigurationError(
            "assistant_confidence_threshold is not supported: drafts have a fixed length; got "
            f"{asked['assistant_confidence_threshold']!r}; leave it out"
        )
    if asked.get("assistant_ensemble_weight") is not None:
        raise ConfigurationError(
            "assistant_ensemble_weight changes the law of the text; got "
            f"{asked['assistant_ensemble_weight']!r}; leave it out, or ask for a lossy rule by name"
        )
